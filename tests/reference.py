"""Lists of the documentation that are made from the code: options, variables, metrics, pairs of features.

`python tests/reference.py` writes them anew, each between its two marks on the page it belongs to.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from carpool.cli.command_line import Param
from carpool.cli.verbs import listed
from carpool.config.server import ServerSettings, variables
from carpool.observe.prometheus import chosen
from cli_run import params
from interactions import table

DOCS = Path(__file__).parents[1] / "docs"
MARK = re.compile(r"(<!-- generated: ([^\n]+) -->\n).*?(<!-- end -->)", re.DOTALL)

COMMON = ("--url", "--json", "--api-key-file", "--ca", "--insecure")  # of several verbs, in the same words
_OF_SERVER = {
    spec.metadata["option"].get("name", f"--{spec.name.replace('_', '-')}"): spec
    for spec in fields(ServerSettings)
    if spec.metadata.get("words")
}


def made(what: str) -> str:
    """What stands between the marks `generated: what` and `end`."""
    kind, _, name = what.partition(" ")
    makers = {
        "options": options,
        "common": common_options,
        "variables": server_variables,
        "metrics": metrics,
        "pairs": pairs,
    }
    return "".join(f"{line}\n" for line in makers[kind](name))


def options(verb: str) -> Iterator[str]:
    own = [param for param in _options(verb) if param.opts[0] not in COMMON or verb == "serve"]
    if own:
        yield from ("| option | default | meaning |", "|---|---|---|")
        for param in own:
            default = (
                _of_the_server(param.opts[0])
                if verb == "serve"
                else _shown(None if param.required else param.default)
            )
            yield f"| `{param.opts[0]}` | {default} | {_cell(param.declared.help)} |"


def common_options(_: str) -> Iterator[str]:
    """Those that several verbs have, with the verbs."""
    yield from ("| option | default | meaning | verbs |", "|---|---|---|---|")
    for option in COMMON:
        having = {
            verb: param
            for verb in listed()
            for param in _options(verb)
            if param.opts[0] == option and verb != "serve"
        }
        [meaning] = {_cell(param.declared.help) for param in having.values()}
        [default] = {_shown(param.default) for param in having.values()}
        yield f"| `{option}` | {default} | {meaning} | {', '.join(f'`{verb}`' for verb in having)} |"


def _options(verb: str) -> list[Param]:
    return [param for param in params(verb) if not param.is_argument]


def _of_the_server(option: str) -> str:
    spec = _OF_SERVER[option]
    return _cell(
        str(spec.metadata["option"].get("show_default") or _shown(getattr(ServerSettings(), spec.name)))
    )


def _shown(value: object) -> str:
    if value is None or value is False or value in ("", ()) or value == float("inf"):
        return ""
    value = value.value if isinstance(value, enum.Enum) else value
    return (
        f"{value:g}"
        if isinstance(value, float)
        else str(value).lower()
        if value is True
        else _cell(str(value))
    )


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").rstrip(".")


def server_variables(_: str) -> Iterator[str]:
    """Only those that are no options; an option's variable has its name."""
    yield from ("| variable | default | option |", "|---|---|---|")
    named = {spec.name: option for option, spec in _OF_SERVER.items()}
    for variable, name in variables().items():
        default = "1" if name == "frontends" else _shown_setting(getattr(ServerSettings(), name))
        option = f"[`{named[name]}`](cli.md#carpool-serve)" if name in named else "no option"
        yield f"| `{variable}` | {default} | {option} |"


def _shown_setting(value: object) -> str:
    shown = str(value) if isinstance(value, bool) else _shown(value)
    return f"`{shown}`" if isinstance(value, str) and shown else shown or "none"


def metrics(prefix: str) -> Iterator[str]:
    yield from ("| metric | kind | meaning |", "|---|---|---|")
    for family in chosen({"counter_latencies": True, "histogram_latencies": True}):
        if family.name.startswith(prefix):
            yield f"| `{family.name}` | {family.kind} | {_cell(family.help)} |"


def pairs(_: str) -> Iterator[str]:
    yield from table.part().rstrip().split("\n")


def written(text: str) -> str:
    """A page with all of its lists as the code has them."""
    return MARK.sub(lambda found: f"{found[1]}{made(found[2])}{found[3]}", text)


if __name__ == "__main__":
    for page in DOCS.rglob("*.md"):
        text = page.read_text("utf-8")
        if (made_anew := written(text)) != text:
            page.write_text(made_anew, "utf-8")
