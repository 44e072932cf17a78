"""Implements `carpool completion`: a script with which a shell completes verbs, options, choices and files.

The script holds all names, so that a shell starts no Python at a press of Tab.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from shlex import quote

from carpool import __version__
from carpool.cli import verb_options as o
from carpool.cli.command_line import Param, params_of
from carpool.cli.verbs import listed, verb_class

Shell = StrEnum("Shell", ["bash", "zsh", "fish"])


@dataclass(frozen=True, kw_only=True)
class Completion:
    """Print a script that completes verbs, options, choices and files in a shell.

    Each shell looks for the script in a folder of its own:

        carpool completion bash > ~/.local/share/bash-completion/completions/carpool
        carpool completion zsh > /usr/local/share/zsh/site-functions/_carpool
        carpool completion fish > ~/.config/fish/completions/carpool.fish

    Write it anew after an upgrade.
    """

    shell: Shell = o.argument("The shell.", metavar="bash|zsh|fish")

    def run(self) -> None:
        print(f"#compdef carpool\n{_HEAD}" if self.shell is Shell.zsh else _HEAD)
        if self.shell is Shell.fish:
            print("\n".join(_fish()))
        else:
            print("\n".join(_found()) + (_BASH if self.shell is Shell.bash else _ZSH), end="")


_HEAD = f"# Completes the command line of carpool {__version__}; written by carpool completion."

_BASH = """
_carpool() {
    local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} found files
    if [ "$word" = = ]; then
        word=
    elif [ "$before" = = ]; then
        before=${COMP_WORDS[COMP_CWORD-2]}
    fi
    _carpool_find "${COMP_WORDS[1]}" "$before" "$word" "$COMP_CWORD"
    COMPREPLY=($(compgen -W "$found" -- "$word"))
    [ -z "$files" ] || compopt -o default
}
complete -F _carpool carpool
"""

_ZSH = """
_carpool() {
    local verb=${words[2]} before=${words[CURRENT-1]} word=${words[CURRENT]} found files
    _carpool_find "$verb" "$before" "$word" $((CURRENT - 1))
    [ -z "$found" ] || compadd -- ${=found}
    [ -z "$files" ] || _files
}
if [ "$funcstack[1]" = _carpool ]; then _carpool "$@"; else compdef _carpool carpool; fi
"""


def _verbs() -> dict[str, list[Param]]:
    found = {name: verb_class(name) for name in listed()}
    return {name: params_of(verb) for name, verb in found.items() if verb is not None}


def _found() -> Iterator[str]:
    """Yields a function of bash and zsh, which sets `found`, and `files` where files are completed, too."""
    verbs = _verbs()
    yield "_carpool_find() {  # of the verb, the word before, the word, and its number"
    yield "    found= files="
    yield '    [ "$4" -gt 1 ] || { found=' + quote(" ".join((*verbs, "--version", "--help"))) + "; return; }"
    yield '    case "$1 $2" in'
    for verb, params in verbs.items():
        for param in params:
            if not param.is_argument and not param.is_flag:
                value = f"found={quote(' '.join(param.choices))}" if param.choices else _else_files(param)
                yield f"    {quote(f'{verb} {param.opts[0]}')}) {value}; return ;;"
    yield "    esac"
    yield '    case "$1 $3" in'
    for verb, params in verbs.items():
        yield f"    {quote(f'{verb} -')}*) found={quote(' '.join(_options(params)))}; return ;;"
    yield "    esac"
    yield '    case "$1 $4" in'
    for verb, params in verbs.items():
        first = next((one for one in params if one.is_argument), None)
        if first is not None and first.choices:
            yield f"    {quote(f'{verb} 2')}) found={quote(' '.join(first.choices))}; return ;;"
    yield "    esac"
    yield "    files=yes"
    yield "}"


def _options(params: Sequence[Param]) -> list[str]:
    names = [name for one in params if not one.is_argument for name in (*one.opts, one.off) if name]
    return [*names, "--help"]


def _else_files(param: Param) -> str:
    return "files=yes" if _is_file(param) else ":"


def _is_file(param: Param) -> bool:
    return param.kind is Path or param.declared.metavar in ("FILE", "FOLDER")


def _fish() -> Iterator[str]:
    yield "complete -c carpool -f"
    for option, sentence in (("version", "Show the version."), ("help", "Show this message and exit.")):
        yield f"complete -c carpool -n __fish_use_subcommand -l {option} -d {quote(sentence)}"
    for name, verb in listed().items():
        yield f"complete -c carpool -n __fish_use_subcommand -a {name} -d {_fish_text(verb.sentence)}"
    for name, params in _verbs().items():
        here = f"complete -c carpool -n '__fish_seen_subcommand_from {name}'"
        for param in params:
            about = f"-d {_fish_text(param.declared.help)}"
            if not param.is_argument:
                value = "" if param.is_flag else _fish_value(param)
                yield f"{here} -l {param.opts[0].removeprefix('--')}{value} {about}"
            elif param.choices:
                yield f"{here} -a {quote(' '.join(param.choices))}"
            else:
                yield f"{here} -F"
        yield f"{here} -l help -d 'Show this message and exit.'"


def _fish_value(param: Param) -> str:
    if param.choices:
        return f" -xa {quote(' '.join(param.choices))}"
    return " -rF" if _is_file(param) else " -x"


def _fish_text(text: str) -> str:
    plain = " ".join(text.split()).replace("\\", "\\\\").replace("'", "\\'")
    return f"'{plain}'"
