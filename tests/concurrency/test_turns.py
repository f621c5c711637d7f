"""Turns: one at a time, keys alternate, and a user that is cancelled takes nothing with it."""

import asyncio

from indexer.concurrency.turns import Turns


class Users:
    """Users of turns. Each turn ends when `go_on` is released once."""

    def __init__(self) -> None:
        self.turns = Turns()
        self.began: list[str] = []
        self.go_on = asyncio.Semaphore(0)

    async def use(self, name: str) -> None:
        async with self.turns.turn(name[0]):
            self.began.append(name)
            await self.go_on.acquire()

    async def start(self, *names: str) -> list[asyncio.Task[None]]:
        tasks = [asyncio.create_task(self.use(name)) for name in names]
        await settle()
        return tasks


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_keys_take_turns_however_many_users_one_of_them_has() -> None:
    users = Users()
    tasks = await users.start("a1", "a2", "a3", "a4", "b1", "c1", "b2")
    assert users.began == ["a1"]
    for _ in tasks:
        users.go_on.release()
        await settle()
    assert users.began == ["a1", "a2", "b1", "c1", "a3", "b2", "a4"]
    await users.start("d1")
    assert users.began[-1] == "d1", "a turn without others begins at once"
    users.go_on.release()
    await settle()


async def test_cancelled_users_give_their_turns_to_the_next_ones() -> None:
    users = Users()

    async def cancel_next() -> None:
        async with users.turns.turn("a"):
            await users.go_on.acquire()
        next_one.cancel()  # its turn has begun, but it has not run

    first = asyncio.create_task(cancel_next())
    await settle()
    waiting, next_one, last = await users.start("a1", "b1", "c1")
    waiting.cancel()
    await settle()
    users.go_on.release()
    await asyncio.wait([first, next_one])
    await settle()
    assert users.began == ["c1"]
    users.go_on.release()
    await last
