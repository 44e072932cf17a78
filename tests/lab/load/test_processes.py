"""What generating processes say to the one that shares out the run: all of it arrives, however long it is."""

from __future__ import annotations

import asyncio
import fcntl
import multiprocessing
import struct
import termios
import threading
import time
from array import array
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler

import pytest

from carpool.lab.load.generator import LostPart, _receive, _watch
from carpool.lab.load.load_report import Part
from carpool.lab.load.tally import Histogram, Tally
from lab.load.stub import PATIENCE, in_loop

LONG = 8 << 20  # many times the buffer of a socket


def long_part() -> Part:
    """As of a run with a great many phases."""
    tallies = [Tally() for _ in range(300)]
    for number, tally in enumerate(tallies):
        for step in range(200):
            tally.response.add(1e-5 * 1.02**step * (number + 1))
    return Part(tallies, 3.0, 3.0, False, 1.0, 4.0, Histogram([0.001]), {"connections": 2})


def send_in_halves(pipe: Connection, said: object, reader: Connection) -> None:
    """The second when the first has been read."""
    data = bytes(ForkingPickler.dumps(said))
    message = struct.pack("!i", len(data)) + data
    half = len(message) // 2
    pipe._send(message[:half])  # type: ignore[attr-defined]
    end = time.monotonic() + PATIENCE
    while unread(reader) and time.monotonic() < end:
        time.sleep(0.001)
    pipe._send(message[half:])  # type: ignore[attr-defined]


def unread(pipe: Connection) -> int:
    found = array("i", [0])
    fcntl.ioctl(pipe.fileno(), termios.FIONREAD, found)
    return found[0]


def test_a_report_that_comes_in_pieces_is_read_whole() -> None:
    ours, theirs = multiprocessing.Pipe()

    async def main() -> list[object]:
        return [await _receive(ours) for _ in range(2)]

    def say() -> None:
        send_in_halves(theirs, long_part(), ours)
        theirs.send("more")

    sending = threading.Thread(target=say)
    sending.start()
    found, more = in_loop(main())
    sending.join(PATIENCE)
    assert isinstance(found, Part)
    assert [tally.response.count for tally in found.tallies] == [200] * 300
    assert more == "more"


def test_a_process_that_listens_for_a_stop_sends_a_long_report_whole() -> None:
    ours, theirs = multiprocessing.Pipe()
    heard: list[object] = []

    async def main() -> None:
        stopped = asyncio.Event()
        _watch(ours, stopped.set)
        reading = threading.Thread(target=lambda: heard.append(theirs.recv()))
        loop = asyncio.get_running_loop()
        loop.call_later(0.05, reading.start)  # by then what is sent has filled the buffer
        await asyncio.to_thread(ours.send, bytes(LONG))
        await asyncio.to_thread(reading.join, PATIENCE)
        theirs.send("stop")
        await stopped.wait()
        loop.remove_reader(ours.fileno())

    in_loop(main())
    assert heard == [bytes(LONG)]


def test_a_process_that_dies_within_its_report_is_lost() -> None:
    ours, theirs = multiprocessing.Pipe()

    async def main() -> None:
        waiting = asyncio.ensure_future(_receive(ours))
        theirs._send(b"\x00\x10\x00\x00half of it")  # type: ignore[attr-defined]
        theirs.close()
        with pytest.raises(LostPart):
            await waiting

    in_loop(main())
