"""Record which batches a real tritonserver forms, as data for the conformance tests.

A developer tool, not a test. It starts the tritonserver that ships in the PyPI wheel `nvidia-pytriton`, plays
the stories below against it and writes what it saw to `triton_batching.json`:

    python3.11 -m venv venv && venv/bin/pip install nvidia-pytriton numpy
    venv/bin/python record_triton_batching.py \\
        --tritonserver venv/lib/python3.11/site-packages/pytriton/tritonserver --out triton_batching.json

Make the venv from the distribution's own CPython 3.11 (the wheel carries a Python backend for each version).

How a story is played. The model is a Python-backend model that writes every execute() call to a log: the
ids of the requests that shared it, in order, and the time. A request called `plug` (with two instances
plug1, plug2) fills a whole batch and blocks in execute() until the story releases it, so that requests
queue up behind it; time 0 of a story is the moment at which all plugs are running. Every other execution
lasts `exec_ms`, or as long as the longest `exec_ms` of its requests. Events happen at fixed times, tens of
milliseconds apart; after each send the recorder waits until the server counts the request as pending,
running or answered, and it throws an attempt away when that took so long that the order of events is in
doubt. A story is kept when all its repeats agree; the others are listed under "disagreed" with everything
that was seen.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import os
import queue
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Story = dict[str, Any]
Json = dict[str, Any]

GAP_MS = 40  # between two sends
EXEC_MS = 150  # how long an execution lasts
LATE_MS = 30  # an event that happens this much too late spoils the attempt
ATTEMPTS = 8  # attempts per repeat
TOGETHER_MS = 40  # answers closer than this count as simultaneous

MODEL = """
import json, os, time
import numpy as np
import triton_python_backend_utils as pb

FOLDER = os.environ["STORY_FOLDER"]


class TritonPythonModel:
    def execute(self, requests):
        start, last = time.monotonic(), 0.0
        ids = [r.request_id() for r in requests]
        sizes = [len(pb.get_input_tensor_by_name(r, "x").as_numpy()) for r in requests]
        with open(FOLDER + "/executions.jsonl", "a") as log:
            log.write(json.dumps({"ids": ids, "images": sizes, "at": start}) + "\\n")
        for i, request in zip(ids, requests):
            parameters = json.loads(request.parameters() or "{}")
            last = max(last, float(parameters.get("exec_ms", 0)) / 1e3)
            while i.startswith("plug") and not os.path.exists(FOLDER + "/release." + i):
                time.sleep(0.001)
        time.sleep(last)
        return [pb.InferenceResponse([pb.Tensor("y", np.zeros((n, 1), np.uint8))]) for n in sizes]
