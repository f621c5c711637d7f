"""The daemon is killed at each of its crash points, and at random ones: nothing is lost, and nothing is doubled."""

import ast
import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from indexer import crash_points
from indexer.localnet.http_server import Fault
from indexer.localnet.local_network import LocalNetwork
from indexer.localnet.local_pds import GET_REPO
from indexer.localnet.scenario import NOTE
from indexer.store.schema_version import schema_is_current
from tests.background import running
from tests.citus_server import CitusServer
from tests.crashes.death_world import Act, DeathWorld, death_world
from tests.crashes.passed_points import PassedPoints, record_points
from tests.crashes.short_waits import forget_soon, wait_little
from tests.daemon.running_daemon import publish_key_silently
from tests.daemon.test_scope_crashes import DEATHS as SCOPE_DEATHS
from tests.daemon_forks import DaemonFork, Death
from tests.daemon_process import daemon_environment
from tests.database_checks import assert_change_log_consistent, wait_until_equal
from tests.passed_time import EXPIRE_LEASES
from tests.service.feed.webhook_server import WebhookServer
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def both(*points: str) -> list[Death]:
    """Die in the transaction, and after its COMMIT."""
    return [Death(point, committed) for point in points for committed in (False, True)]


async def nothing(_world: DeathWorld) -> None:
    """Change nothing."""


async def write(world: DeathWorld) -> None:
    world.create_account()
    world.act(3)


async def keep_writing(world: DeathWorld) -> None:
    """Let accounts that the daemon knows create a record again and again."""
    while True:
        for account in world.network.accounts.values():
            if account.status is None:
                account.create(NOTE, {"text": "one of few"})
        await asyncio.sleep(0.05)


async def lose_commit(world: DeathWorld) -> None:
    world.lose_commit()


async def lose_commit_of_slow_host(world: DeathWorld) -> None:
    account = world.lose_commit()
    account.pds.faults[:] = [Fault(GET_REPO, account.did, rate=2_000)]


async def write_to_fetched_repo(world: DeathWorld) -> None:
    """Let the repo write that is being fetched."""
    while True:
        rows = await world.execute("select did from indexer.repo where sync_status = 'in-progress'")
        for (did,) in rows:
            world.network.accounts[did].create(NOTE, {"text": "during the resync"})
        await asyncio.sleep(0.05)


async def lose_commit_of_hanging_host(world: DeathWorld) -> None:
    account = world.lose_commit()
    account.pds.faults[:] = [Fault(GET_REPO, account.did, hang=True)]


async def lose_commit_of_broken_host(world: DeathWorld) -> None:
    account = world.lose_commit()
    account.pds.faults[:] = [Fault(GET_REPO, account.did, status=500, times=2)]


async def create_unseen_account(world: DeathWorld) -> None:
    world.create_unseen_account()


async def skip_messages(world: DeathWorld) -> None:
    """Let the relay forget messages that the daemon has not read."""
    world.network.relay.window = 1
    world.act(6)


async def delete_account(world: DeathWorld) -> None:
    account = world.create_account()
    for _ in range(5):
        account.create(NOTE, {"text": "soon erased"})
    account.delete_account()


async def change_visibility(world: DeathWorld) -> None:
    account = world.create_account()
    account.create(NOTE, {"subject": f"at://{account.did}/{NOTE}/any"})
    account.deactivate()


async def stop_when_fetching(world: DeathWorld) -> None:
    """Send the signal to drain while the export hangs. The fetch of another repo could end before the signal comes."""
    faults = [fault for pds in world.network.pdses for fault in pds.faults if not fault.fired]
    await until(lambda: any(fault.fired for fault in faults), world.daemon.log_tail)
    world.daemon.terminate()


@dataclass(frozen=True)
class Operation:
    """An operation of the daemon, and where it is killed.

    Attributes:
        deaths: The moments, in order. The processes of each death do this work again.
        before: What happens in the network before the daemon starts.
        meanwhile: What happens while it runs.
        settings: Settings of the daemon.
        prepare: Shortens the waits of the daemon.
        one_server: Why a cluster does not have the operation; empty if it has.
    """

    deaths: Sequence[Death]
    before: Act
    meanwhile: Act | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    prepare: Callable[[], None] = wait_little
    one_server: str = ""


