"""`carpool completion`: what a shell offers at a press of Tab."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from cli_run import params, run_cli

SHOW = """
compopt() { echo FILES; }
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
_carpool
echo "${COMPREPLY[@]}"
"""


def offered(script: str, *words: str) -> list[str]:
    done = subprocess.run(
        ["bash", "-c", f"{script}\n{SHOW}", "bash", "carpool", *words],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_bash_completes_verbs_options_choices_and_files() -> None:
    script = run_cli(["completion", "bash"]).stdout
    assert {"serve", "deploy", "completion", "--version"} <= {*offered(script, "")}
    assert offered(script, "simu") == ["simulate"]
    assert offered(script, "serve", "--http-p") == ["--http-port"]
    assert "--no-on-demand" in offered(script, "serve", "m", "--no")
    assert offered(script, "deploy", "") == ["kubernetes", "balancer", "ray"]
    assert offered(script, "deploy", "balancer", "--kind", "e") == ["envoy"]
    assert offered(script, "deploy", "balancer", "--kind", "=", "e") == ["envoy"]
    assert offered(script, "deploy", "balancer", "--kind", "=") == ["haproxy", "envoy", "nginx"]
    assert offered(script, "serve", "mod") == ["FILES"]
    assert offered(script, "serve", "--tls-cert", "") == ["FILES"]
    assert offered(script, "serve", "--http-port", "") == []
    assert offered(script, "no-such-verb", "--a") == ["FILES"]


def test_zsh_and_fish_have_every_option() -> None:
    zsh, fish = (run_cli(["completion", shell]).stdout for shell in ("zsh", "fish"))
    assert zsh.startswith("#compdef carpool\n")
    for option in [param.opts[0] for param in params("serve") if not param.is_argument]:
        assert f"{option} " in zsh
        assert f"-l {option.removeprefix('--')} " in fish


def test_the_script_is_one_that_bash_can_read() -> None:
    for shell in ("bash", "zsh"):
        script = run_cli(["completion", shell]).stdout
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