"""


# ---- the stories

# A story's events are written as words, in any order:
#   r1@40        send r1 at 40 ms; options follow: *3 images, /p1 priority, /t150 timeout in ms, /e700 lasts
#                700 ms, /s6 shape [6]
#   #5@0         send r1 … r5, one image each, 40 ms apart from 0; #3+3+2@0 requests of 3, 3 and 2 images
#   l#2@700      the same, named l1, l2
#   AABA@0       send r1 … r4 of shape [4] for A and [6] for B
#   !@400        release the plug; !2@400 release plug2
#   x:r2@240     cancel r2; hangup:r2@240 close the connection of r2
WORD = re.compile(r"(?P<what>[^@]+)@(?P<at>\d+)(?P<options>.*)")
OPTION = re.compile(r"([*/][a-z]?)(\d+)")
MEANING = {"*": "images", "/p": "priority", "/t": "timeout_us", "/e": "exec_ms", "/s": "shape"}


def options_of(word: str) -> Json:
    out: Json = {MEANING[mark]: int(number) for mark, number in OPTION.findall(word)}
    if out.get("images") == 1:
        del out["images"]
    if "timeout_us" in out:
        out["timeout_us"] *= 1000
    if "shape" in out:
        out["shape"] = [out["shape"]]
    return out


def series(what: str, at: int) -> list[Json]:
    """Several sends, GAP_MS apart."""
    if what.strip("AB") == "":
        many: list[Json] = [{"shape": [4 if letter == "A" else 6]} for letter in what]
        name = "r"
    else:
        name, _, sizes = what.partition("#")
        numbers = [int(n) for n in sizes.split("+")] if "+" in sizes else [1] * int(sizes)
        many = [{"images": n} if n > 1 else {} for n in numbers]
    return [{"at_ms": at + k * GAP_MS, "send": f"{name or 'r'}{k + 1}", **m} for k, m in enumerate(many)]


def parse(words: str) -> list[Json]:
    """The events that a line of words describes, in order of time."""
    out: list[Json] = []
    for word in words.split():
        match = WORD.fullmatch(word)
        assert match, word
        what, at = match["what"], int(match["at"])
        verb, _, name = what.rpartition(":")
        if what.startswith("!"):
            out.append({"at_ms": at, "release": "plug" + what[1:]})
        elif verb:
            out.append({"at_ms": at, {"x": "cancel", "hangup": "hang_up"}[verb]: name})
        elif "#" in what or what.strip("AB") == "":
            out += series(what, at)
        else:
            out.append({"at_ms": at, "send": what, **options_of(match["options"])})
    return sorted(out, key=lambda e: e["at_ms"])


POLICY = {"max_queue_size": 100}  # any queue policy switches prefetching off; this one is never reached
KINDS = (("prefetch", {}), ("policy", POLICY))
LEVELS = {"priority_levels": 2, "default_priority": 2}
THREE = {"priority_levels": 3, "default_priority": 2}
TWO_BUSY = {"instances": 2}


def story(name: str, config: Json, words: str, **more: Any) -> Story:
    """A story on busy instances: one plug for each, unless `plugs` says otherwise."""
    config = {"max_batch": 8, **config}
    config.setdefault("exec_ms", EXEC_MS)
    return {
        "name": name,
        "plugs": config.get("instances", 1),
        "config": config,
        "events": parse(words),
        **more,
    }


def stories(group: str, *rows: tuple[str, Json, str], **more: Any) -> list[Story]:
    return [story(f"{group}/{name}", config, words, **more) for name, config, words in rows]


def behind(images: str, count: int, delay: int = 0) -> str:
    """Requests queue up behind the plug, which is released when the batcher has seen the last of them.

    With a delay the batcher may leave a newcomer unseen until it looks again of its own accord, after 500 ms.
    """
    return f"{images}@0 !@{(count - 1) * GAP_MS + (700 if delay else 80)}"


LONG = (
    4000  # a delay that outlasts the batches before it, also when the server wakes late (up to 500 ms each)
)


def sweep_stories() -> list[Story]:
    """Preferred sizes by number of queued requests, with and without a delay and prefetching."""
    out = []
    counts: dict[str, tuple[int, ...]] = {
        "": (5, 8, 11, 17),
        "4": (3, 4, 5, 6, 8, 9, 11),
        "4+8": (3, 6, 7, 8, 9, 13),
        "2+6": (1, 3, 5, 6, 7, 8, 9),
    }
    for (sizes, numbers), delay, (kind, policy) in itertools.product(counts.items(), (0, LONG), KINDS):
        config = {
            "preferred": list(map(int, sizes.split("+"))) if sizes else [],
            "max_delay_ms": delay,
            **policy,
        }
        for n in numbers:
            name = f"queued/{kind}/preferred {sizes or 'none'}/delay {delay}/{n} requests"
            out.append(story(name, config, behind(f"#{n}", n, delay)))
    return out


def idle_stories() -> list[Story]:
    """Nothing is running when the first request comes."""
    four, none = {"preferred": [4], "max_delay_ms": 500}, {"max_delay_ms": 500}
    slow = {"exec_ms": 400}
    return stories(
        "idle",
        ("delay 0: the first request goes alone", slow, "#5@0"),
        ("delay 0: preferred 4 does not make it wait", {"preferred": [4], **slow}, "#6@0"),
        ("delay 500: one request waits the delay", none, "#1@0"),
        ("delay 500: delay counts from the first", none, "r1@0 r2@80 r3@160 r4@240 r5@320"),
        ("delay 500: a full batch goes at once", none, "#8@0"),
        ("delay 500: a late one misses the batch", none, "#2@0 late@580"),
        ("preferred 4 delay 500: 1", four, "#1@0"),
        ("preferred 4 delay 500: 3 not reached, delay exceeded", four, "#3@0"),
        ("preferred 4 delay 500: 4 go at once", four, "#4@0"),
        ("preferred 4 delay 500: 6", four, "#6@0"),
        ("preferred 2 6 delay 500: 7", {"preferred": [2, 6], "max_delay_ms": 500}, "#7@0"),
        ("preferred 4 delay 500: 3 images then 2", four, "#3+2@0"),
        ("preferred 4 delay 500: 5 images go at once", four, "#5+1@0"),
        ("policy delay 500: one request waits", none | POLICY, "#1@0"),
        ("policy preferred 4 delay 500: 6", four | POLICY, "#6@0"),
        ("2 instances delay 0", TWO_BUSY | slow, "#6@0"),
        ("2 instances preferred 2 delay 500", TWO_BUSY | {"preferred": [2], **none, "exec_ms": 600}, "#6@0"),
        plugs=0,
    )


def delay_stories() -> list[Story]:
    """The delay counts from the arrival of the oldest request, also while the instance is busy."""
    out = []
    for kind, policy in KINDS:
        none = {"max_delay_ms": 500} | policy
        four, both, two = ({"preferred": p} | none for p in ([4], [4, 8], [2]))
        out += stories(
            f"delay/{kind}",
            ("plug ends before the delay: waits on", four, "#2@0 !@250"),
            ("plug ends after the delay: goes at once", four, "#2@0 !@800"),
            ("3 past their delay, then 1 more makes 4", four, "#3@0 late@700 !@1400"),
            ("2 past their delay, then 1 more", four, "#2@0 late@700 !@1400"),
            ("2 past their delay, then 3 more make 5", four, "#2@0 l#3@700 !@1500"),
            ("5 past their delay, then 2 more", four, "#5@0 l#2@700 !@1500"),
            ("6 all past their delay", four, "#6@0 !@900"),
            ("8 all past their delay", four, "#8@0 !@1000"),
            ("9 all past their delay", four, "#9@0 !@1100"),
            ("12 all past their delay", four, "#12@0 !@1300"),
            ("preferred 4 8: 7 all past their delay", both, "#7@0 !@1000"),
            ("preferred 4 8: released after the sixth", both, "#6@0 !@300 l#2@400"),
            ("preferred 4 8: 12 all past their delay", both, "#12@0 !@1300"),
            ("no preferred: 5 released before the delay", none, "#5@0 !@250"),
            ("no preferred: 11 released before the delay", none | {"max_delay_ms": 1000}, "#11@0 !@480"),
            ("no preferred: 11 all past their delay", none, "#11@0 !@1200"),
            ("preferred 2: 7 all past their delay", two, "#7@0 !@1000"),
            ("preferred 2 max 4: 9 all past their delay", two | {"max_batch": 4}, "#9@0 !@1100"),
            ("preferred 2: 5 past it, 9 more come later", two, "#5@0 l#9@900 !@2600"),
        )
    return out


def prefetch_stories() -> list[Story]:
    """Batches that are set aside while the instance is busy, and how they grow."""
    two = {"preferred": [2]}
    duo, three = two | TWO_BUSY, {"max_batch": 4, "preferred": [3]}
    return stories(
        "set aside",
        ("preferred 2: two batches, the rest waits", two, "#7@0 !@340"),
        ("preferred 2: arrivals during the next execution", two | {"exec_ms": 400}, "#5@0 !@240 l#4@320"),
        ("no preferred: 9, then 3 during the next execution", {"exec_ms": 400}, "#9@0 !@400 l#3@480"),
        ("2 instances preferred 2: 11", duo, "#11@0 !1@500 !2@1800"),
        ("2 instances no preferred: 5", TWO_BUSY, "#5@0 !1@300 !2@1000"),
        ("2 instances no preferred: 12", TWO_BUSY, "#12@0 !1@560 !2@2000"),
        (
            "2 instances preferred 4 delay 4000: 6",
            TWO_BUSY | {"preferred": [4], "max_delay_ms": LONG},
            "#6@0 !1@1000 !2@1500",
        ),
        ("2 instances preferred 2, policy: 11", duo | POLICY, "#11@0 !1@500 !2@1800"),
        ("2 instances no preferred, policy: 12", TWO_BUSY | POLICY, "#12@0 !1@560 !2@2000"),
        ("max batch 1", {"max_batch": 1}, "#3@0 !@200"),
        ("preferred 3 max 4: 10", three, "#10@0 !@480"),
        ("preferred 3 max 4, policy: 10", three | POLICY, "#10@0 !@480"),
    )


def image_stories() -> list[Story]:
    """Requests with more than one image."""
    cases = {
        "": "3+3+3 3+3+3+2 3+3+3+2+8+1 8+1 1+8 5+4+4+3",
        "4": "5+4 5+3 3+2 3+2+2 2+2+2+2 3+3+2+4 1+5+1+1",
        "4+8": "3+3+2",
        "2+6": "3+3+3 1+3+2+2",
    }
    out = []
    for sizes, lists in cases.items():
        preferred = [int(n) for n in sizes.split("+") if n]
        for images, delay, (kind, policy) in itertools.product(lists.split(), (0, LONG), KINDS):
            name = f"images/{kind}/preferred {sizes or 'none'}/delay {delay}/{images}"
            config = {"preferred": preferred, "max_delay_ms": delay, **policy}
            out.append(story(name, config, behind(f"#{images}", images.count("+") + 1, delay)))
    return out + stories(
        "images",
        ("exactly the maximum, twice", {}, "#8+8@0 !@200"),
        ("more than the maximum", {}, "#1+9+1@0 !@200"),
    )


def shape_stories() -> list[Story]:
    """Only requests of one shape share a batch when the model's dims are variable."""
    out = []
    patterns = ("AABA", "ABAB", "AABBB", "AAAAB", "ABBBBBBBBB")
    for (kind, policy), delay, pattern in itertools.product(KINDS, (0, LONG), patterns):
        config = {"dims": [-1], "max_delay_ms": delay, **policy}
        out.append(
            story(f"shapes/{kind}/delay {delay}/{pattern}", config, behind(pattern, len(pattern), delay))
        )
    two = {"dims": [-1], "preferred": [2], "max_delay_ms": 500}
    out += stories("shapes", ("preferred 2 delay 500 all past it/AAABB", two, "AAABB@0 !@900"))
    return out + stories(
        "shapes", ("idle delay 500/AABBA", {"dims": [-1], "max_delay_ms": 500}, "AABBA@0"), plugs=0
    )


