"""Lays out `--help` for a terminal of 80 columns: nothing is cut off, and examples can be copied."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from typer.core import TyperCommand

from carpool.cli.verb_options import CORES, DEVICE, FLEET, MODEL, RUN, SERVER, TEXT, TRAFFIC

_NARROWEST, _WIDEST = 60, 100
_WIDEST_NAME = 26  # a longer one stands on a line of its own
_CODE = "    "
_OTHERS = "Options"
_MIDDLE = 4
_RANKS = {_OTHERS: 0, MODEL: 1, TRAFFIC: 2, FLEET: 3, CORES: 5, TEXT: 6, DEVICE: 7, RUN: 8, SERVER: 9}
"""Panels that several verbs have; their base classes declare them in another order."""
_KINDS = {"float": "NUMBER", "float range": "NUMBER", "int": "N", "int range": "N", "path": "PATH"}


class Verb(TyperCommand):
    """Typer gives each kind of name a column, which leaves 20 characters for what an option does."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write(verb_help(self, ctx))


def option_rows(command: Any, context: Any) -> list[tuple[str, str]]:
    return [
        (_named(one), _meaning(one)) for one in command.get_params(context) if one.param_type_name == "option"
    ]


def verb_help(command: Any, context: Any) -> str:
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    panels = {"Arguments": [(_argument(one), _meaning(one)) for one in arguments]} if arguments else {}
    own = [one for one in command.get_params(context) if one.param_type_name == "option"]
    by_panel: dict[str, list[Any]] = {}
    for one in own:
        by_panel.setdefault(getattr(one, "rich_help_panel", None) or _OTHERS, []).append(one)
    rank = {**_RANKS, _OTHERS: 9} if by_panel[_OTHERS] == own[-1:] else _RANKS  # --help alone is last
    rows = {
        title: [(_named(one), _meaning(one)) for one in by_panel[title]]
        for title in sorted(by_panel, key=lambda title: rank.get(title, _MIDDLE))
    }
    return page(command, context, panels | rows)


def page(command: Any, context: Any, panels: Mapping[str, Iterable[tuple[str, str]]]) -> str:
    """Returns the usage, what the command does, and its panels of names with their meanings."""
    width = min(max(shutil.get_terminal_size().columns, _NARROWEST), _WIDEST)
    pieces = [_argument(one) for one in command.params if one.param_type_name == "argument"]
    if not pieces and hasattr(command, "list_commands"):
        pieces = ["COMMAND"]
    usage = f"Usage: {' '.join((context.command_path, *pieces))} [OPTIONS]"
    lines = [*textwrap.wrap(usage, width, subsequent_indent="  ", break_on_hyphens=False), ""]
    lines += _prose(command.help or "", width)
    for title, rows in panels.items():
        lines += [_bold(f"{title}:"), *_rows([*rows], width), ""]
    return "\n".join(lines).rstrip() + "\n"


def _prose(text: str, width: int) -> Iterator[str]:
    for part in text.strip().split("\n\n"):
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


def _rows(rows: list[tuple[str, str]], width: int) -> Iterator[str]:
    column = min(max(len(name) for name, _ in rows), _WIDEST_NAME)
    for name, meaning in rows:
        said = textwrap.wrap(meaning, width - column - 4, break_on_hyphens=False) or [""]
        first = f"  {name:<{column}}"
        if len(name) > column:
            yield first
            first = " " * (column + 2)
        yield f"{first}  {said[0]}"
        yield from (" " * (column + 4) + more for more in said[1:])


def _argument(argument: Any) -> str:
    choices = getattr(argument.type, "choices", None)
    name = argument.metavar or ("|".join(map(str, choices)) if choices else argument.name.upper())
    name += "…" if argument.nargs == -1 and "…" not in name else ""
    return name if argument.required else f"[{name.strip('[]')}]"


def _named(option: Any) -> str:
    names = ", ".join(option.opts)
    return names if option.is_flag else f"{names} {option.metavar or _kind(option.type)}"


def _kind(type_: Any) -> str:
    choices = getattr(type_, "choices", None)
    return "|".join(map(str, choices)) if choices else _KINDS.get(type_.name, "TEXT")


def _meaning(param: Any) -> str:
    facts = []
    least, most = getattr(param.type, "min", None), getattr(param.type, "max", None)
    if least is not None and most is not None:
        facts.append(f"{least:g} to {most:g}")
    if param.envvar:
        facts.append(f"variable: {param.envvar}")
    if param.required and param.param_type_name == "option":
        facts.append("required")
    if default := _default(param):
        facts.append(f"default: {default}")
    return " ".join((param.help or "").split()) + (f" [{'; '.join(facts)}]" if facts else "")


def _default(param: Any) -> str:
    shown = getattr(param, "show_default", False)
    if isinstance(shown, str):
        return shown
    default = param.default
    if not shown or callable(default) or default is None or default is False or default in ("", ()):
        return ""
    return f"{default:g}" if isinstance(default, float) else str(getattr(default, "value", default))


def _bold(text: str) -> str:
    return f"\x1b[1m{text}\x1b[0m" if sys.stdout.isatty() and not os.environ.get("NO_COLOR") else text
