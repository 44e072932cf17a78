"""Runs the command, as `python -m carpool`, with the interpreter that is named."""

from carpool.cli.main import main

main()