def priority_stories() -> list[Story]:
    mixed = "r1@0/p3 r2@40 r3@80/p1 r4@120/p3 r5@160/p1 r6@200/p2 r7@240/p3 !@400"
    pair = {"max_batch": 2}
    return stories(
        "priority",
        ("one batch crosses levels", THREE, mixed),
        ("max 4", THREE | {"max_batch": 4}, mixed),
        ("preferred 2 max 4", THREE | {"max_batch": 4, "preferred": [2]}, mixed),
        ("delay 1000", THREE | {"max_delay_ms": 1000}, mixed),
        ("0 and out of range mean the default", THREE | pair, "r1@0/p3 r2@40/p0 r3@80/p9 r4@120/p1 !@300"),
        ("no levels: priority is ignored", pair, "r1@0/p3 r2@40/p2 r3@80/p1 r4@120/p1 !@300"),
        (
            "a high one overtakes during execution",
            THREE | pair | {"exec_ms": 1200},
            "r1@0/p3 r2@40/p3 r3@80/p3 r4@120/p3 r5@160/p3 !@300 high@1000/p1",
        ),
    ) + stories(
        "priority/idle",
        (
            "delay 500: a higher one goes first in the batch",
            THREE | {"max_delay_ms": 500},
            "r1@0/p3 r2@40/p1 r3@80/p2",
        ),
        (
            "preferred 2 delay 500",
            THREE | {"preferred": [2], "max_delay_ms": 500, "exec_ms": 400},
            "r1@0/p3 r2@40/p1 r3@80/p3 r4@120/p1",
        ),
        ("delay counts from the oldest of any level", THREE | {"max_delay_ms": 600}, "low@0/p3 high@400/p1"),
        (
            "max 2 delay 600: high ones fill the batch of an old low one",
            LEVELS | pair | {"max_delay_ms": 600},
            "low@0/p2 h1@300/p1 h2@400/p1",
        ),
        plugs=0,
    )


