"""What the README shows runs."""

import re
from pathlib import Path

from kvburst import BurstController

README = Path(__file__).parent.parent / "README.md"


def test_example_in_the_readme_runs() -> None:
    (example,) = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)
    names: dict[str, object] = {}
    exec(compile(example, str(README), "exec"), names)
    controller = names["controller"]
    assert isinstance(controller, BurstController)
    controller.ack_load_queue.clear()
    assert not controller.has_inflight_device_transfers()
    assert controller.host_allocator.available_pages == 246


def test_readme_is_short() -> None:
    assert len(README.read_text().splitlines()) <= 150
