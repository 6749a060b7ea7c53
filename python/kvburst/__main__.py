"""``python -m kvburst``: the command ``kvburst``."""

from kvburst.cli import main

main()
