"""Implements `carpool`: the verbs, and errors that fit on one line."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from carpool import __version__
from carpool.cli.command_line import HELP, Mistake, flag, params_of, read, split
from carpool.cli.terminal_text import guard_terminal
from carpool.cli.verbs import by_panel, listed, verb_class
from carpool.compiling import form, other_form
from carpool.errors import CarpoolError

_VERSION = flag("version", "Show the version.")
_ABOUT = """
    Serve vision models within a latency SLO.

    Answer within 50 ms, or reject early:

        carpool serve resnet50.onnx --slo-ms 50

    Show what a model is, and how it would be served:

        carpool inspect yolov8n.onnx

    Send an image to a running server, or load:

        carpool predict street.jpg

        carpool load http://localhost:8000 --rate 500 --slo-ms 50

    Measure batch times on this machine, and which SLO they allow:

        carpool profile resnet50.onnx --slo-ms 30,50,100

    Simulate three times the traffic that a model can sustain (4 ms per batch, 1 ms per image):

        carpool simulate --curve 4+1 --slo-ms 50 --load 3 --compare

    Plan the replicas for 500 requests/s that triple now and then:

        carpool plan --curve 4+1 --slo-ms 50 --rate 500 --surge 3

    carpool COMMAND --help explains a command, with examples.
"""


def main(words: Sequence[str] | None = None) -> NoReturn:
    """Runs a command line, and ends with an exit code: 2 if the command was wrong, 1 if it could not be done.

    A mistake of the user is one line on stderr, with no traceback.
    """
    guard_terminal()
    try:
        code = _run(list(sys.argv[1:] if words is None else words))
    except (Mistake, CarpoolError) as error:
        code = _failed(str(error), getattr(error, "exit_code", 2))
    except KeyboardInterrupt:
        code = 130
    except EOFError:  # of a question in the terminal
        code = _failed("stopped", 2)
    except OSError as error:  # a full disk, a read-only folder, a closed pipe
        if error.strerror is None:
            raise
        code = 1
        if error.errno == errno.EPIPE:  # the reader of the output has gone
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        else:
            _failed(f"{error.filename}: {error.strerror}" if error.filename else error.strerror, 1)
    sys.exit(code)


def _failed(message: str, code: int) -> int:
    print(f"carpool: {message}", file=sys.stderr)
    return code


def _run(words: list[str]) -> int:
    if not words or words[0].startswith("-"):
        return _answer_without_verb(words[:1])
    name, *words = words
    command = f"carpool {name}"
    verb = verb_class(name)
    if verb is None:
        raise Mistake(_unknown(name), "carpool")
    params = params_of(verb)
    values = read(params, words, command)
    if values is None:
        from carpool.cli.help_page import verb_help

        print(verb_help(command, verb.__doc__ or "", params), end="")
        return 0
    code: int | None = verb(**values).run()
    return code or 0


def _answer_without_verb(words: Sequence[str]) -> int:
    options, _ = split((_VERSION, HELP), words, "carpool")
    if any(param is _VERSION for param, _ in options):
        print(f"carpool {__version__} ({form()})\n{other_form()}")
        return 0
    from carpool.cli.help_page import general_help

    print(general_help("carpool", _ABOUT, by_panel(), (_VERSION, HELP)), end="")
    return 0


def _unknown(name: str) -> str:
    from difflib import get_close_matches

    meant = ", ".join(map(repr, get_close_matches(name, listed())))
    return f"No such command {name!r}.{f' Did you mean {meant}?' if meant else ''}"
