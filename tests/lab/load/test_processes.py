"""What generating processes say to the one that shares out the run: all of it arrives, however long it is."""

from __future__ import annotations

import fcntl
import multiprocessing
import struct
import termios
import threading
from array import array
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler

import pytest

from carpool.lab.load.generator import LostPart, _receive
from carpool.lab.load.load_report import Part
from carpool.lab.load.tally import Histogram, Tally
from lab.load.stub import PATIENCE, in_loop
from waiting import until


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
    until(lambda: not unread(reader))
    pipe._send(message[half:])  # type: ignore[attr-defined]


def unread(pipe: Connection) -> int:
    found = array("i", [0])
    fcntl.ioctl(pipe.fileno(), termios.FIONREAD, found)
    return found[0]


def test_a_report_that_comes_in_pieces_is_read_whole() -> None:
    ours, theirs = multiprocessing.Pipe()

    async def main() -> list[object]:
        with ThreadPoolExecutor(1) as threads:
            return [await _receive(threads, ours) for _ in range(2)]

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


def test_a_process_that_dies_within_its_report_is_lost() -> None:
    ours, theirs = multiprocessing.Pipe()

    async def main() -> None:
        theirs._send(b"\x00\x10\x00\x00half of it")  # type: ignore[attr-defined]
        theirs.close()
        with ThreadPoolExecutor(1) as threads, pytest.raises(LostPart):
            await _receive(threads, ours)

    in_loop(main())