OPERATIONS = {
    "live": Operation(
        [
            *map(Death, ("shard.claimed", "stream.entered", "batch.taken", "batch.planned", "batch.settled")),
            *map(Death, ("identity.resolved",)),
            *both("batch.written", "identity.saved"),
        ],
        write,
    ),
    "few commits": Operation(
        [Death("small-batch.committed"), Death("small-batch.committed", passes=5)],
        nothing,
        keep_writing,
        one_server="one statement cannot write all tables of a cluster",
    ),
    "resync": Operation(
        [
            *both("claim.written", "resync.written", "resync.finished"),
            *map(Death, ("export.spooled", "resync.locked", "export.verified")),
            *both("queue.written"),
        ],
        lose_commit,
    ),
    "resync with buffered events": Operation(both("resync.drained"), lose_commit_of_slow_host, write_to_fetched_repo),
    "failed resync": Operation([Death("resync.failed"), Death("batch.written", passes=3)], lose_commit_of_broken_host),
    "lease": Operation([Death("lease.renewed"), Death("lease.renewed", passes=2)], lose_commit_of_hanging_host),
    "new repos": Operation(both("new-repos.copied", "new-repos.finished"), create_unseen_account),
    "gap and reconciliation": Operation(
        [*both("gap.opened", "crawl.page", "gap.closed"), *map(Death, ("crawl.saved", "reconciliation.compared"))],
        skip_messages,
    ),
    "erasure": Operation(both("erasure.written"), delete_account, settings={"deletion_grace": "0"}),
    "forgotten repos": Operation(
        both("repo.forgotten"), delete_account, settings={"deletion_grace": "0"}, prepare=forget_soon
    ),
    "links": Operation(
        both("links.visited", "links.folded", "links.recounted"), change_visibility, settings={"links": "true"}
    ),
    "new repo with links": Operation(both("resync.copied"), create_unseen_account, settings={"links": "true"}),
    "hosts": Operation(both("hosts.saved"), lose_commit),
    "stop": Operation(
        [Death("daemon.draining"), Death("claim.returned")], lose_commit_of_hanging_host, stop_when_fetching
    ),
    "handles": Operation(both("handle.saved"), write, settings={"handle_rate": "100"}),
}


def marked(name: str) -> Any:
    """Return the parameter of a test, with a mark if a cluster does not have the operation."""
    reason = OPERATIONS[name].one_server
    return pytest.param(name, marks=pytest.mark.one_server(reason)) if reason else name


@pytest.mark.parametrize("name", [marked(name) for name in OPERATIONS])
async def test_killed_at_each_point(
    database: str, tmp_path: Path, record_property: Callable[[str, object], None], name: str
) -> None:
    operation = OPERATIONS[name]
    async with death_world(database, tmp_path, operation.settings, prepare=operation.prepare) as world:
        for death in operation.deaths:
            await world.die(death, operation.before, operation.meanwhile)
        for pds in world.network.pdses:
            pds.faults.clear()  # one that has not fired would occupy a worker for ten minutes
        await world.settle()
        assert world.deaths.total() == len(operation.deaths)
        record_property("deaths", world.deaths.total())


RECORDED = 3
"""Processes whose points are recorded. A point that all of them pass is passed regularly."""
MAX_TRIES, MAX_TRIES_BY_CHANCE = 5, 2
"""Processes that are to die at a point that is passed regularly, or by chance."""
ALWAYS_PASSED = {"shard.claimed", "stream.entered", "batch.taken", "batch.settled"}
"""Points that each operation passes."""


async def points_passed_by(
    world: DeathWorld, operation: Operation, file: Path, expected: set[str], death: Death | None = None
) -> set[str]:
    """Let the daemon do the operation until it has passed its points, or until its death; return what it has passed.

    Its points are the expected ones and those that it passes soon after them. It may not pass the point of the death
    this time. Then it does not die.
    """
    passed = PassedPoints(file, expected)
    await operation.before(world)
    world.daemon.start(death)
    async with running(*([operation.meanwhile(world)] if operation.meanwhile else [])):
        await until(lambda: world.daemon.has_died() or passed.are_complete(), world.daemon.log_tail)
    if world.daemon.has_died():
        await world.count_death(death)
    world.daemon.close()
    await world.execute(EXPIRE_LEASES)
    return set(file.read_text().split())


