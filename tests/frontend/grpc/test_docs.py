"""docs/protocols.md: its program runs, and it names what the code names."""

from __future__ import annotations

import re
import subprocess
import sys

from carpool.frontend.grpc.grpc_infer import COMPRESSION
from carpool.frontend.grpc.grpc_service import STATUSES
from carpool.frontend.grpc.infer_messages import BATCH, FINAL, TIMES
from carpool.frontend.grpc.stream_infer import MOST_UNANSWERED
from carpool.link.senders import DEADLINE, SOURCE
from doc_pages import part_of
from frontend.grpc.front_end import front_end

PAGE = part_of("protocols.md", "gRPC")


def test_the_program_runs() -> None:
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    with front_end() as front:
        program = program.replace("localhost:8001", front.url).replace(
            "client_timeout=0.2", "client_timeout=20"
        )
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
        )
    assert done.stdout.split("\n")[:2] == ["[[15.  1.  2.  3.]]", "2.0"]


def test_every_name_is_on_the_page() -> None:
    names = [*TIMES, BATCH, FINAL, COMPRESSION, DEADLINE.lower(), SOURCE.lower(), str(MOST_UNANSWERED)]
    names += [status.name for status in STATUSES.values()]
    names += ["carpool-reason", "carpool-field", "carpool-predicted-ms", "retry-after", "server-timing"]
    assert [name for name in names if name not in PAGE] == []
