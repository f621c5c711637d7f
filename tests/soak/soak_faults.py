"""Faults of the simulation, one after the other, in a world of constant size."""

import asyncio
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import get_args

from tests.faulty_network import FaultyAccount
from tests.simulation.drawn_world import EVERYTHING, LIKE, NOTE
from tests.simulation.fault_injection import inject
from tests.simulation.fault_schedule import (
    BrokenConnection,
    ChangedScope,
    Damage,
    DamagedCommit,
    DatabaseProblem,
    DelayedMessages,
    DirectoryProblem,
    ExportProblem,
    Fault,
    FaultyExport,
    ForgedMessage,
    Forgery,
    KilledDaemon,
    LostCommit,
    LostWindow,
    RepeatedMessages,
    StoppedRelay,
    UndecodableMessages,
    UnreachableDatabase,
    UnreachableDirectory,
)
from tests.soak.soak_world import SoakWorld
from tests.waiting import until

ACCOUNT_FAULTS: dict[type[Fault], Callable[[Random, str], Fault]] = {
    LostCommit: lambda _, did: LostCommit(did),
    DamagedCommit: lambda random, did: DamagedCommit(did, random.choice(get_args(Damage))),
    DelayedMessages: lambda random, did: DelayedMessages(did, random.choice(((0,), (1,), (0, 1)))),
    FaultyExport: lambda random, did: FaultyExport(did, random.choice(get_args(ExportProblem)), random.choice((1, 2))),
    UnreachableDirectory: lambda random, did: UnreachableDirectory(did, random.choice(get_args(DirectoryProblem))),
}
"""Faults of one account. Others may happen meanwhile."""
COMMON_FAULTS: dict[type[Fault], Callable[[Random, str], Fault]] = {
    Forgery: lambda random, did: Forgery(did, random.choice(get_args(ForgedMessage)), 0),  # `forgery_time` has the time
    RepeatedMessages: lambda random, _: RepeatedMessages(random.randrange(1, 50), random.random() < 0.5),
    UndecodableMessages: lambda random, _: UndecodableMessages(random.randrange(1, 4), late=False),
    BrokenConnection: lambda *_: BrokenConnection(),
    KilledDaemon: lambda *_: KilledDaemon(),
    StoppedRelay: lambda *_: StoppedRelay(),
    UnreachableDatabase: lambda random, _: UnreachableDatabase(random.choice(get_args(DatabaseProblem))),
    LostWindow: lambda random, _: LostWindow(random.randint(1, 5), random.random() < 0.5),
    ChangedScope: lambda *_: ChangedScope((NOTE, LIKE)),
}
"""Faults that concern everybody. They happen one at a time."""
FAULT_INTERVAL = 15.0
"""Seconds from the end of one fault to the next, at least."""
FAULT_SECONDS = 3.0
"""How long a fault lasts at least."""


class SoakFaults:
    """Lets faults happen. Each one must have an effect.

    Attributes:
        fired: How often each kind of fault has happened.
        failed: Faults that had no effect, each with the reason.
    """

    def __init__(self, world: SoakWorld) -> None:
        self.fired: Counter[str] = Counter()
        self.failed: list[str] = []
        self._world = world

    async def run(self, stop: asyncio.Event) -> None:
        """Let faults happen until `stop` is set, and wait until all of them have ended."""
        kinds = (*ACCOUNT_FAULTS, *COMMON_FAULTS)
        async with asyncio.TaskGroup() as group:
            while not stop.is_set():
                for kind in self._world.random.sample(kinds, len(kinds)):
                    if kind in COMMON_FAULTS:
                        await self._disturb_all(kind)
                    else:
                        group.create_task(self._disturb_account(kind))
                    if await _is_set_within(stop, FAULT_INTERVAL):
                        break

    def _victim(self) -> FaultyAccount:
        return self._world.random.choice(self._world.free())

    async def _disturb_all(self, kind: type[Fault]) -> None:
        world = self._world
        if kind is Forgery:  # While the directory does not answer, a forged message causes a fetch.
            await until(lambda: not world.reserved, world.log_tails)
        victim = self._victim()
        world.reserved.add(victim.did)
        try:
            if kind is Forgery:  # An event before this one may desynchronize the repo, and then nothing is rejected.
                await world.caught_up()
            await self._perform(COMMON_FAULTS[kind](world.random, victim.did))
        finally:
            world.reserved.discard(victim.did)
        if kind is ChangedScope:
            await self._perform(ChangedScope(EVERYTHING))

    async def _disturb_account(self, kind: type[Fault]) -> None:
        """Let a fault happen to an account, which then commits: the large one if its export is fetched after it."""
        world = self._world
        victim = world.large if kind is LostCommit and world.large.did not in world.reserved else self._victim()
        world.reserved.add(victim.did)
        try:
            if kind is UnreachableDirectory:
                await self._perform(ACCOUNT_FAULTS[kind](world.random, victim.did), lambda: world.rotate_key(victim))
            else:
                await self._perform(ACCOUNT_FAULTS[kind](world.random, victim.did), lambda: world.commit(victim))
        finally:
            world.reserved.discard(victim.did)

    async def _perform(self, fault: Fault, act: Callable[[], None] = lambda: None) -> None:
        try:
            await self._inject(fault, act)
        except AssertionError as error:
            self.failed.append(f"{fault}: {error}")
        else:
            self.fired[type(fault).__name__] += 1

    async def _inject(self, fault: Fault, act: Callable[[], None]) -> None:
        """Let a fault happen, with something that an account does at its beginning, and wait for its effect."""
        world = self._world
        before = world.fired[fault]
        async with inject(world, fault):
            act()
            await asyncio.sleep(FAULT_SECONDS)
        effects = [effect for waiting, effect in world.unfinished if waiting is fault]
        world.unfinished[:] = [entry for entry in world.unfinished if entry[0] is not fault]
        for effect in effects:
            await until(effect, lambda: f"{fault} has no effect: {world.log_tails()}")
        assert effects or world.fired[fault] > before, "it has not happened"


async def _is_set_within(event: asyncio.Event, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True
