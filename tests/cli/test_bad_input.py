"""Whatever is typed wrongly: one line on stderr that names the option and what is valid; exit code 2."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli_run import run_cli

SIMULATE = "simulate --curve 4+1 --slo-ms 50 --seconds 1 "
PLAN = "plan --curve 4+1 --slo-ms 50 "


def refused(line: str) -> str:
    result = run_cli(line.split())
    assert result.exit_code == 2
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("carpool: ")
    return lines[0]


@pytest.mark.parametrize("verb", ["simulate", "plan --rate 5"])
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--curve 8:10,16:5 --slo-ms 50", "--curve: a larger batch cannot be faster"),
        ("--curve 4+1 --step 4+1 --slo-ms 50", "--curve is for one model, and --step for a pipeline"),
        ("--curve 4+1 --one-device --slo-ms 50", "--one-device is for the steps of a pipeline"),
        ("--step 4+1 --buckets 1,4 --slo-ms 50", "--buckets is for one model"),
        ("--step 4+ --slo-ms 50", "--step: "),
        ("--step 4+1@0 --slo-ms 50", "--step: '4+1@0': a request brings above 0"),
        ("--step 4+1 --step 3+1 --slo-ms 8", "--slo-ms 8 is below the 9 ms"),
        ("--slo-ms 500" + " --step 4+1" * 40, "--step: 32 at most, not 40"),
        ("--curve 4+ --slo-ms 50", "like 4+1"),
        ("--curve hello --slo-ms 50", "write 4+1 or batch:ms points"),
        ("--curve nan+1 --slo-ms 50", "--curve"),
        ("--curve 0+0 --slo-ms 50", "--curve"),
        ("--curve 1:-3 --slo-ms 50", "above 0"),
        ("--curve 0:3 --slo-ms 50", "start at 1"),
        ("--curve 1:2,99999999999:5 --slo-ms 50", "at most 4096"),
        ("--curve 4+1 --slo-ms 3", "--slo-ms 3 is below the 5 ms that one image takes: give at least 10"),
        ("--curve 4+1 --slo-ms nan", "--slo-ms must be above 0"),
        ("--curve 4+1 --slo-ms -1", "--slo-ms must be above 0"),
        ("--curve 4+1 --slo-ms soon", "'--slo-ms': it must be a number"),
        ("--curve 4+1 --slo-ms 50 --max-batch 0", "--max-batch must be a whole number from 1 to 4,096"),
        ("--curve 4+1 --slo-ms 50 --max-batch 99999", "--max-batch must be a whole number from 1 to 4,096"),
        ("--curve 4+1 --slo-ms 50 --max-batch x", "'--max-batch': it must be a whole number"),
        ("--curve 4+1 --slo-ms 50 --buckets 4,x", "--buckets must be batch sizes like 4,8"),
        ("--curve 4+1 --slo-ms 50 --buckets 8,4", "--buckets must be rising"),
        ("--curve 4+1 --slo-ms 50 --noise -1", "--noise must be from 0 to 2"),
        ("--curve 4+1", "Missing option '--slo-ms'"),
        ("--slo-ms 50", "Missing option '--curve'"),
    ],
)
def test_the_model(verb: str, options: str, says: str) -> None:
    assert says in refused(f"{verb} {options}")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--rate 0", "--rate must be above 0"),
        ("--rate -3", "--rate must be above 0"),
        ("--rate nan", "--rate must be above 0"),
        ("--rate inf", "--rate must be above 0"),
        ("--rate many", "'--rate': it must be a number"),
        ("--rate 1e8", "--seconds 1 at 100,000,000 images/s"),
        ("--rate 5 --load 1", "give one of them"),
        ("--load 0", "--load must be above 0"),
        ("--load nan", "--load must be above 0"),
        ("--mode magic", "'magic' is not one of 'promise', 'knobs'"),
        ("--arrivals rain", "--arrivals must be poisson, bursty, cameras or trace:FILE"),
        ("--arrivals cameras", "like --cameras 100"),
        ("--arrivals cameras --cameras 0", "--cameras must be a whole number from 1"),
        ("--arrivals cameras --cameras 5 --fps 0", "--fps must be above 0"),
        ("--arrivals cameras --cameras 5 --rate 3", "--rate cannot be given with cameras"),
        ("--arrivals cameras --cameras 5 --load 3", "--load cannot be given with cameras"),
        ("--arrivals bursty --burst-seconds 5", "--burst-seconds must be above 0 and at most 2.5"),
        ("--arrivals bursty --burst-period 0", "--burst-period must be from 0.01"),
        ("--arrivals bursty --burst-factor 0", "--burst-factor must be from 1"),
        ("--arrivals trace:/no/such/file", "--arrivals: cannot read /no/such/file"),
        ("--preferred 4,100", "--preferred must be rising batch sizes from 1 to 64"),
        ("--preferred a", "--preferred must be batch sizes like 4,8"),
        ("--max-delay-ms -1", "--max-delay-ms must be from 0"),
        ("--max-queue -1", "--max-queue must be a whole number from 0"),
        ("--queue-timeout-ms nan", "--queue-timeout-ms must be from 0"),
        ("--timeout-action sulk", "'sulk' is not one of 'reject', 'delay'"),
        ("--instances 0", "--instances must be a whole number from 1"),
        ("--stall-share 2", "--stall-share must be from 0 to 1"),
        ("--stall-factor 0", "--stall-factor must be from 1"),
        ("--profile-error 0", "--profile-error must be from 0.1 to 10"),
        ("--seconds 0", "--seconds must be above 0"),
        ("--seconds 0.0001", "give more --seconds"),
        ("--seeds 0", "--seeds must be a whole number from 1"),
        ("--plot picture.txt", "--plot must name a .png"),
        ("--plot /no/such/folder/x.png", "--plot: there is no folder"),
        ("--curve 4+1 --slo-ms 7", "give --slo-ms 10 or more, or give --rate instead"),
        ("--bogus", "No such option: --bogus"),
        ("stray", "unexpected extra argument"),
    ],
)
def test_simulate(options: str, says: str) -> None:
    assert says in refused(SIMULATE + options)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("", "Missing option '--rate'"),
        ("--rate 0", "--rate must be above 0"),
        ("--rate nan", "--rate must be above 0"),
        ("--rate 5 --surge 0.5", "--surge must be from 1"),
        ("--rate 5 --surge-seconds 0", "--surge-seconds must be above 0"),
        ("--rate 5 --redundancy -1", "--redundancy must be a whole number from 0"),
        ("--rate 5 --price-per-hour -1", "--price-per-hour must be from 0"),
    ],
)
def test_plan(options: str, says: str) -> None:
    assert says in refused(PLAN + options)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"time": 0}\nnot json\n{"time": 1}', "line 2 is not JSON"),
        ('{"time": "soon"}', 'needs "time"'),
        ('{"time": 0, "images": 0}', '"images": 0'),
        ("[]", 'needs "time"'),
        ("", "holds no arrivals"),
        ('{"time": 3}', "spans no time"),
    ],
)
def test_a_malformed_trace(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(text)
    message = refused(f"{SIMULATE} --arrivals trace:{file}")
    assert message.startswith("carpool: --arrivals: ")
    assert says in message


def test_an_unknown_verb() -> None:
    assert "No such command 'fly'" in refused("fly")


def test_our_own_mistakes_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("carpool.cli.simulate_command.Simulate.run", broken)
    with pytest.raises(ZeroDivisionError):
        run_cli(SIMULATE.split())
