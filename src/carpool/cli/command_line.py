"""Reads a command line into a verb: a frozen dataclass whose fields are its arguments and options.

Options and arguments may be mixed; `--name value` and `--name=value` are the same; after `--` everything is
an argument. An option takes the next word as its value, also one that begins with a dash.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from difflib import get_close_matches
from enum import Enum
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from carpool.cli.verb_options import Declared
from carpool.errors import InvalidInput


class Mistake(Exception):
    """Says what is wrong with a command line; the help of `command` says what is right."""

    def __init__(self, message: str, command: str) -> None:
        super().__init__(f"{message} Try: {command} --help")


@dataclass(frozen=True, slots=True, kw_only=True)
class Param:
    """Describes an argument or an option of a verb."""

    name: str  # of the field
    opts: tuple[str, ...]  # as it is typed; of an argument, its name
    off: str = ""  # `--no-…`, of a flag that has it
    kind: type[Any]
    many: bool = False
    default: Any = MISSING
    declared: Declared

    @property
    def required(self) -> bool:
        return self.default is MISSING

    @property
    def is_argument(self) -> bool:
        return self.declared.is_argument

    @property
    def is_flag(self) -> bool:
        return self.kind is bool

    @property
    def choices(self) -> tuple[str, ...]:
        return tuple(str(one.value) for one in self.kind) if issubclass(self.kind, Enum) else ()

    @property
    def shown(self) -> str:
        """Returns its name in errors."""
        return (self.declared.metavar or self.name) if self.is_argument else self.opts[0]


def flag(name: str, words: str) -> Param:
    """Returns an option that has no field."""
    return Param(name=name, opts=(f"--{name}",), kind=bool, default=False, declared=Declared(help=words))


HELP = flag("help", "Show this message and exit.")


def params_of(verb: type[Any]) -> list[Param]:
    """Returns a verb's arguments and options in the order in which its help lists them."""
    hints = get_type_hints(verb, include_extras=True)
    bases = [base for base in verb.__mro__ if "listed_last" in vars(base)]
    late = {name for base in bases for name in base.__annotations__}
    found = []
    for one in sorted(fields(verb), key=lambda one: one.name in late):
        hint, declared = hints[one.name], one.metadata.get("option")
        if declared is None:
            hint, declared = get_args(hint)
        kind, many = _kind(hint)
        name = declared.name or f"--{one.name.replace('_', '-')}"
        on, _, off = name.partition("/")
        opts = (one.name,) if declared.is_argument else (on,)
        found.append(
            Param(
                name=one.name,
                opts=opts,
                off=off,
                kind=kind,
                many=many,
                default=one.default,
                declared=declared,
            )
        )
    return found


def _kind(hint: Any) -> tuple[type[Any], bool]:
    """Returns the type of one value, and whether there may be several."""
    options = [one for one in get_args(hint) if one is not NoneType]
    if get_origin(hint) is list:
        return options[0], True
    return _kind(options[0]) if options else (hint, False)


def read(params: Sequence[Param], words: Sequence[str], command: str) -> dict[str, Any] | None:
    """Returns the values of fields that were given; nothing if the help was asked for."""
    options, arguments = split((*params, HELP), words, command)
    if any(param is HELP for param, _ in options):
        return None
    values: dict[str, Any] = {param.name: given for param, given in options if isinstance(given, bool)}
    texts: dict[str, list[str]] = {}
    for param, given in options:
        if isinstance(given, str):
            texts.setdefault(param.name, []).append(given)
    by_name = {param.name: param for param in params}
    values |= {name: _converted(by_name[name], found, command) for name, found in texts.items()}
    rest = list(arguments)
    for param in params:
        if param.is_argument:
            found, rest = (rest, []) if param.many else (rest[:1], rest[1:])
            values |= _given_or_set(param, found, command)
    for param in params:
        if param.name not in values:
            values |= _given_or_set(param, [], command)
    if rest:
        raise Mistake(f"Got unexpected extra argument(s) ({' '.join(rest)}).", command)
    return values


def split(
    params: Sequence[Param], words: Sequence[str], command: str
) -> tuple[list[tuple[Param, str | bool]], list[str]]:
    """Returns the options in their order, each with its text or whether a flag is on, and the arguments."""
    known = {name: one for one in params if not one.is_argument for name in (*one.opts, one.off) if name}
    options: list[tuple[Param, str | bool]] = []
    arguments: list[str] = []
    waiting = iter(words)
    for word in waiting:
        if word == "--":
            arguments += waiting
        elif not word.startswith("-") or word == "-":
            arguments.append(word)
        else:
            options.append(_option(known, word, waiting, command))
    return options, arguments


def _option(
    known: Mapping[str, Param], word: str, waiting: Iterator[str], command: str
) -> tuple[Param, str | bool]:
    name, given, text = word.partition("=")
    param = known.get(name)
    if param is None:
        name = name if name.startswith("--") else name[:2]
        meant = ", ".join(sorted(get_close_matches(name, known)))
        raise Mistake(f"No such option: {name}{f' (Possible options: {meant})' if meant else ''}.", command)
    if param.is_flag:
        if given and (name == param.off or not param.off):
            raise Mistake(f"Option {name!r} does not take a value.", command)
        return param, is_on(name, text) if given else name != param.off
    if not given:
        following = next(waiting, None)
        if following is None:
            raise Mistake(f"Option {name!r} requires an argument.", command)
        text = following
    return param, text


def is_on(name: str, text: str) -> bool:
    """Reads the value of a flag: Triton's users write --exit-on-error=true."""
    from carpool.config.server import FALSE, TRUE

    if text.lower() not in (*TRUE, *FALSE):
        raise InvalidInput(f"{name} must be true or false, not {text!r}")
    return text.lower() in TRUE


def _given_or_set(param: Param, found: list[str], command: str) -> dict[str, Any]:
    """Returns the value of what was given, or set by an environment variable; nothing: its default."""
    variable = os.environ.get(param.declared.envvar, "") if param.declared.envvar else ""
    texts = found or ([variable] if variable else [])
    if texts:
        return {param.name: _converted(param, texts, command)}
    if param.required:
        kind = "argument" if param.is_argument else "option"
        choices = f" Choose from: {', '.join(param.choices)}." if param.choices else ""
        raise Mistake(f"Missing {kind} '{param.shown}'.{choices}", command)
    return {}


def _converted(param: Param, texts: list[str], command: str) -> Any:
    try:
        values = [_value(param, text) for text in texts]
    except ValueError as error:
        raise Mistake(f"Invalid value for '{param.shown}': {error}.", command) from None
    return values if param.many else values[-1]


_NUMBERS = {int: "it must be a whole number", float: "it must be a number"}


def _value(param: Param, text: str) -> Any:
    if param.choices:
        if text not in param.choices:
            one_of = "one of " if len(param.choices) > 1 else ""
            raise ValueError(f"{text!r} is not {one_of}{', '.join(map(repr, param.choices))}")
        return param.kind(text)
    if param.kind not in _NUMBERS:
        return param.kind(text)
    try:
        value = param.kind(text)
    except ValueError:
        raise ValueError(_NUMBERS[param.kind]) from None
    least, most = param.declared.min, param.declared.max
    if (least is not None and not value >= least) or (most is not None and not value <= most):
        raise ValueError(f"{value} is not in the range {_range(least, most)}")
    return value


def _range(least: float | None, most: float | None) -> str:
    if least is None or most is None:
        return f"x<={most}" if least is None else f"x>={least}"
    return f"{least}<=x<={most}"
