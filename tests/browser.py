"""A headless Chromium, if there is one: what it makes of a page."""

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")

# Added to the page: what only a browser knows, as attributes that the dump shows.
PROBE = """
<script>
addEventListener("load", () => {
  const found = document.body.dataset;
  found.broken = [...document.images].filter(image => !image.naturalWidth).length;
  found.pictures = document.images.length;
  found.width = document.documentElement.scrollWidth - innerWidth;
  found.height = document.documentElement.scrollHeight;
  found.remote = performance.getEntriesByType("resource").filter(
    entry => !entry.name.startsWith("data:")).length;
});
</script>
"""


@dataclass(frozen=True)
class Rendering:
    """Pictures, those that did not load, requests for other files, pixels that the page is wider
    than its window, its height, and what the console said."""

    pictures: int
    broken: int
    remote: int
    too_wide: int
    height: int
    console: tuple[str, ...]


def browser() -> str | None:
    return next((found for name in NAMES if (found := shutil.which(name))), None)


def render(html: str, scratch: Path, width: int = 1280) -> Rendering:
    """How the page looks in a window of that width. Needs a `browser`."""
    path = scratch / "page.html"
    path.write_text(html.replace("</body>", f"{PROBE}</body>"))
    program = browser()
    assert program is not None
    done = subprocess.run(
        [
            program,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--enable-logging=stderr",
            "--virtual-time-budget=5000",
            f"--window-size={width},900",
            f"--user-data-dir={scratch / 'profile'}",
            "--dump-dom",
            path.as_uri(),
        ],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    found = dict(re.findall(r'data-(\w+)="(-?\d+)"', done.stdout))
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return Rendering(
        pictures=int(found["pictures"]),
        broken=int(found["broken"]),
        remote=int(found["remote"]),
        too_wide=int(found["width"]),
        height=int(found["height"]),
        console=tuple(console),
    )
