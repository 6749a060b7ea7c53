"""Files that whoever reads them, or cuts this off, finds old or new, and never in part."""

from pathlib import Path


def replace_file(file: Path, text: str) -> None:
    """Writes ``text`` beside ``file``, and then puts it in its place."""
    beside = file.with_name(f".{file.name}.new")
    beside.write_text(text)
    beside.replace(file)
