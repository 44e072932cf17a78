"""Messages between the supervisor and its children, of any length."""

from __future__ import annotations

import os

import pytest

from carpool.link.child_process import Control, Message, control_pair
from link.joined import run


async def passed(message: dict[str, object], files: list[int]) -> Message:
    ours, theirs = control_pair()
    sender, receiver = Control(ours), Control(theirs)
    try:
        assert sender.send("ready", files, **message)
        received = await receiver.receive()
        assert received is not None
        return received
    finally:
        sender.close()
        receiver.close()


@pytest.mark.parametrize("count", [1, 500, 3000, 50_000])
def test_the_names_of_many_models_arrive(count: int) -> None:
    models = [f"a-model-with-a-name-of-some-length-{number}:{number}" for number in range(count)]
    tasks = dict.fromkeys(models, "detect")

    async def main() -> None:
        received = await passed({"models": models, "tasks": tasks}, [])
        assert received.word == "ready"
        assert received.body["models"] == models
        assert received.body["tasks"] == tasks
        assert not received.files

    run(main())


@pytest.mark.parametrize("padding", [0, 1 << 20])
def test_files_come_along_with_a_message_of_any_length(padding: int) -> None:
    async def main() -> None:
        fd = os.memfd_create("test")
        os.write(fd, b"hello")
        received = await passed({"padding": "x" * padding}, [fd, fd])
        assert len(received.body["padding"]) == padding
        assert len(received.files) == 2
        for file in received.files:
            assert os.pread(file, 10, 0) == b"hello"
            os.close(file)
        os.close(fd)

    run(main())
