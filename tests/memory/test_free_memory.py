"""Freed memory is given back after much of it, and not for every message."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from carpool.memory import free_memory
from carpool.memory.free_memory import FreeMemory
from waiting import until_in_loop as until


def test_it_is_given_back_once_for_many_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(free_memory, "_AFTER_S", 0.0)
    asked: list[int] = []

    async def main() -> None:
        with ThreadPoolExecutor(1) as threads:
            background = FreeMemory(threads)
            background._trim = asked.append
            for _ in range(1000):
                background.freed(1000)  # small ones are used again
            background.freed(15 << 20)
            await asyncio.sleep(0.01)
            assert not asked
            for _ in range(5):
                background.freed(15 << 20)
            await until(lambda: asked)
            background.close()
        assert asked == [0]

    asyncio.run(main())


_BLOCKS = """
import ctypes
from concurrent.futures import ThreadPoolExecutor
from carpool.memory.free_memory import FreeMemory

FreeMemory(ThreadPoolExecutor(1))
library = ctypes.CDLL(None)
library.malloc.restype = ctypes.c_void_p
library.free.argtypes = [ctypes.c_void_p]

class Info(ctypes.Structure):
    _fields_ = [(f"field{n}", ctypes.c_size_t) for n in range(10)]

library.mallinfo2.restype = Info
for _ in range(3):
    before = library.mallinfo2().field4  # bytes in pages of their own
    block = library.malloc(30 << 20)
    print(library.mallinfo2().field4 - before >= 30 << 20)
    library.free(block)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="of the GNU C library")
def test_large_blocks_have_pages_of_their_own_again_and_again() -> None:
    told = subprocess.run([sys.executable, "-c", _BLOCKS], capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["True"] * 3


_KEPT = """
import ctypes
from concurrent.futures import ThreadPoolExecutor
from carpool.memory.free_memory import FreeMemory

threads = ThreadPoolExecutor(1)
FreeMemory(threads, decodes=True)
library = ctypes.CDLL(None)
library.malloc.restype = ctypes.c_void_p
library.free.argtypes = [ctypes.c_void_p]

class Info(ctypes.Structure):
    _fields_ = [(f"field{n}", ctypes.c_size_t) for n in range(10)]

library.mallinfo2.restype = Info

def work():
    blocks = [library.malloc(20 << 20) for _ in range(4)]
    for block in reversed(blocks):
        library.free(block)

for _ in range(3):
    threads.submit(work).result()
    print(library.mallinfo2().field0 < 32 << 20)  # of all threads
"""


@pytest.mark.skipif(sys.platform != "linux", reason="of the GNU C library")
def test_threads_that_decode_keep_little() -> None:
    told = subprocess.run([sys.executable, "-c", _KEPT], capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["True"] * 3
