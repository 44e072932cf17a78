"""How `carpool` ends: a mistake is one line, Ctrl-C is 130, and a reader that has gone is no traceback."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import pytest

from carpool.cli.command_line import read
from cli_run import params, run_cli

COMMAND = [sys.executable, "-m", "carpool", "completion", "bash"]


def test_what_a_verb_raises_is_one_line_and_a_code(monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[BaseException] = []

    def run(_: object) -> None:
        raise raised[-1]

    monkeypatch.setattr("carpool.cli.doctor_command.Doctor.run", run)
    for error, code, line in (
        (KeyboardInterrupt(), 130, ""),
        (EOFError(), 2, "carpool: stopped\n"),
        (OSError(errno.ENOSPC, "No space left on device"), 1, "carpool: No space left on device\n"),
        (OSError(errno.EROFS, "Read-only", "/x"), 1, "carpool: /x: Read-only\n"),
    ):
        raised.append(error)
        done = run_cli(["doctor"])
        assert (done.exit_code, done.stdout, done.stderr) == (code, "", line)
    raised.append(OSError("ours"))
    with pytest.raises(OSError, match="ours"):
        run_cli(["doctor"])


def test_ctrl_c_ends_a_verb_with_130() -> None:
    code = (
        "import os, signal; import carpool.cli.main as cli;"
        "signal.signal(signal.SIGINT, signal.default_int_handler);"  # a shell's background jobs ignore it
        "cli._run = lambda _: os.kill(os.getpid(), signal.SIGINT); cli.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_a_reader_that_has_gone_leaves_no_traceback() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(COMMAND, stdout=writer, stderr=subprocess.PIPE, check=False)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (1, b"")


def test_options_and_arguments_may_be_mixed() -> None:
    given = ["models", "--slo-ms=50", "--host", "-x", "more", "--on-demand", "--", "--last"]
    values = read(params("serve"), given, "carpool serve")
    assert values is not None
    assert [str(path) for path in values.pop("paths")] == ["models", "more", "--last"]
    assert values == {"slo_ms": 50.0, "host": "-x", "on_demand": True}


def test_the_last_value_counts_unless_all_do() -> None:
    assert read(params("serve"), ["--slo-ms", "1", "--slo-ms", "2"], "carpool serve") == {"slo_ms": 2.0}
    found = read(params("simulate"), ["--step", "1", "--step", "2 after 1"], "carpool simulate")
    assert found == {"step": ["1", "2 after 1"]}


def test_help_is_shown_beside_whatever_else_is_right() -> None:
    assert run_cli(["serve", "--http-port", "x", "--help"]).stdout.startswith("Usage: carpool serve ")
    assert run_cli([]).stdout == run_cli(["--help"]).stdout


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("simulat", "No such command 'simulat'. Did you mean 'simulate'? Try: carpool --help"),
        ("--verson", "No such option: --verson (Possible options: --version). Try: carpool --help"),
        ("predict -x.jpg", "No such option: -x. Try: carpool predict --help"),
        ("serve --slo-ms", "Option '--slo-ms' requires an argument. Try: carpool serve --help"),
        ("doctor --json=1", "Option '--json' does not take a value. Try: carpool doctor --help"),
        ("doctor more", "Got unexpected extra argument(s) (more). Try: carpool doctor --help"),
        ("label fly", "Invalid value for 'export': 'fly' is not 'export'. Try: carpool label --help"),
        ("cache", "Missing argument 'status|clear'. Choose from: status, clear. Try: carpool cache --help"),
        ("predict --top-k 0 x", "Invalid value for '--top-k': 0 is not in the range 1<=x<=1000. "),
        ("serve --slo-ms 0", "Invalid value for '--slo-ms': 0.0 is not in the range x>=0.001. "),
    ],
)
def test_a_mistake_says_what_and_where_to_look(words: str, line: str) -> None:
    done = run_cli(words.split())
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith(f"carpool: {line}")
    assert done.stderr.count("\n") == 1