def queue_size_stories() -> list[Story]:
    three = {"max_queue_size": 3}
    return stories(
        "queue size",
        ("3: the fourth and fifth are refused", three, "#5@0 !@240"),
        ("1", {"max_queue_size": 1}, "#3@0 !@200"),
        ("3 counts requests, not images", three, "#3+3+2+1@0 !@240"),
        ("3 with preferred 2", three | {"preferred": [2]}, "#5@0 !@240"),
        (
            "3: room again once a batch has started",
            three | {"max_batch": 2, "exec_ms": 1200},
            "#4@0 !@240 l#4@1000",
        ),
        ("3 with 2 instances", three | TWO_BUSY, "#5@0 !1@300 !2@1800"),
        (
            "2 for each level",
            LEVELS | {"max_queue_size": 2},
            "r1@0/p2 r2@40/p2 r3@80/p2 r4@120/p1 r5@160/p1 r6@200/p1 !@400",
        ),
        (
            "1 for level 1 only",
            LEVELS | {"priority_policies": {"1": {"max_queue_size": 1}}},
            "r1@0/p2 r2@40/p2 r3@80/p2 r4@120/p1 r5@160/p1 !@400",
        ),
        (
            "3: expired DELAY requests still count",
            three | {"default_timeout_ms": 200, "timeout_action": "DELAY"},
            "#3@0 late@1500 !@1700",
        ),
        (
            "3: expired REJECT requests make room once answered",
            three | {"default_timeout_ms": 1200},
            "#3@0 late@2400 !@2520",
        ),
        (
            "3: expired REJECT requests count until answered",
            three | {"default_timeout_ms": 100},
            "#3@0 late@300 !@420",
        ),
    ) + stories(
        "queue size",
        ("3 idle, delay 600: waiting for company counts", three | {"max_delay_ms": 600}, "#5@0"),
        plugs=0,
    )


def timeout_stories() -> list[Story]:
    # The server may be up to 500 ms late to notice a free instance when a queue policy is set: leave room.
    soon, reject = {"default_timeout_ms": 300}, {"default_timeout_ms": 1500}
    later = reject | {"timeout_action": "DELAY"}
    override = {"default_timeout_ms": 2000, "allow_timeout_override": True}
    first = {"1": {"default_timeout_ms": 1500}}
    long = {"1": {"default_timeout_ms": 9000, "timeout_action": "DELAY"}}
    return stories(
        "timeout",
        ("REJECT: expired when the instance is free", reject, "#2@0 l#2@1600 !@1720"),
        ("REJECT: answered while the instance is still busy", soon, "#2@0 !@2500"),
        ("REJECT: young ones behind an expired one", reject, "a@0 b@1600 c@1640 !@1720"),
        ("DELAY: expired ones come after the others", later, "#2@0 l#2@1600 !@1720"),
        ("DELAY: max 2", later | {"max_batch": 2}, "#2@0 l#2@1600 !@1720"),
        (
            "DELAY: newcomers still overtake",
            later | {"max_batch": 2, "exec_ms": 900},
            "#3@0 l#2@1600 !@1720 n#2@2300",
        ),
        (
            "DELAY: delayed of level 1 before level 2",
            later | LEVELS | {"max_batch": 2},
            "a@0/p1 b@40/p1 c@1600/p2 d@1640/p1 !@1720",
        ),
        ("override shorter than the default", override, "a@0 b@40/t150 !@400"),
        ("override longer than the default is capped", override | reject, "a@0 b@40/t9000 c@1600 !@1720"),
        ("override not allowed is ignored", {"default_timeout_ms": 2000}, "a@0 b@40/t150 !@400"),
        ("override without a default is ignored", {"allow_timeout_override": True}, "a@0 b@40/t150 !@400"),
        ("override with DELAY", override | {"timeout_action": "DELAY"}, "a@0/t150 b@40 !@400"),
        ("no policy: the request's timeout is ignored", {}, "a@0/t150 b@40 !@400"),
        ("policy of level 1 only", LEVELS | {"priority_policies": first}, "a@0/p1 b@40/p2 c@1600/p1 !@1720"),
        (
            "policy of level 1 replaces the default policy",
            LEVELS | reject | {"priority_policies": long},
            "a@0/p1 b@40/p2 c@1600/p2 !@1720",
        ),
    ) + stories(
        "timeout/idle",
        ("REJECT, delay 1000: the timeout comes first", soon | {"max_delay_ms": 1000}, "#3@0"),
        (
            "REJECT, delay 200: the delay comes first",
            {"default_timeout_ms": 600, "max_delay_ms": 200},
            "#3@0",
        ),
        ("REJECT, delay 1000, preferred 2", soon | {"max_delay_ms": 1000, "preferred": [2]}, "#3@0"),
        ("DELAY, delay 1000", later | {"default_timeout_ms": 300, "max_delay_ms": 1000}, "#2@0"),
        (
            "REJECT for level 2 only, delay 1000",
            LEVELS | {"max_delay_ms": 1000, "priority_policies": {"2": {"default_timeout_ms": 300}}},
            "a@0/p1 b@40/p2",
        ),
        plugs=0,
    )


def order_stories() -> list[Story]:
    """Answers of two instances, in order of completion or of arrival."""
    out = []
    for keep in (False, True):
        config = {"instances": 2, "max_batch": 2, "preserve_ordering": keep}
        out += stories(
            "order/preserved" if keep else "order/free",
            ("a slow batch, then fast ones", config, "slow@0*2/e700 f1@60*2/e100 f2@240*2/e100"),
            ("one slow, three fast", config, "s1@0/e700 f1@60/e100 f2@250/e100 f3@450/e100"),
            plugs=0,
        )
    return out


