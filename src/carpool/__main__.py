"""`python -m carpool`: the command, with the interpreter that is named."""

from carpool.cli.main import main

main()
