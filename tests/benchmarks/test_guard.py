"""A guard against silent slow-down: what each stage takes of a core, by the floor of the same run.

A stage that takes `GROSS` times its usual share of the floor fails. All is CPU time, the least of some rounds in which
stages and floor take turns, so that neither a busy machine nor a slow one fails. The guard is guarded, too: each stage
is made to do its work twice, which has to fail.
"""

import asyncio
import gc
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from functools import partial
from itertools import islice
from math import fsum, inf
from pathlib import Path

import pytest
import pytest_asyncio

from benchmarks import floor, stages, stand, tables
from benchmarks.clock import Clock
from benchmarks.floor import Proof, Script, Verifier
from benchmarks.resync_stages import resyncs
from benchmarks.stages import LivePath
from benchmarks.stand import Load
from benchmarks.world import Spec, World, load_world
from indexer.atproto.crypto import PublicKey, parse_did_key
from indexer.sync.repo import SyncStatus
from tests.benchmarks import twice

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

GROSS = 1.65
LEAST, MOST = 5, 8  # rounds: more than the least as long as a stage seems to be too slow

# What each stage usually takes, by the floor: proofs alone, or the rows by a bare script. The rest of a resync is left
# out: round trips, which cost what the machine makes of them.
PLANNING = {
    "decode": 0.18,
    "split": 0.255,
    "commit": 0.135,
    "signature": 0.85,
    "inversion": 1.17,
    "values": 0.059,
    "plan": 0.49,
    "in turn": 3.4,
}
RECEIVING = {"socket": 0.135}
WRITING = {"client": 0.95, "database": 1.4}
RESYNCING = {"fetch": 4.5, "verify": 2.25, "diff": 6.3, "apply": 0.4, "database": 1.27}

RELAY = "wss://relay.test"
REPOS, RECORDS = 400, 150
LIVE = Spec(REPOS, RECORDS, sigma=0.4, commits=2 * MOST * REPOS)
FRAMES = range(1, 301)  # of rounds without a database
SENT = range(1, 1_001)
AT_ONCE = 2  # resyncs of a round
EXPORTS = Spec(MOST * AT_ONCE, 1_900, sigma=0.0, exports=True)

Costs = Mapping[str, float]
"""Seconds of a core, by stage."""

Measure = Callable[[], Awaitable[tuple[Costs, Costs]]]
"""One round: what the stages took, and the floor of each."""


async def shares(measure: Measure, usual: Costs) -> Costs:
    """What each stage takes by its floor, at best."""
    ours, best = dict.fromkeys(usual, inf), dict.fromkeys(usual, inf)
    for round_ in range(1, MOST + 1):
        spent, least = await measure()
        for stage in usual:
            ours[stage], best[stage] = min(ours[stage], spent[stage]), min(best[stage], least[stage])
        found = {stage: ours[stage] / best[stage] for stage in usual}
        if round_ >= LEAST and not excess(found, usual):
            break
    return found


def excess(found: Costs, usual: Costs) -> set[str]:
    return {stage for stage, share in found.items() if share > GROSS * usual[stage]}


def of_script(script: Script, client: str) -> dict[str, float]:
    """The floor of the stages of a database, of what the script has written since this was last asked.

    Its own part is so little, sending and waiting, that it tells nothing without Postgres's.
    """
    used = dict(script.clock.used)
    script.clock.used.clear()
    return {client: used["client"] + used["database"], "database": used["database"]}


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[World, World]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("worlds")))
        made = load_world(LIVE, lambda items, _: items), load_world(EXPORTS, lambda items, _: items)
    gc.collect()
    gc.freeze()  # no collection during the rounds looks at what lay here before
    yield made
    gc.unfreeze()


@pytest.fixture(scope="module")
def live(worlds: tuple[World, World]) -> World:
    return worlds[0]


@pytest.fixture(scope="module")
def exports(worlds: tuple[World, World]) -> World:
    return worlds[1]


@pytest.fixture(scope="module")
def keys(worlds: tuple[World, World]) -> dict[str, PublicKey]:
    return {account.did: parse_did_key(account.key) for world in worlds for account in world.accounts}


@pytest.fixture(scope="module")
def verifiers(keys: dict[str, PublicKey]) -> dict[str, Verifier]:
    return {did: floor.verifier(key) for did, key in keys.items()}


