"""Opens the files behind clients' shared memory with care, and reads and writes them without ever mapping
them.

A client can shrink its memory whenever it likes, and a process that touches a map beyond the end of its file
is killed for it. `pread` and `pwrite` only come back short. For 150 KB they take 4 µs more than a map. And
what was copied stays as it is: a model that reads a client's own memory would check an index and use another.

So a tensor is copied once, to where it is needed: into its batch, by the code that makes it (`RegionReads`).
"""

from __future__ import annotations

import os
import re
import stat
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from carpool.compiling import mypyc_attr
from carpool.errors import InvalidInput
from carpool.types import Array, SharedMemory

FOLDER = "/dev/shm"

_KEY = re.compile(r"/?([A-Za-z0-9._-]{1,200})")
_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
EXTENSION = "system_shared_memory"
NOT_ALLOWED = "Client shared memory is disabled. Start the server with '--allow-client-shm' to enable."


@mypyc_attr(native_class=False)  # it is written as JSON
@dataclass(frozen=True, slots=True)
class Region:
    """Describes shared memory that a client registered: `byte_size` bytes from `offset` on in
    `/dev/shm/{key}`."""

    number: int  # never used again, so that a name registered anew is a new region
    name: str
    key: str
    offset: int
    byte_size: int
    inode: int  # of the file that was registered: another may take its name
    owner: str = ""  # the holder of the key that registered it, whose alone it is


def region_key(owner: str, name: str) -> str:
    """Returns under what a region is known: two owners may give one name."""
    return f"{owner}\0{name}" if owner else name


def open_file(key: str) -> int:
    """A descriptor of shared memory that a client made with `shm_open`; raises `InvalidInput`."""
    found = _KEY.fullmatch(key)
    if found is None or ".." in key or found[1] == ".":
        raise InvalidInput(
            "key must be the name of shared memory: letters, digits, '.', '_' and '-', at most 200 of them,"
            " with or without one '/' before them",
            field="key",
        )
    try:
        fd = os.open(f"{FOLDER}/{found[1]}", _FLAGS)
    except OSError as error:
        raise InvalidInput(
            f"Unable to open shared memory region: '{key}' (for reading and writing): {error.strerror}",
            field="key",
        ) from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise InvalidInput(f"'{key}' is not shared memory", field="key")
    return fd


class OpenRegion:
    """Represents a registered region, open. A holder of this object can use it, registered still or not.

    The file is closed with the last reference, so that a request under way, perhaps in a thread, never finds
    its descriptor closed or another's.
    """

    __slots__ = ("_fd", "region")

    def __init__(self, region: Region) -> None:
        self._fd = -1
        self.region = region
        self._fd = open_file(region.key)
        if os.fstat(self._fd).st_ino != region.inode:
            raise InvalidInput(f"shared memory '{region.key}' was replaced by another", field="key")

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    def check(self, place: SharedMemory, owner: str) -> None:
        """That the place lies in the region; `owner` is the tensor."""
        size = self.region.byte_size
        if place.offset + place.byte_size > size:
            offset = "offset" if place.offset >= size else "offset + byte size"
            raise InvalidInput(
                f"Invalid {offset} for shared memory region: '{self.region.name}'; {owner} takes"
                f" {place.byte_size} bytes from {place.offset} on, but the region has {size} bytes",
                field=f"{owner}.parameters.shared_memory_byte_size",
            )

    def read(self, offset: int, into: memoryview, owner: str) -> None:
        """Fill `into`, contiguous memory, with what begins there in the region. Safe in any thread."""
        start, wanted = self.region.offset + offset, into.nbytes
        try:
            done = os.preadv(self._fd, [into], start)
            while done < wanted:
                count = os.preadv(self._fd, [into.cast("B")[done:]], start + done)
                if not count:
                    raise self._unusable(owner, f"has shrunk: {done} of {wanted} bytes are there")
                done += count
        except OSError as error:
            raise self._unusable(owner, f"cannot be read: {error.strerror}") from None

    def write(self, place: SharedMemory, data: bytes | bytearray | memoryview, owner: str) -> None:
        """Put the bytes at the start of the place, which has room for them. Safe in any thread."""
        view = memoryview(data)
        start, wanted, done = self.region.offset + place.offset, len(view), 0
        if os.fstat(self._fd).st_size < start + wanted:  # or writing would make it longer
            raise self._unusable(owner, f"has shrunk: it has no room for {wanted} bytes any more")
        while done < wanted:
            try:
                done += os.pwrite(self._fd, view[done:], start + done)
            except OSError as error:
                raise self._unusable(owner, f"cannot be written: {error.strerror}") from None

    def _unusable(self, owner: str, why: str) -> InvalidInput:
        field = f"{owner}.parameters.shared_memory_region"
        return InvalidInput(f"{owner}: region '{self.region.name}' {why}", field=field)


class RegionRead(NamedTuple):
    """Represents one tensor in a client's memory."""

    region: OpenRegion
    offset: int


class RegionReads:
    """Holds the inputs of one request that are still in clients' memory, for the thread that needs them."""

    __slots__ = ("_reads",)

    def __init__(self, reads: Mapping[str, RegionRead]) -> None:
        self._reads = reads

    def into(self, name: str, array: Array) -> None:
        """Raises `InvalidInput` for what is not there any more."""
        read = self._reads[name]
        read.region.read(read.offset, array.data, f"input '{name}'")


PLACE = struct.Struct("<QQ")
"""What front ends say of each such input: the number of its region, and where in that it begins."""


def find_regions(
    places: bytes, named: Sequence[tuple[str, int]], regions: Mapping[int, OpenRegion]
) -> RegionReads:
    """`named` are the inputs and their sizes. Raises `InvalidInput` for a region that is gone, ValueError for
    what a front end never says."""
    reads: dict[str, RegionRead] = {}
    for (number, offset), (name, size) in zip(PLACE.iter_unpack(places), named, strict=True):
        region = regions.get(number)
        if region is None:
            raise InvalidInput(
                f"Unable to find shared memory region, for input '{name}'; it is not registered any more",
                field=f"input '{name}'.parameters.shared_memory_region",
            )
        if offset + size > region.region.byte_size:
            raise ValueError(f"input '{name}' reaches beyond its region")
        reads[name] = RegionRead(region, offset)
    return RegionReads(reads)
