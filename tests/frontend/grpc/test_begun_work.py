"""Work for a call that is begun at once, and whose client leaves before the rest has begun."""

from __future__ import annotations

import asyncio

from carpool.frontend.grpc.rpc import begin_now


def test_what_is_cancelled_before_its_task_has_begun_ends_with_what_it_waits_for() -> None:
    async def story() -> None:
        waits_for: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        ended = []

        async def work() -> None:
            try:
                await waits_for
            finally:
                ended.append(True)

        task = begin_now(work())
        assert task is not None
        task.cancel()  # before the loop has run it
        await asyncio.wait([task])
        assert waits_for.cancelled()
        assert ended == [True]

    asyncio.run(story())


def test_what_is_not_cancelled_goes_on() -> None:
    async def story() -> None:
        waits_for: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        found = []

        async def work() -> None:
            found.append(await waits_for)
            await asyncio.sleep(0)
            found.append(2)

        task = begin_now(work())
        assert task is not None
        waits_for.set_result(1)
        await task
        assert found == [1, 2]

    asyncio.run(story())