def cancel_stories() -> list[Story]:
    """Cancelled calls, and the errors as gRPC shows them."""
    three = {"preferred": [3], "max_delay_ms": 600}
    return (
        stories(
            "cancel",
            ("set aside already: runs anyway", {}, "#4@0 x:r2@240 !@400"),
            ("not yet set aside: dropped", {"preferred": [2]}, "#7@0 x:r6@320 !@480"),
            ("policy: leaves the queue", POLICY, "#4@0 x:r2@240 !@400"),
            ("policy max 2: its place is taken", POLICY | {"max_batch": 2}, "#5@0 x:r2@280 !@480"),
            (
                "queue size 2: counts until it is looked at",
                {"max_queue_size": 2},
                "#2@0 x:r1@160 late@300 !@400",
            ),
            ("error: queue size", {"max_queue_size": 1}, "#2@0 !@200"),
            ("error: timeout", {"default_timeout_ms": 200}, "#1@0 !@400"),
            ("error: too many images", {}, "#1+9@0 !@200"),
            transport="grpc",
        )
        + stories(
            "cancel/idle",
            ("delay 600: one of three", {"max_delay_ms": 600}, "#3@0 x:r2@240"),
            ("preferred 3 delay 600: one of two, then two more", three, "#2@0 x:r1@160 l#2@240"),
            plugs=0,
            transport="grpc",
        )
        + stories("cancel", ("HTTP client hangs up, policy", POLICY, "#3@0 hangup:r2@200 !@500"))
    )


# Seeds whose outcome does not hang on a race between the server's own threads.
SEEDS = (
    1,
    2,
    3,
    5,
    6,
    7,
    10,
    12,
    13,
    14,
    15,
    17,
    18,
    19,
    20,
    21,
    22,
    23,
    24,
    25,
    26,
    27,
    28,
    29,
    30,
    31,
    33,
    34,
    35,
    36,
    37,
    39,
    40,
    41,
    42,
    44,
    45,
    49,
    50,
    52,
    59,
    62,
    66,
    79,
    81,
    89,
    94,
    107,
    111,
    116,
    117,
    123,
    124,
    127,
    129,
    192,
    215,
    227,
    268,
    272,
)


def random_story(seed: int) -> Story:
    """Mixed arrivals, sizes and settings."""
    rng = random.Random(seed)
    config: Json = {"preferred": rng.choice([[], [4], [2, 6], [3], [4, 8], [5]])}
    config |= {"max_delay_ms": rng.choice([0, 0, 700, 1500]), "exec_ms": 250}
    draw = rng.random()
    config |= THREE if draw < 0.2 else POLICY if draw < 0.5 else {}
    words, at = [], 0
    for n in range(rng.randint(5, 14)):
        level = f"/p{rng.randint(1, 3)}" if draw < 0.2 else ""
        words.append(f"r{n + 1}@{at}*{rng.choice([1, 1, 1, 2, 3, 5])}{level}")
        at += rng.choice([40, 40, 60, 120])
    return story(f"random/{seed}", config, " ".join([*words, f"!@{rng.randint(2, 8) * 100 + 20}"]))


def all_stories() -> list[Story]:
    groups = (sweep_stories, idle_stories, delay_stories, prefetch_stories, image_stories, shape_stories)
    more = (priority_stories, queue_size_stories, timeout_stories, order_stories, cancel_stories)
    return [one for group in (*groups, *more) for one in group()] + [random_story(seed) for seed in SEEDS]


# ---- the server


def policy_text(policy: Json) -> str:
    lines = []
    if "timeout_action" in policy:
        lines.append(f"timeout_action: {policy['timeout_action']}")
    if "default_timeout_ms" in policy:
        lines.append(f"default_timeout_microseconds: {policy['default_timeout_ms'] * 1000}")
    if policy.get("allow_timeout_override"):
        lines.append("allow_timeout_override: true")
    if "max_queue_size" in policy:
        lines.append(f"max_queue_size: {policy['max_queue_size']}")
    return " ".join(lines)


def config_pbtxt(config: Json) -> str:
    """The model configuration of a story."""
    batching = [f"preferred_batch_size: {config['preferred']}"] if config.get("preferred") else []
    batching.append(f"max_queue_delay_microseconds: {config.get('max_delay_ms', 0) * 1000}")
    if config.get("preserve_ordering"):
        batching.append("preserve_ordering: true")
    if "priority_levels" in config:
        batching.append(f"priority_levels: {config['priority_levels']}")
        batching.append(f"default_priority_level: {config['default_priority']}")
    if policy := policy_text(config):
        batching.append(f"default_queue_policy {{ {policy} }}")
    for level, own in config.get("priority_policies", {}).items():
        batching.append(f"priority_queue_policy {{ key: {level} value {{ {policy_text(own)} }} }}")
    body = "\n  ".join(batching)
    return f"""name: "m"
backend: "python"
max_batch_size: {config["max_batch"]}
input [{{ name: "x" data_type: TYPE_UINT8 dims: {config.get("dims", [4])} }}]
output [{{ name: "y" data_type: TYPE_UINT8 dims: [1] }}]
instance_group [{{ kind: KIND_CPU count: {config.get("instances", 1)} }}]
dynamic_batching {{
  {body}
}}
"""


