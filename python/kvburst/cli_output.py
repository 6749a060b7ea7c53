"""Where the commands print."""

import os
import sys
from typing import NoReturn

from rich.console import Console

# What a shell reports of a command that a closed pipe has ended: 128 and the number of SIGPIPE.
CLOSED_PIPE = 141


class Output(Console):
    """Standard output. If its reader has gone (``| head``), the command ends without a word, as by
    SIGPIPE: what it has not written by then, no file gets either."""

    def on_broken_pipe(self) -> NoReturn:
        # What Python still holds for standard output would fail again at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(CLOSED_PIPE)
