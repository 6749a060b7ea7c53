"""What the commands share: how options are read, files checked and written, errors told."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from kvburst._core import KVBurstError

if TYPE_CHECKING:
    from kvburst.timeline import Flight


class Commands(TyperGroup):
    """The commands. A value that is none of an option's is refused in plain words."""

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            # How pydantic, which some releases of typer use, begins what they say.
            error.message = error.message.removeprefix("Value error, ")
            raise


def whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is not a whole number") from error


def number(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is not a number") from error


JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Also write the result as JSON.")
]
TimelineFile = Annotated[
    Path | None,
    typer.Option(
        "--timeline",
        metavar="FILE",
        help="Also write what ran where and when, for ui.perfetto.dev or chrome://tracing.",
    ),
]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="Print nothing, unless bytes are wrong.")
]


@contextmanager
def one_line_errors(command: str) -> Iterator[None]:
    """What is wrong with the options or the machine ends the command with one line, not a trace."""
    try:
        yield
    except (KVBurstError, OSError) as error:
        typer.echo(f"kvburst {command}: {error}", err=True)
        raise typer.Exit(2) from error


def check_file(option: str, file: Path | None) -> None:
    """Before anything runs, not after it."""
    if file is None:
        return
    if file.is_dir():
        raise KVBurstError(f"{option}: {str(file)!r} is a folder")
    if not file.parent.is_dir():
        raise KVBurstError(f"{option}: {str(file.parent)!r} is not a folder")


def write_timeline(file: Path | None, flights: "Sequence[Flight]") -> None:
    if file is not None:
        from kvburst.timeline import save

        try:
            save(file, flights)
        except OSError as error:
            raise KVBurstError(f"--timeline: cannot write {file}: {error.strerror}") from error


def write_json(file: Path | None, content: dict[str, Any]) -> None:
    if file is not None:
        try:
            file.write_text(json.dumps(content, indent=2) + "\n")
        except OSError as error:
            raise KVBurstError(f"--json: cannot write {file}: {error.strerror}") from error