class Server:
    """One tritonserver process with an empty repository; models are loaded when a story asks."""

    def __init__(self, tritonserver: Path, folder: Path, port: int) -> None:
        self.folder, self.port = folder, port
        self.repository, self.log = folder / "repository", folder / "executions.jsonl"
        (self.repository / "m" / "1").mkdir(parents=True)
        (self.repository / "m" / "1" / "model.py").write_text(MODEL)
        backends = folder / "backends"
        shutil.copytree(tritonserver / "backends" / "python", backends / "python")
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        stub = tritonserver / "python_backend_stubs" / version / "triton_python_backend_stub"
        shutil.copy(stub, backends / "python")
        packages = tritonserver.parent.parent
        env = os.environ | {
            "STORY_FOLDER": str(folder),
            "PYTHONPATH": str(packages),
            "LD_LIBRARY_PATH": str(packages / "nvidia_pytriton.libs"),
            "PATH": str(Path(sys.executable).parent) + os.pathsep + os.environ["PATH"],
        }
        command = [
            str(tritonserver / "bin" / "tritonserver"),
            f"--model-repository={self.repository}",
            f"--backend-directory={backends}",
            "--model-control-mode=explicit",
            "--http-address=127.0.0.1",
            "--grpc-address=127.0.0.1",
            "--metrics-address=127.0.0.1",
            f"--http-port={port}",
            f"--grpc-port={port + 1}",
            f"--metrics-port={port + 2}",
            "--http-thread-count=32",
            "--allow-gpu-metrics=false",
        ]
        with (folder / "server.log").open("wb") as log:
            self.process = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
        self.loaded: str | None = None

    def ask(self, method: str, path: str, body: bytes = b"", port: int | None = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", port or self.port, timeout=60)
        try:
            connection.request(method, path, body)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def wait_ready(self) -> str:
        """Wait until the server answers; its version."""
        end = time.monotonic() + 60
        while time.monotonic() < end:
            try:
                status, body = self.ask("GET", "/v2")
                if status == 200:
                    return str(json.loads(body)["version"])
            except OSError:
                time.sleep(0.05)
        raise RuntimeError(f"tritonserver did not start; see {self.folder / 'server.log'}")

    def load(self, config: Json) -> None:
        """Load the model, afresh where limits may have left a trace in the scheduler's counters."""
        wanted = config_pbtxt(config)
        limited = "default_timeout" in wanted or config.get("max_queue_size", 100) < 100
        if wanted == self.loaded and not limited:
            return
        if self.loaded is not None:
            self.unload()
        (self.repository / "m" / "config.pbtxt").write_text(wanted)
        status, body = self.ask("POST", "/v2/repository/models/m/load", b"{}")
        if status != 200:
            raise RuntimeError(f"cannot load: {body.decode()}\n{wanted}")
        self.loaded = wanted

    def unload(self) -> None:
        self.ask("POST", "/v2/repository/models/m/unload", b"{}")
        while self.ask("GET", "/v2/models/m/ready")[0] == 200:
            time.sleep(0.01)
        time.sleep(0.5)
        self.loaded = None

    def pending(self) -> int:
        _, body = self.ask("GET", "/metrics", port=self.port + 2)
        for line in body.decode().splitlines():
            if line.startswith('nv_inference_pending_request_count{model="m"'):
                return int(float(line.rsplit(" ", 1)[1]))
        return 0

    def executions(self) -> list[Json]:
        if not self.log.exists():
            return []
        return [json.loads(line) for line in self.log.read_text().splitlines() if line.endswith("}")]

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(40)
        except subprocess.TimeoutExpired:
            self.process.kill()


# ---- playing a story


class Noisy(Exception):
    """The machine was too slow for this attempt to mean anything."""


@dataclass
class Answer:
    at: float
    status: int | str
    error: str | None = None


@dataclass
class Play:
    """One attempt at one story."""

    server: Server
    story: Story
    answers: dict[str, Answer] = field(default_factory=dict)
    sent: int = 0
    threads: list[threading.Thread] = field(default_factory=list)
    connections: dict[str, http.client.HTTPConnection] = field(default_factory=dict)
    calls: dict[str, Any] = field(default_factory=dict)
    client: Any = None

    def request(self, event: Json) -> tuple[list[int], Json]:
        config = self.story["config"]
        shape = [event.get("images", 1), *event.get("shape", [4])]
        parameters = {k: event[k] for k in ("priority",) if k in event}
        if "timeout_us" in event:
            parameters["timeout"] = event["timeout_us"]
        parameters["exec_ms"] = event.get("exec_ms", config["exec_ms"])
        return shape, parameters

    def post(self, event: Json) -> None:
        name = event["send"]
        shape, parameters = self.request(event)
        count = shape[0] * shape[1]
        tensor = {"name": "x", "shape": shape, "datatype": "UINT8", "data": [0] * count}
        body = json.dumps({"id": name, "inputs": [tensor], "parameters": parameters})
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=20)
        self.connections[name] = connection
        try:
            connection.request("POST", "/v2/models/m/infer", body)
            answer = connection.getresponse()
            content = answer.read()
            error = None if answer.status == 200 else json.loads(content)["error"]
            self.answers[name] = Answer(time.monotonic(), answer.status, error)
        except (OSError, http.client.HTTPException, ValueError, AttributeError) as problem:
            self.answers[name] = Answer(time.monotonic(), "connection closed", type(problem).__name__)
        finally:
            connection.close()

    def call(self, event: Json) -> None:
        import numpy as np
        import tritonclient.grpc as grpc

        self.client = self.client or grpc.InferenceServerClient(f"127.0.0.1:{self.server.port + 1}")
        name = event["send"]
        shape, parameters = self.request(event)
        tensor = grpc.InferInput("x", shape, "UINT8")
        tensor.set_data_from_numpy(np.zeros(shape, np.uint8))

        def done(result: Any, error: Any) -> None:
            status = str(error.status()).removeprefix("StatusCode.") if error else "OK"
            self.answers[name] = Answer(time.monotonic(), status, error.message() if error else None)

        self.calls[name] = self.client.async_infer(
            "m",
            [tensor],
            done,
            request_id=name,
            priority=parameters.get("priority", 0),
            timeout=parameters.get("timeout"),
            parameters={"exec_ms": parameters["exec_ms"]},
        )

    def start(self, event: Json) -> None:
        self.sent += 1
        if self.story.get("transport") == "grpc":
            self.call(event)
            return
        thread = threading.Thread(target=self.post, args=(event,), daemon=True)
        self.threads.append(thread)
        thread.start()

    def seen(self) -> int:
        """How many requests the server has taken in: waiting, run, or refused."""
        run = {name for e in self.server.executions() for name in e["ids"]}
        refused = [n for n, a in list(self.answers.items()) if n not in run and a.error]
        return self.server.pending() + len(run) + len(refused)

    def settle(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while self.seen() < self.sent:
            if time.monotonic() > end:
                raise Noisy("a request took too long to arrive")
            time.sleep(0.002)

    def plug(self) -> None:
        count = self.story["plugs"]
        for k in range(count):
            name = "plug" if count == 1 else f"plug{k + 1}"
            images = self.story["config"]["max_batch"]
            self.start({"send": name, "images": images, "exec_ms": 0})
            end = time.monotonic() + 10
            while len(self.server.executions()) < k + 1:
                if time.monotonic() > end:
                    raise Noisy("the plug did not start")
                time.sleep(0.002)
        time.sleep(0.05)

    def happen(self, event: Json) -> None:
        if "release" in event:
            (self.server.folder / f"release.{event['release']}").touch()
        elif "cancel" in event:
            self.calls[event["cancel"]].cancel()
        elif "hang_up" in event:
            self.connections[event["hang_up"]].sock.shutdown(2)
        else:
            self.start(event)
            self.settle(LATE_MS / 1000)

    def run(self) -> Json:
        for leftover in [*self.server.folder.glob("release.*"), self.server.log]:
            leftover.unlink(missing_ok=True)
        self.server.load(self.story["config"])
        try:
            self.plug()
            zero = time.monotonic()
            for event in self.story["events"]:
                wait = zero + event["at_ms"] / 1000 - time.monotonic()
                if wait < -LATE_MS / 1000:
                    raise Noisy("an event came too late")
                time.sleep(max(0.0, wait))
                self.happen(event)
            self.finish()
        finally:
            self.release_all()
        return self.observed(zero)

    def finish(self) -> None:
        end = time.monotonic() + 20
        names = [e["send"] for e in self.story["events"] if "send" in e]
        while not all(n in self.answers for n in names) or self.server.pending():
            if time.monotonic() > end:
                raise Noisy("some requests were never answered")
            time.sleep(0.01)
        time.sleep(0.05)

    def release_all(self) -> None:
        for k in ("plug", "plug1", "plug2"):
            (self.server.folder / f"release.{k}").touch()
        for thread in self.threads:
            thread.join(25)
        end = time.monotonic() + 20
        while len(self.answers) < self.sent and time.monotonic() < end:
            time.sleep(0.01)
        if self.client is not None:
            self.client.close()
        time.sleep(self.story["config"]["exec_ms"] / 1000 if self.story.get("transport") else 0.02)

    def observed(self, zero: float) -> Json:
        runs = [e for e in self.server.executions() if not e["ids"][0].startswith("plug")]
        runs.sort(key=lambda e: e["at"])
        run = {name for e in runs for name in e["ids"]}
        answers = {n: a for n, a in self.answers.items() if not n.startswith("plug")}
        failed = sorted((n for n, a in answers.items() if a.error), key=lambda n: answers[n].at)
        good = sorted((n for n, a in answers.items() if not a.error), key=lambda n: answers[n].at)
        return {
            "executions": [e["ids"] for e in runs],
            "started_ms": [1000 * (e["at"] - zero) for e in runs],
            "errors": {
                n: {"status": answers[n].status, "text": answers[n].error, "executed": n in run}
                for n in failed
            },
            "error_ms": [1000 * (answers[n].at - zero) for n in failed],
            "responses": together([(n, answers[n].at) for n in good]),
        }


def together(times: list[tuple[str, float]]) -> list[list[str]]:
    """Group answers that came (nearly) at the same time; sorted within a group."""
    groups: list[list[str]] = []
    last = float("-inf")
    for name, at in times:
        if at - last > TOGETHER_MS / 1000:
            groups.append([])
        groups[-1].append(name)
        last = at
    return [sorted(g, key=lambda n: (len(n), n)) for g in groups]


def attempt(server: Server, one: Story) -> Json:
    """One repeat: try until an attempt was quiet enough."""
    for _ in range(ATTEMPTS):
        try:
            return Play(server, one).run()
        except Noisy as why:
            note(f"again ({why}): {one['name']}")
            time.sleep(0.3)
    raise Noisy(one["name"])


COMPARED = ("executions", "errors")


def record(server: Server, one: Story, repeats: int) -> tuple[Story | None, list[Json]]:
    try:
        seen = [attempt(server, one) for _ in range(repeats)]
    except Noisy:
        return None, []
    first = seen[0]
    keys = (*COMPARED, "responses") if one["name"].startswith("order/") else COMPARED
    if any(other[k] != first[k] for other in seen for k in keys):
        return None, seen
    out = dict(one)
    out["executions"] = first["executions"]
    out["started_ms"] = middle([s["started_ms"] for s in seen])
    if first["errors"]:
        when = middle(
            [[dict(zip(s["errors"], s["error_ms"], strict=True))[n] for n in first["errors"]] for s in seen]
        )
        out["rejected"] = [
            {"id": n, **{k: v for k, v in e.items() if k != "executed" or v}, "at_ms": at}
            for (n, e), at in zip(first["errors"].items(), when, strict=True)
        ]
    if one["name"].startswith("order/"):
        out["responses"] = first["responses"]
    return out, seen


def middle(rows: list[list[float]]) -> list[int]:
    """Element-wise median, rounded to 10 ms."""
    return [round(statistics.median(column) / 10) * 10 for column in zip(*rows, strict=True)]


# ---- the file

ABOUT = [
    "Batches formed by a real tritonserver, see record_triton_batching.py. Times: ms after all plugs run.",
    "plugs: requests of max_batch images, one an instance, that run until released (0: the server is idle).",
    "config: no preferred means none configured: Triton then uses [max_batch]. Absent limits are 0: none.",
    "config.exec_ms: how long an execution lasts, unless a request of the batch says more.",
    "executions: the ids that shared a batch, in order, without the plugs.",
    "started_ms, rejected[].at_ms: median of the repeats, to 10 ms; a guide only.",
    "rejected: requests answered with an error; executed: true when the model ran it all the same.",
    "responses: good answers in order, simultaneous ones in one group (only where order is the point).",
    "disagreed: stories whose repeats differ, with what was seen in each.",
]


def dump(stories: list[Story], version: str, repeats: int, dropped: list[Json]) -> str:
    """Compact and readable: one line for each event and each list."""

    def line(value: Any) -> str:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))

    def block(one: Story) -> str:
        rows = []
        for key, value in one.items():
            if key in ("events", "rejected") and len(value) > 1:
                inner = ",\n".join(line(v) for v in value)
                rows.append(f"{line(key)}:[\n{inner}\n]")
            else:
                rows.append(f"{line(key)}:{line(value)}")
        return "{\n" + ",\n".join(rows) + "\n}"

    head = [
        about_text(),
        f'"tritonserver":{line(version)}',
        f'"repeats":{repeats}',
        f'"disagreed":{line(dropped)}',
    ]
    body = ",\n".join(block(s) for s in stories)
    return "{\n" + ",\n".join(head) + ',\n"stories":[\n' + body + "\n]\n}\n"


