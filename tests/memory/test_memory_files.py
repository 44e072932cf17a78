"""Files of shared memory: what can be opened, and that nothing a client does to one hurts us."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.errors import InvalidInput
from carpool.memory.client_files import OpenRegion, open_file
from carpool.types import SharedMemory
from frontend.client_files import client_file

CONTENT = bytes(range(256)) * 4


def test_a_key_with_and_without_its_slash() -> None:
    with client_file(b"x") as file:
        for key in (file.key, file.key[1:]):
            os.close(open_file(key))


@pytest.mark.parametrize(
    "key",
    [
        "",
        "/",
        "//x",
        ".",
        "..",
        "/..",
        "../etc/passwd",
        "a/b",
        "a..b",
        "x\n",
        "x\0",
        "é",
        "x" * 201,
        "/dev/shm/x",
    ],
)
def test_a_key_that_is_no_name(key: str) -> None:
    with pytest.raises(InvalidInput, match="key must be the name") as raised:
        open_file(key)
    assert raised.value.field == "key"


@given(st.text(max_size=12))
def test_no_key_leads_out_of_the_folder(key: str) -> None:
    with pytest.raises(InvalidInput):
        open_file("../" + key)


def test_only_a_plain_file_is_shared_memory() -> None:
    with pytest.raises(InvalidInput, match="No such file"):
        open_file("/carpool-test-there-is-none")
    name = f"carpool-test-{os.getpid()}-odd"
    path = Path("/dev/shm") / name
    for make in (lambda: os.mkfifo(path), lambda: path.symlink_to("/etc/hostname"), path.mkdir):
        make()
        try:
            with pytest.raises(InvalidInput):
                open_file(name)
        finally:
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()


def test_another_file_under_the_same_key_is_not_the_region() -> None:
    with client_file(CONTENT) as file:
        region = file.region()
        keep = os.open(file.path, os.O_RDONLY)  # else its number could be given to the next one
        file.path.unlink()
        file.path.write_bytes(CONTENT)
        with pytest.raises(InvalidInput, match="replaced by another"):
            OpenRegion(region)
        os.close(keep)
        assert file.descriptors() == 0


@given(
    offset=st.integers(0, 200), start=st.integers(0, 900), size=st.integers(0, 900), cut=st.integers(0, 1024)
)
def test_reading_gives_the_bytes_that_are_there_or_says_so(
    offset: int, start: int, size: int, cut: int
) -> None:
    """Whatever the region, the place in it and what is left of the file."""
    with client_file(CONTENT) as file:
        region = OpenRegion(file.region(offset=offset))
        place = SharedMemory("r", size, start)
        if start + size > 1024 - offset:
            with pytest.raises(InvalidInput, match=r"region: 'r'; .* the region has \d+ bytes"):
                region.check(place, "input 'x'")
            return
        region.check(place, "input 'x'")
        file.shrink(cut)
        into = memoryview(bytearray(size))
        if offset + start + size <= cut or not size:
            region.read(place.offset, into, "input 'x'")
            assert bytes(into) == CONTENT[offset + start :][:size]
        else:
            with pytest.raises(InvalidInput, match="has shrunk") as raised:
                region.read(place.offset, into, "input 'x'")
            assert raised.value.field == "input 'x'.parameters.shared_memory_region"


@given(
    offset=st.integers(0, 200), start=st.integers(0, 800), size=st.integers(0, 24), cut=st.integers(0, 1024)
)
def test_writing_changes_only_its_place_and_never_the_length(
    offset: int, start: int, size: int, cut: int
) -> None:
    with client_file(CONTENT) as file:
        region = OpenRegion(file.region(offset=offset))
        file.shrink(cut)
        data, place = b"\xaa" * size, SharedMemory("r", size, start)
        if offset + start + size > cut:
            with pytest.raises(InvalidInput, match="has shrunk"):
                region.write(place, data, "output 'y'")
            assert file.read() == CONTENT[:cut]
        else:
            region.write(place, data, "output 'y'")
            at = offset + start
            assert file.read() == (CONTENT[:at] + data + CONTENT[at + size :])[:cut]


@given(offset=st.integers(0, 2**80), size=st.integers(0, 2**80))
def test_numbers_of_any_size_are_only_out_of_bounds(offset: int, size: int) -> None:
    with client_file(b"1234") as file:
        region = OpenRegion(file.region())
        if offset + size > 4:
            with pytest.raises(InvalidInput, match="has 4 bytes"):
                region.check(SharedMemory("r", size, offset), "input 'x'")


def test_the_file_is_closed_with_its_last_user() -> None:
    with client_file(CONTENT) as file:
        region = OpenRegion(file.region())
        user = [region]
        del region
        assert file.descriptors() == 1
        user.clear()
        assert file.descriptors() == 0