@pytest.fixture(scope="module")
def proofs(live: World, verifiers: dict[str, Verifier]) -> list[Proof]:
    return [floor.take_apart(frame, verifiers).proof for frame in live.frames(SENT)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def relay(live: World) -> AsyncIterator[Load]:
    async with stand.load("relay", live) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def host(exports: World) -> AsyncIterator[Load]:
    async with stand.load("host", exports) as running:
        yield running


@pytest.fixture
def planning(live: World, keys: dict[str, PublicKey], proofs: list[Proof]) -> Measure:
    repos = {account.did: tables.repo_of(account, SyncStatus.SYNCHRONIZED, 0.0) for account in live.accounts}
    frames = list(live.frames(FRAMES))

    async def measure() -> tuple[Costs, Costs]:
        path = LivePath(Clock(), keys, RELAY)
        events = path.decode(frames)
        path.plan_apart(events, frames, repos)
        path.plan_in_turn(events, frames, repos)
        return path.clock.used, dict.fromkeys(PLANNING, floor.prove(proofs[: len(frames)]))

    return measure


@pytest.fixture
def receiving(relay: Load, proofs: list[Proof]) -> Callable[[int], Measure]:
    """By how many messages are sent for each that is asked for."""

    async def measure(times: int) -> tuple[Costs, Costs]:
        receiving = asyncio.create_task(stages.receive(relay.url, len(SENT)))
        await relay.subscribed(1)
        await relay.tell(SENT[0], times * SENT[-1], 0)
        seconds = await receiving
        await relay.subscribed(0)
        return {"socket": seconds}, {"socket": floor.prove(proofs)}

    return lambda times: partial(measure, times)


@pytest_asyncio.fixture(loop_scope="module")
async def writing(
    live: World, keys: dict[str, PublicKey], verifiers: dict[str, Verifier], database: str
) -> AsyncIterator[Measure]:
    await tables.fill(database, live, lambda _: "https://pds.test", status=SyncStatus.SYNCHRONIZED)
    await tables.settle(database)
    commits = live.frames(range(1, LIVE.commits + 1))

    async def measure() -> tuple[Costs, Costs]:
        frames = list(islice(commits, REPOS))
        path = LivePath(clock, keys, RELAY)
        events = path.decode(frames)
        clock.used.clear()
        await path.write(store, path.plan_in_turn(events, frames, await path.load(store, events)))
        await script.write(floor.statements([floor.take_apart(one, verifiers) for one in islice(commits, REPOS)]))
        return clock.used, of_script(script, "client")

    async with stages.opened(database) as (store, clock), floor.script(database) as script:
        yield measure


@pytest_asyncio.fixture(loop_scope="module")
async def resyncing(
    exports: World, host: Load, verifiers: dict[str, Verifier], database: str, tmp_path: Path
) -> AsyncIterator[Measure]:
    async with stages.opened(database) as (store, _):
        await store.add([account.did for account in exports.accounts])
    await tables.hold_back(database)
    await tables.settle(database)
    accounts = iter(exports.accounts)

    async def measure() -> tuple[Costs, Costs]:
        turn = {account.did: account for account in islice(accounts, AT_ONCE)}
        await tables.let_go(database, list(turn))
        spent = await running.run()
        async for changes in floor.written(database, list(turn)):
            await script.rewrite([floor.head_row(account) for account in turn.values()], changes)
        proof = fsum(
            floor.prove_export(exports.exports[slice(*one.export)], verifiers[did]) for did, one in turn.items()
        )
        return spent, dict.fromkeys(RESYNCING, proof) | of_script(script, "apply")

    async with resyncs(database, host.url, tmp_path) as running, floor.script(database) as script:
        yield measure


async def test_planning(planning: Measure) -> None:
    found = await shares(planning, PLANNING)
    assert not excess(found, PLANNING), found


async def test_receiving(receiving: Callable[[int], Measure]) -> None:
    found = await shares(receiving(1), RECEIVING)
    assert not excess(found, RECEIVING), found


async def test_writing(writing: Measure) -> None:
    found = await shares(writing, WRITING)
    assert not excess(found, WRITING), found


async def test_resyncing(resyncing: Measure) -> None:
    found = await shares(resyncing, RESYNCING)
    assert not excess(found, RESYNCING), found


@pytest.mark.parametrize("slow", twice.PLANNING, ids="+".join)
async def test_planning_twice(planning: Measure, monkeypatch: pytest.MonkeyPatch, slow: tuple[str, ...]) -> None:
    twice.PLANNING[slow](monkeypatch)
    found = await shares(planning, PLANNING)
    assert excess(found, PLANNING) >= set(slow), found


async def test_receiving_twice(receiving: Callable[[int], Measure], monkeypatch: pytest.MonkeyPatch) -> None:
    twice.received(monkeypatch)
    found = await shares(receiving(2), RECEIVING)
    assert excess(found, RECEIVING), found


async def test_writing_twice(writing: Measure, monkeypatch: pytest.MonkeyPatch) -> None:
    twice.written(monkeypatch)
    found = await shares(writing, WRITING)
    assert excess(found, WRITING) == set(WRITING), found


@pytest.mark.parametrize("slow", twice.RESYNCING, ids="+".join)
async def test_resyncing_twice(resyncing: Measure, monkeypatch: pytest.MonkeyPatch, slow: tuple[str, ...]) -> None:
    twice.RESYNCING[slow](monkeypatch)
    found = await shares(resyncing, RESYNCING)
    assert excess(found, RESYNCING) >= set(slow), found


async def test_every_stage_is_doubled() -> None:
    doubled = [stage for slow in (*twice.PLANNING, *twice.RESYNCING) for stage in slow]
    assert sorted(doubled) == sorted((*PLANNING, *RESYNCING))
