"""Lays out `--help` for a terminal of 80 columns: nothing is cut off, and examples can be copied."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING
from inspect import cleandoc
from pathlib import Path

from carpool.cli.command_line import HELP, Param
from carpool.cli.verb_options import CORES, DEVICE, FLEET, MODEL, RUN, SERVER, TRAFFIC

_NARROWEST, _WIDEST = 60, 100
_WIDEST_NAME = 26  # a longer one stands on a line of its own
_CODE = "    "
_OTHERS = "Options"
_MIDDLE = 4
_RANKS = {_OTHERS: 0, MODEL: 1, TRAFFIC: 2, FLEET: 3, CORES: 5, DEVICE: 7, RUN: 8, SERVER: 9}
"""Panels that several verbs have; their base classes declare them in another order."""
_KINDS: Mapping[type, str] = {float: "NUMBER", int: "N", Path: "PATH"}


def verb_help(command: str, about: str, params: Sequence[Param]) -> str:
    """Returns what `carpool VERB --help` prints."""
    arguments = [one for one in params if one.is_argument]
    panels = {"Arguments": _described(arguments)} if arguments else {}
    by_panel: dict[str, list[Param]] = {}
    for one in params:
        if not one.is_argument:
            by_panel.setdefault(one.declared.panel or _OTHERS, []).append(one)
    rank = _RANKS if _OTHERS in by_panel else {**_RANKS, _OTHERS: 9}  # --help alone is last
    by_panel.setdefault(_OTHERS, []).append(HELP)
    titles = sorted(by_panel, key=lambda title: rank.get(title, _MIDDLE))
    panels |= {title: _described(by_panel[title]) for title in titles}
    return page(" ".join((command, *map(_argument, arguments))), about, panels)


def general_help(
    command: str, about: str, verbs: Mapping[str, Mapping[str, str]], options: Sequence[Param]
) -> str:
    """Returns what `carpool --help` prints: the verbs with their sentences by panel, and the options."""
    panels = {title: [*rows.items()] for title, rows in verbs.items()}
    return page(f"{command} COMMAND", about, {**panels, _OTHERS: _described(options)})


def page(command: str, about: str, panels: Mapping[str, Sequence[tuple[str, str]]]) -> str:
    """Returns the usage, what the command does, and its panels of names with their meanings."""
    width = min(max(shutil.get_terminal_size().columns, _NARROWEST), _WIDEST)
    usage = f"Usage: {command} [OPTIONS]"
    lines = [*textwrap.wrap(usage, width, subsequent_indent="  ", break_on_hyphens=False), ""]
    lines += _prose(cleandoc(about), width)
    for title, rows in panels.items():
        lines += [_bold(f"{title}:"), *_rows(rows, width), ""]
    return "\n".join(lines).rstrip() + "\n"


def _described(params: Iterable[Param]) -> list[tuple[str, str]]:
    return [(_argument(one) if one.is_argument else _named(one), _meaning(one)) for one in params]


def _prose(text: str, width: int) -> Iterator[str]:
    for part in text.split("\n\n"):
        if part.startswith(_CODE):
            for line in part.splitlines():
                yield from _example(line.strip(), width)
        else:
            yield from textwrap.wrap(part, width, break_on_hyphens=False, break_long_words=False)
        yield ""


def _example(command: str, width: int) -> Iterator[str]:
    """A long one goes on after a backslash, as the shell reads it; no word in quotes is torn apart."""
    parts: list[str] = []
    for word in shlex.split(command, posix=False):  # an option keeps its value
        if parts and not word.startswith("--") and parts[-1].startswith("--") and " " not in parts[-1]:
            parts[-1] += f" {word}"
        else:
            parts.append(word)
    line = f"{_CODE}{parts[0]}"
    for part in parts[1:]:
        if len(f"{line} {part} \\") > width:
            yield f"{line} \\"
            line = f"{_CODE}  {part}"
        else:
            line = f"{line} {part}"
    yield line


def _rows(rows: Sequence[tuple[str, str]], width: int) -> Iterator[str]:
    column = min(max(len(name) for name, _ in rows), _WIDEST_NAME)
    for name, meaning in rows:
        said = textwrap.wrap(meaning, width - column - 4, break_on_hyphens=False) or [""]
        first = f"  {name:<{column}}"
        if len(name) > column:
            yield first
            first = " " * (column + 2)
        yield f"{first}  {said[0]}"
        yield from (" " * (column + 4) + more for more in said[1:])


def _argument(argument: Param) -> str:
    name = argument.declared.metavar or "|".join(argument.choices) or argument.name.upper()
    name += "…" if argument.many and "…" not in name else ""
    return name if argument.required else f"[{name.strip('[]')}]"


def _named(option: Param) -> str:
    [name] = option.opts
    return name if option.is_flag else f"{name} {option.declared.metavar or _kind(option)}"


def _kind(option: Param) -> str:
    return "|".join(option.choices) or _KINDS.get(option.kind, "TEXT")


def _meaning(param: Param) -> str:
    declared, facts = param.declared, []
    if declared.min is not None and declared.max is not None:
        facts.append(f"{declared.min:g} to {declared.max:g}")
    if declared.envvar:
        facts.append(f"variable: {declared.envvar}")
    if param.required and not param.is_argument:
        facts.append("required")
    if default := _default(param):
        facts.append(f"default: {default}")
    return " ".join(declared.help.split()) + (f" [{'; '.join(facts)}]" if facts else "")


def _default(param: Param) -> str:
    shown, default = param.declared.show_default, param.default
    if isinstance(shown, str):
        return shown
    if not shown or default is MISSING or default is None or default is False or default in ("", ()):
        return ""
    return f"{default:g}" if isinstance(default, float) else str(getattr(default, "value", default))


def _bold(text: str) -> str:
    return f"\x1b[1m{text}\x1b[0m" if sys.stdout.isatty() and not os.environ.get("NO_COLOR") else text
