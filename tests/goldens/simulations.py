"""Fifty runs of `carpool simulate --json`: what they print is kept, to the last digit that it prints.

Times are printed to a millionth of a millisecond, where the last bits of a logarithm, which may differ from
one processor to another, do not show.
"""

from __future__ import annotations

import hashlib
from functools import cache

from cli_run import run_cli

_LINE = ("--curve", "4+1", "--slo-ms", "50")
_TABLE = ("--curve", "1:8,8:12,32:22,64:35,128:60", "--slo-ms", "100")
_FIXED = ("--mode", "knobs", "--max-delay-ms", "5")
SCENARIOS: tuple[tuple[str, ...], ...] = (
    (*_LINE, "--load", "0.7"),
    (*_LINE, "--load", "3", "--instances", "2"),
    (*_LINE, "--load", "1.2", "--arrivals", "bursty", "--profile-error", "1.3"),
    (*_LINE, *_FIXED, "--load", "0.9", "--preferred", "4,8"),
    (*_TABLE, "--load", "1.5", "--seconds", "1"),
    (*_TABLE, "--load", "0.4", "--compare", "--seconds", "0.5"),
    (*_TABLE, "--arrivals", "cameras", "--cameras", "40", "--noise", "0", "--stall-share", "0.02"),
    (
        *_TABLE,
        "--arrivals",
        "cameras",
        "--cameras",
        "200",
        "--aligned",
        "--per-source",
        "--buckets",
        "1,8,64,128",
    ),
    ("--curve", "16+4", "--slo-ms", "200", "--arrivals", "cameras", "--cameras", "60", "--latest"),
    (
        *("--curve", "16+4", "--slo-ms", "200", *_FIXED, "--load", "2", "--max-queue", "40"),
        *("--queue-timeout-ms", "150", "--timeout-action", "delay"),
    ),
)
SEEDS = range(1, 51)
EACH_ONCE = range(1, 1 + len(SCENARIOS))  # every scenario, with one seed
WHOLE = (1, 10)  # the seeds whose text is kept as well: where a hash differs, they show how


def arguments(seed: int) -> list[str]:
    scenario = SCENARIOS[seed % len(SCENARIOS)]
    length = () if "--seconds" in scenario else ("--seconds", "2")
    return ["simulate", *scenario, *length, "--seed", str(seed), "--json"]


@cache
def printed(seed: int) -> str:
    done = run_cli(arguments(seed))
    assert done.exit_code == 0, done.output
    return done.stdout


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
