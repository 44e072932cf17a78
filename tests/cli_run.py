"""Runs `carpool` in the tests' own process, with what is typed and what it prints."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from unittest.mock import patch

from carpool.cli.command_line import Param, params_of
from carpool.cli.main import main
from carpool.cli.verbs import verb_class


def params(verb: str) -> list[Param]:
    """Returns the arguments and options of a verb."""
    found = verb_class(verb)
    assert found is not None, verb
    return params_of(found)


@dataclass(frozen=True)
class CliResult:
    """What a command printed, and its exit code."""

    exit_code: int
    stdout: str
    stderr: str
    output: str  # both, in the order in which they were printed


class _Copied(io.BytesIO):
    def __init__(self, output: io.BytesIO) -> None:
        super().__init__()
        self._output = output

    def write(self, data: bytes) -> int:  # type: ignore[override]
        self._output.write(data)
        return super().write(data)


def run_cli(
    words: Sequence[str],
    *,
    env: Mapping[str, str | None] | None = None,
    input: bytes = b"",  # noqa: A002
) -> CliResult:
    """A mistake of our own is raised; whatever a user did wrong is a line on stderr and a code. A variable of
    `env` that is None is not there."""
    output = io.BytesIO()
    out, err = _Copied(output), _Copied(output)
    stdout = io.TextIOWrapper(out, "utf-8", write_through=True)
    stderr = io.TextIOWrapper(err, "utf-8", "backslashreplace", write_through=True)
    stdin = io.TextIOWrapper(io.BytesIO(input), "utf-8")
    code = None
    env = env or {}
    kept = {name: text for name, text in os.environ.items() if name not in env}
    given = {name: text for name, text in env.items() if text is not None}
    environment, keyboard = patch.dict("os.environ", kept | given, clear=True), patch("sys.stdin", stdin)
    with environment, keyboard, redirect_stdout(stdout), redirect_stderr(stderr):
        try:
            main(words)
        except SystemExit as ended:
            code = ended.code
    assert isinstance(code, int)
    return CliResult(code, *(one.getvalue().decode("utf-8", "replace") for one in (out, err, output)))
