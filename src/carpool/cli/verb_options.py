"""Defines how a verb declares its options, those that several share, and the checks of what was typed."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar

from carpool.errors import InvalidInput

if TYPE_CHECKING:
    import asyncio

    from carpool.client.client import Client
    from carpool.lab.load.facts import Trust

MODEL, TRAFFIC, DEVICE, RUN, SERVER = "The model", "Traffic", "The device", "The run", "The server"
FLEET, CORES = "The fleet", "The cores"
"""Panels of the help."""

KEY_VARIABLE = "CARPOOL_API_KEY"
_KEY = re.compile(r"[!-~]{1,512}")

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """Describes one argument or option of a verb, beside its field's type and default."""

    help: str
    panel: str | None = None  # of the help
    name: str = ""  # of the option, where it is not the field's; `--on/--no-on` is a flag that has both
    metavar: str = ""  # what the help calls its value
    envvar: str = ""  # the variable that sets it
    min: float | None = None
    max: float | None = None
    show_default: bool | str = True  # or what the help says in place of the default
    is_argument: bool = False  # it stands without a name


def option(
    default: Value, words: str, panel: str | None = None, *, name: str | None = None, **more: Any
) -> Value:
    """Returns a field of a verb's dataclass: its default, and what the help says of it."""
    return field(default=default, metadata={"option": described(panel, words, name or "", **more)})


def argument(words: str, *, default: Any = MISSING, **more: Any) -> Any:
    """As `option`, for what stands without a name; it is needed unless it has a default."""
    return field(
        default=default,
        metadata={"option": Declared(help=words, is_argument=True, show_default=False, **more)},
    )


def described(panel: str | None, words: str, name: str = "", **more: Any) -> Declared:
    return Declared(help=words, panel=panel, name=name, **more)


Noise = Annotated[float, described(DEVICE, "Variation of batch times: sigma of a lognormal factor.")]
Seed = Annotated[int, described(RUN, "Random seed; the same seed gives the same run.")]
Json = Annotated[bool, described(RUN, "Print one JSON object.", "--json")]
URL_VARIABLE = "CARPOOL_URL"
DEFAULT_URL = "http://localhost:8000"
ServerUrl = Annotated[str, Declared(help="Address of the server.", envvar=URL_VARIABLE, metavar="URL")]

MOST_IN_A_BATCH = 4096


def number(
    option: str, value: float, *, above: float | None = None, least: float = 0.0, most: float = 1e9
) -> float:
    """Returns the value, if it lies strictly `above`, or else from `least`, up to `most`."""
    low_enough = value > above if above is not None else value >= least
    if isfinite(value) and low_enough and value <= most:
        return value
    valid = f"above {above:g} and at most" if above is not None else f"from {least:g} to"
    raise InvalidInput(f"{option} must be {valid} {most:,.9g}, not {value:g}")


def whole(option: str, value: int, *, least: int, most: int) -> int:
    if least <= value <= most:
        return value
    raise InvalidInput(f"{option} must be a whole number from {least} to {most:,}, not {value}")


def stop_on_signal(again: Callable[[], object]) -> asyncio.Event:
    """Set by Ctrl-C, in a running loop; the second one calls `again`."""
    import asyncio

    stop = asyncio.Event()

    def interrupted() -> None:
        if stop.is_set():
            again()
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, interrupted)
    return stop


@contextmanager
def blamed_on(option: str) -> Iterator[None]:
    """What is wrong inside was asked for by this option."""
    try:
        yield
    except InvalidInput as error:
        raise InvalidInput(f"{option}: {error.message}") from None


# ---- options that several verbs have


"""Their options are listed after a verb's own."""


def trust(
    api_key_file: Path | None, ca: Path | None, insecure: bool, environ: Mapping[str, str] | None = None
) -> Trust:
    """A key is never an option: other users of the machine see those."""
    from carpool.lab.load.facts import Trust  # not needed to show the help

    key = (os.environ if environ is None else environ).get(KEY_VARIABLE, "").strip()
    if api_key_file is not None:
        key = _read_key(api_key_file)
    if key and not _KEY.fullmatch(key):
        where = api_key_file or KEY_VARIABLE
        raise InvalidInput(f"the key in {where} must be up to 512 printable characters")
    return Trust("" if ca is None else str(ca), insecure, key)


def _read_key(file: Path) -> str:
    """The key alone, or the first line 'name key …' of a file as the server has it."""
    try:
        lines = file.read_text("ascii").splitlines()
    except (OSError, UnicodeDecodeError):
        raise InvalidInput(f"--api-key-file {file} cannot be read") from None
    for line in lines:
        words = line.split()
        if words and not words[0].startswith("#"):
            return words[0] if len(words) == 1 else words[1]
    raise InvalidInput(f"--api-key-file {file} holds no key")


@dataclass(frozen=True, kw_only=True)
class AsksServer:
    """Defines a verb that may ask a running server."""

    listed_last: ClassVar[bool] = True

    as_json: Json = False
    api_key_file: Path | None = option(
        None,
        f"File with the server's API key. Default: the variable {KEY_VARIABLE}.",
        SERVER,
        metavar="FILE",
    )
    ca: Path | None = option(None, "CA certificate of the server, for https://.", SERVER, metavar="FILE")
    insecure: bool = option(False, "Accept any certificate (for tests only).", SERVER)

    def trust(self) -> Trust:
        return trust(self.api_key_file, self.ca, self.insecure)

    def client(self, option: str, url: str, patience_s: float, connections: int) -> Client:
        """Returns a client for the server that was named by this option."""
        from carpool.client.client import Client

        known = self.trust()
        with blamed_on(option):
            return Client(
                url,
                api_key=known.key,
                ca=known.ca,
                insecure=known.insecure,
                patience_s=patience_s,
                connections=connections,
            )