async def try_to_die(
    world: DeathWorld, operation: Operation, file: Path, expected: set[str], death: Death, tries: int
) -> set[str]:
    """Let the daemon do the operation until it has died, a few times at most; return the points that it has passed."""
    passed = set[str]()
    for _ in range(tries):
        passed |= await points_passed_by(world, operation, file, expected, death)
        if world.deaths[death]:
            break
    return passed


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [marked(name) for name in OPERATIONS])
async def test_killed_at_each_other_point_that_the_operation_passes(
    database: str, tmp_path: Path, record_property: Callable[[str, object], None], name: str
) -> None:
    """For example, where the live path takes the messages that lead to a resync.

    If each recorded process passes a point, it is passed regularly, and so there must be a death at it. Other points
    are passed only once, like those of a backfill, or by chance. A process that follows a death may pass points that no
    process has passed before.
    """
    operation, file = OPERATIONS[name], tmp_path / "points"
    own = {crash_points.COMMITTED, *(death.point for death in operation.deaths)}
    tried = set[str]()
    prepare = partial(record_points, operation.prepare, file)
    async with death_world(database, tmp_path, operation.settings, prepare=prepare) as world:
        expected = ALWAYS_PASSED | {operation.deaths[0].point}
        passed = await points_passed_by(world, operation, file, expected)
        regular = set(passed)
        for _ in range(RECORDED - 1):
            regular &= await points_passed_by(world, operation, file, ALWAYS_PASSED)
        while others := passed - own - tried:
            point = min(others)
            tries = MAX_TRIES if point in regular else MAX_TRIES_BY_CHANCE
            passed |= await try_to_die(world, operation, file, expected & regular, Death(point), tries)
            tried.add(point)
        for pds in world.network.pdses:
            pds.faults.clear()
        await world.settle()
    missed = tried - {death.point for death in world.deaths if death}
    assert missed.isdisjoint(regular)
    record_property("deaths", world.deaths.total())
    record_property("missed crash points", f"{name}: {', '.join(sorted(missed))}" if missed else "")


RANDOM_DEATHS = 40
MIN_ROUNDS = 3
GROUP = 10
"""Deaths after which everything is compared."""
MAX_SECONDS = 0.6
FREQUENT = ("batch.taken", "batch.written", "batch.settled", "claim.written", "resync.written", "resync.finished")
"""Points that every process reaches several times."""