def about_text() -> str:
    inner = ",\n".join(json.dumps(a, ensure_ascii=False) for a in ABOUT)
    return '"about":[\n' + inner + "\n]"


def merge(
    old: Json, again: list[Story], kept: list[Story], dropped: list[Json]
) -> tuple[list[Story], list[Json]]:
    """The stories of an earlier recording, with those played again put in their place."""
    order = {one["name"]: k for k, one in enumerate(all_stories())}
    names = {one["name"] for one in again}
    rest = [
        [s for s in old[key] if s["name"] in order and s["name"] not in names]
        for key in ("stories", "disagreed")
    ]
    both = [sorted(a + b, key=lambda s: order[s["name"]]) for a, b in zip(rest, (kept, dropped), strict=True)]
    return both[0], both[1]


def note(message: str) -> None:
    print(message, file=sys.stderr, flush=True)  # noqa: T201


def work(
    server: Server, todo: queue.SimpleQueue[tuple[int, Story]], repeats: int, done: dict[int, Any]
) -> None:
    while True:
        try:
            index, one = todo.get_nowait()
        except queue.Empty:
            return
        kept, seen = record(server, one, repeats)
        done[index] = (kept, seen)
        note(
            f"{'kept' if kept else 'DISAGREED'}: {one['name']}: {seen[0]['executions'] if seen else 'noisy'}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="Record the batches a real tritonserver forms.")
    parser.add_argument(
        "--tritonserver", type=Path, required=True, help="folder pytriton/tritonserver of the wheel"
    )
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    parser.add_argument(
        "--only", default="", help="only stories whose name contains this; updates an existing --out"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--servers", type=int, default=3, help="servers to play on side by side")
    parser.add_argument("--port", type=int, default=28000, help="first of 3 loopback ports for each server")
    options = parser.parse_args()
    stories = [s for s in all_stories() if options.only in s["name"]]
    done: dict[int, Any] = {}
    todo: queue.SimpleQueue[tuple[int, Story]] = queue.SimpleQueue()
    for item in enumerate(stories):
        todo.put(item)
    with tempfile.TemporaryDirectory() as folder:
        servers: list[Server] = []
        try:
            for k in range(min(options.servers, len(stories))):
                home = Path(folder) / str(k)
                home.mkdir()
                servers.append(Server(options.tritonserver.resolve(), home, options.port + 3 * k))
            versions = {s.wait_ready() for s in servers}
            threads = [
                threading.Thread(target=work, args=(s, todo, options.repeats, done), daemon=True)
                for s in servers
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            for server in servers:
                server.stop()
    kept = [done[k][0] for k in sorted(done) if done[k][0]]
    dropped = [
        {"name": stories[k]["name"], "seen": [s["executions"] for s in done[k][1]]}
        for k in sorted(done)
        if not done[k][0]
    ]
    if options.only and options.out.exists():
        kept, dropped = merge(json.loads(options.out.read_text()), stories, kept, dropped)
    options.out.write_text(dump(kept, versions.pop(), options.repeats, dropped))
    note(f"{len(kept)} stories kept, {len(dropped)} dropped")


if __name__ == "__main__":
    main()
