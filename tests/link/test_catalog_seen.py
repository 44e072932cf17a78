"""A change of the catalogue is over when every front end has it in force."""

from __future__ import annotations

import asyncio

import pytest

from carpool.errors import CarpoolError, NotFound
from carpool.link.records import SEEN, to_engine
from link.joined import joined, run
from waiting import until_in_loop as until


def test_every_door_has_the_model_before_the_load_returns() -> None:
    async def main() -> None:
        async with joined() as link:
            doors = [(await link.door()).door for _ in range(3)]
            newest = await doors[0].ask("load", {})
            for door in doors:
                assert f"model{newest}" in door.catalog.newest
                assert door.catalog.number == 2

    run(main())


def test_a_door_that_has_not_said_so_is_waited_for() -> None:
    async def main() -> None:
        async with joined() as link:
            client = await link.door()
            sock, _ = await link.raw()
            with sock:
                loading = asyncio.ensure_future(client.door.ask("load", {}))
                await until(lambda: client.door.catalog.number == 2)
                await client.door.ask("ping", {})
                assert not loading.done()
                sock.send(to_engine(SEEN, 1))  # an older one does not count
                await client.door.ask("ping", {})
                assert not loading.done()
                sock.send(to_engine(SEEN, 2))
                await asyncio.wait_for(loading, 40.0)

    run(main())


def test_a_door_that_went_away_is_not() -> None:
    async def main() -> None:
        async with joined() as link:
            client = await link.door()
            sock, _ = await link.raw()
            loading = asyncio.ensure_future(client.door.ask("load", {}))
            await until(lambda: client.door.catalog.number == 2)
            sock.close()
            await asyncio.wait_for(loading, 40.0)

    run(main())


def test_a_door_that_is_stuck_holds_it_up_only_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("carpool.engine.engine_link._SEEN_WITHIN_S", 0.01)

    async def main() -> None:
        async with joined() as link:
            client = await link.door()
            sock, _ = await link.raw()
            with sock:
                await asyncio.wait_for(client.door.ask("load", {}), 40.0)

    run(main())


def test_questions_are_answered_or_fail_as_they_did() -> None:
    async def main() -> None:
        async with joined() as link:
            door = (await link.door()).door
            assert await door.ask("ping", {"a": [1, None]}) == ["ping", {"a": [1, None]}]
            with pytest.raises(NotFound, match="no such thing") as caught:
                await door.ask("absent", {})
            assert caught.value.field == "name"
            with pytest.raises(CarpoolError, match="exploded"):
                await door.ask("explode", {})

    run(main())


def test_the_gate_is_asked_when_there_is_one() -> None:
    async def main() -> None:
        async with joined() as link:
            client = await link.door()
            fixed = client.model("fixed")
            assert client.door.refuses(fixed, 1.0, 0.5) is None
            client.door.advise(lambda entry, deadline, now, *_: NotFound(f"{entry.name} {deadline} {now}"))
            refusal = client.door.refuses(fixed, 1.0, 0.5)
            assert refusal is not None
            assert refusal.message == "fixed 1.0 0.5"

    run(main())
