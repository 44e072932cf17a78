"""A server that is one process is killed from outside when its loop stands still."""

from __future__ import annotations

import signal
import subprocess
import sys
from textwrap import dedent

PATIENCE_S = 60.0


def run(body: str) -> tuple[int, str]:
    program = f"""
    import asyncio, time
    from carpool.config.server import ServerSettings
    from carpool.process.lone_watch import watched

    async def main():
        with watched(ServerSettings(watchdog_s=2.0)):
            {body}

    asyncio.run(main())
    """
    done = subprocess.run(
        [sys.executable, "-c", dedent(program)], capture_output=True, text=True, timeout=PATIENCE_S
    )
    return done.returncode, done.stdout + done.stderr


def test_a_loop_that_hangs_is_killed_and_told() -> None:
    code, said = run(f"await asyncio.sleep(0.2); time.sleep({2 * PATIENCE_S})")
    assert code == -signal.SIGKILL
    assert "process-hangs" in said


def test_a_loop_that_moves_is_left_alone() -> None:
    code, said = run("await asyncio.sleep(4.5)")
    assert (code, said) == (0, "")
