"""The options by which verbs that ask a running server know it, and are known to it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from carpool.errors import InvalidInput

if TYPE_CHECKING:
    from carpool.lab.load.facts import Trust

VARIABLE = "CARPOOL_API_KEY"

_PANEL = "The server"
_KEY = re.compile(r"[!-~]{1,512}")

ApiKeyFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help=f"File with the key for the server; without it, {VARIABLE} of the environment.",
        show_default=False,
        rich_help_panel=_PANEL,
    ),
]
Ca = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Certificate of whoever signed the server's, for https://.",
        show_default=False,
        rich_help_panel=_PANEL,
    ),
]
Insecure = Annotated[
    bool,
    typer.Option("--insecure", help="Believe any certificate: for trying out.", rich_help_panel=_PANEL),
]


def trust(
    api_key_file: Path | None, ca: Path | None, insecure: bool, environ: Mapping[str, str] | None = None
) -> Trust:
    """A key is never an option: other users of the machine see those."""
    from carpool.lab.load.facts import Trust  # not needed to show the help

    key = (os.environ if environ is None else environ).get(VARIABLE, "").strip()
    if api_key_file is not None:
        key = _read(api_key_file)
    if key and not _KEY.fullmatch(key):
        raise InvalidInput(f"the key in {api_key_file or VARIABLE} must be up to 512 printable characters")
    return Trust("" if ca is None else str(ca), insecure, key)


def _read(file: Path) -> str:
    """The key alone, or the first line 'name key …' of a file as the server has it."""
    try:
        lines = file.read_text("ascii").splitlines()
    except (OSError, UnicodeDecodeError):
        raise InvalidInput(f"--api-key-file {file} cannot be read", field="--api-key-file") from None
    for line in lines:
        words = line.split()
        if words and not words[0].startswith("#"):
            return words[0] if len(words) == 1 else words[1]
    raise InvalidInput(f"--api-key-file {file} holds no key", field="--api-key-file")