async def keep_busy(world: DeathWorld) -> None:
    """Let accounts write, and the relay lose commits."""
    while True:
        world.act(1)
        world.random.choice((world.lose_commit, world.create_account, world.create_unseen_account))()
        await asyncio.sleep(world.random.random() * 0.2)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "random_seed" in metafunc.fixturenames:
        rounds = max(MIN_ROUNDS, -(-metafunc.config.getoption("--deaths") // RANDOM_DEATHS))
        metafunc.parametrize("random_seed", range(1, rounds + 1))


async def test_killed_at_random(
    database: str, tmp_path: Path, record_property: Callable[[str, object], None], random_seed: int
) -> None:
    """Half of the deaths are at a point that is reached for the first, second or third time, half after any time."""
    async with death_world(database, tmp_path, seed=random_seed) as world:
        for number in range(1, RANDOM_DEATHS + 1):
            if world.random.random() < 0.5:
                death = Death(world.random.choice(FREQUENT), world.random.random() < 0.5, world.random.randint(1, 3))
                await world.die(death, nothing, keep_busy)
            else:
                await world.kill_after(MAX_SECONDS * world.random.random(), keep_busy)
            if number % GROUP == 0:
                await world.settle()
        assert world.deaths.total() == RANDOM_DEATHS
        record_property("deaths", RANDOM_DEATHS)


TRIM_DEATHS = [Death("change-log.segment"), *both("change-log.truncated")] * 2
FEED_DEATHS = [*both("feed.begun", "feed.saved"), Death("feed.saved", passes=2)]
REPLAY_DEATHS = both("dead-letter.resolved")
MIGRATION_DEATHS = [*(Death("migration.version", passes=number) for number in (1, 9, 25)), *both("migration.done")]
NUMBERING_DEATHS = [Death(f"numbering.{step}", passes=passes) for step in ("begun", "done") for passes in (1, 2, 3)]


async def test_killed_while_the_change_log_is_trimmed(
    database: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    async def write_and_read(world: DeathWorld) -> None:
        while True:
            world.act(1)
            await world.read_changes()
            await asyncio.sleep(0.1)

    async with death_world(database, tmp_path, {"change_retention": "1s", "change_bytes": "1MiB"}) as world:
        for death in TRIM_DEATHS:
            await world.die(death, nothing, write_and_read)
        await world.settle()
        assert world.changes
        [(stored,)] = await world.execute("select count(*) from atproto.changes")
        assert stored < len(world.changes), "nothing was trimmed"
        record_property("deaths", world.deaths.total())


async def test_killed_while_the_feed_delivers(
    database: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """The webhook gets each record in its last state, although it is killed before an acknowledgement is stored."""
    async with WebhookServer() as server:
        settings = {"roles": "live,resync,feed", "webhook_url": server.url}
        async with death_world(database, tmp_path, settings) as world:
            for death in FEED_DEATHS:
                await world.die(death, write)
            await world.settle()
            world.daemon.start()
            stored = {(did, path) for did, records in world.network.expected_records().items() for path in records}
            await until(lambda: accepted_records(server) == stored, world.daemon.log_tail)
            await until(world.feed_is_saved, world.daemon.log_tail)
            assert server.overlaps == set()
            record_property("deaths", world.deaths.total())


def accepted_records(server: WebhookServer) -> set[tuple[str, str]]:
    """Return the records that exist after all events that the webhook has accepted."""
    records = set[tuple[str, str]]()
    for event in server.accepted:
        if event["type"] == "record":
            record = event["record"]
            key = record["did"], f"{record['collection']}/{record['rkey']}"
            (records.discard if record["action"] == "delete" else records.add)(key)
    return records


async def test_replay_of_dead_letters_is_killed(
    database: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    replay = ("rejected", "replay", "--reason", "signature-invalid")
    async with death_world(database, tmp_path) as world:
        for death in REPLAY_DEATHS:
            account = world.create_account()
            account.create(NOTE, {"text": "signed with the published key"})
            await world.settle()
            account.swap_key()
            account.create(NOTE, {"text": "signed with an unpublished key"})
            world.daemon.start()
            await until(lambda: world.dead_letters(1), world.daemon.log_tail)
            world.daemon.kill()
            publish_key_silently(world.network, account)
            world.daemon.start(death, replay)
            await world.daemon.wait_for_death(death)
            await world.count_death(death)
            assert await world.dead_letters(0 if death.committed else 1)
            if not death.committed:
                world.daemon.start(command=replay)
                await world.daemon.wait_for_end()
            assert await world.dead_letters(0)
        await world.settle()
        record_property("deaths", world.deaths.total())


async def test_migration_is_killed(
    empty_database: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """The schema of a killed migration is the one before it, or the complete one."""
    async with LocalNetwork() as network:
        network.create_account("ada.test").create(NOTE, {"text": "stored after the migration"})
        daemon = DaemonFork(daemon_environment(network, empty_database, tmp_path), tmp_path)
        try:
            for death in MIGRATION_DEATHS:
                assert not await schema_is_current(empty_database)
                daemon.start(death, ("migrate",))
                await daemon.wait_for_death(death)
            assert await schema_is_current(empty_database)
            daemon.start()
            await wait_until_equal(network, empty_database, min_records=1)
            await assert_change_log_consistent(empty_database)
        finally:
            daemon.close()
        assert daemon.ended == 0, daemon.log_tail()
        record_property("deaths", len(MIGRATION_DEATHS))


async def test_numbering_of_changes_is_killed(
    citus: CitusServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    """On a cluster, a process of its own numbers the changes after their COMMIT."""
    monkeypatch.setattr("tests.waiting.TIMEOUT", 120.0)
    dsn = await asyncio.to_thread(partial(citus.create, migrated=True))
    try:
        async with death_world(dsn, tmp_path) as world:
            for death in NUMBERING_DEATHS:
                await world.die(death, write, keep_busy)
            await world.settle()
            record_property("deaths", world.deaths.total())
    finally:
        await asyncio.to_thread(citus.drop, dsn)


DEATHS = {
    **{name: operation.deaths for name, operation in OPERATIONS.items()},
    **{point: SCOPE_DEATHS[point] for point in SCOPE_DEATHS},
    "change log": TRIM_DEATHS,
    "feed": FEED_DEATHS,
    "dead letters": REPLAY_DEATHS,
    "migration": MIGRATION_DEATHS,
    "numbering": NUMBERING_DEATHS,
}
"""All deaths at crash points, by the operation that is killed."""


def test_every_crash_point_is_in_a_test() -> None:
    """Fails for a point in the code at which no test kills the daemon, and for one that is in no code."""
    called = [
        node.args[0]
        for path in sorted(Path("indexer").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "crash_point"
    ]
    points = [argument.value for argument in called if isinstance(argument, ast.Constant)]
    assert {ast.unparse(argument) for argument in called if not isinstance(argument, ast.Constant)} == {"COMMITTED"}
    assert len(points) == len(set(points)), "two points have the same name"
    assert {death.point for deaths in DEATHS.values() for death in deaths} == set(points)


def test_there_are_at_least_two_hundred_deaths() -> None:
    assert sum(map(len, DEATHS.values())) + MIN_ROUNDS * RANDOM_DEATHS >= 200
