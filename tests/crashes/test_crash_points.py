"""The daemon is killed at each of its crash points, and at random ones: nothing is lost, and nothing is doubled.

After each death, applying the change log gives exactly the stored records. After each group of deaths, another daemon
makes the database equal to the network.
"""

import ast
import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from time import monotonic

import pytest

from indexer import crash_points
from indexer.app.tuning import Tuning
from indexer.atproto.syntax import CollectionFilter
from indexer.db import Database
from indexer.demo.local_pds import GET_REPO
from indexer.demo.local_repo import Write
from indexer.demo.scenario import NOTE
from indexer.live.relay_comparison import ComparisonSettings
from indexer.resync.apply import SHARED_BYTES
from indexer.sync.scope import Scope, Track
from indexer.tasks.hosts import HostSettings
from tests.background import running
from tests.citus_server import CitusServer
from tests.crashes.death_world import Act, DeathWorld, death_world
from tests.crashes.test_hints import DEATHS as HINT_DEATHS
from tests.crashes.test_host_streams import DEATHS as HOST_STREAM_DEATHS
from tests.crashes.test_repo_checks import DEATHS as REPO_CHECK_DEATHS
from tests.daemon.running_daemon import FilteredNetwork, publish_key_silently
from tests.daemon_forks import DaemonFork, Death
from tests.daemon_process import daemon_environment
from tests.database_checks import assert_change_log_consistent, schema_is_current, wait_until_equal
from tests.db.link_steps import turn_on
from tests.faulty_network import Fault, FaultyNetwork
from tests.passed_time import EXPIRE_LEASES
from tests.quick_tuning import MORTAL
from tests.readers.webhook_server import WebhookServer
from tests.waiting import until

RecordProperty = Callable[[str, object], None]


def both(*points: str) -> list[Death]:
    """Die in the transaction, and after its COMMIT."""
    return [Death(point, committed) for point in points for committed in (False, True)]


def tiers(deaths: Sequence[Death], sampled: Iterable[int]) -> pytest.MarkDecorator:
    """Let a test have all deaths in the proof, and those with these positions in `make test`."""
    sample = pytest.param([deaths[number] for number in sampled], id="sample", marks=pytest.mark.slow)
    everything = pytest.param(deaths, id="all", marks=pytest.mark.proof("crashes"))
    return pytest.mark.parametrize("deaths", [sample, everything])


async def nothing(_world: DeathWorld) -> None:
    """Change nothing."""


async def write(world: DeathWorld) -> None:
    world.create_account()
    world.act(3)


async def write_on(world: DeathWorld) -> None:
    """Let accounts write all the time."""
    while True:
        world.act(1)
        await asyncio.sleep(0.05)


async def lose_commit(world: DeathWorld) -> None:
    world.lose_commit()


EXPORT_SECONDS = 3


async def lose_commit_of_slow_host(world: DeathWorld) -> None:
    account = world.lose_commit()
    rate = sum(map(len, account.repo.export())) // EXPORT_SECONDS
    account.pds.faults[:] = [Fault(GET_REPO, account.did, rate=rate)]


async def create_accounts(world: DeathWorld) -> None:
    """Let the directory accept operations all the time."""
    while True:
        world.create_account()
        await asyncio.sleep(0.05)


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


async def create_omitted_account(world: DeathWorld) -> None:
    world.create_omitted_account()
    world.act(1)


async def create_large_account(world: DeathWorld) -> None:
    """Create an account whose repo is too large to be written with others."""
    account = world.create_unseen_account()
    for number in range(3):
        account.create(NOTE, {"text": f"{number}" * (SHARED_BYTES // 3)})


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


async def keep_links(world: DeathWorld) -> None:
    """Add the links of all stored records, for a daemon that keeps none."""
    await write(world)
    await turn_on(world.db)


async def stop_when_fetching(world: DeathWorld) -> None:
    """Send the signal to drain while the export hangs. The fetch of another repo could end before the signal comes.

    A repo that an earlier process has claimed may be fetched before the stream is read.
    """
    faults = [fault for pds in world.network.pdses for fault in pds.faults if not fault.fired]
    await until(lambda: any(fault.fired for fault in faults), world.daemon.log_tail)
    await until(world.has_stored_all_messages, world.daemon.log_tail)
    world.daemon.terminate()


@dataclass(frozen=True)
class Operation:
    """An operation of the daemon, and where it is killed.

    Attributes:
        deaths: The moments, in order. The processes of each death do this work again.
        before: What happens in the network before the daemon starts.
        meanwhile: What happens while it runs.
        settings: Settings of the daemon.
        tuning: Its intervals.
        sampled: The positions of the deaths that `make test` has.
    """

    deaths: Sequence[Death]
    before: Act
    meanwhile: Act | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    tuning: Tuning = MORTAL
    sampled: Sequence[int] = (0,)


LIST_HOSTS_SOON = replace(MORTAL, hosts=HostSettings(first_wait=0.0, poll=0.05, settle=0.3))
FORGET_SOON = replace(MORTAL, maintenance=replace(MORTAL.maintenance, forget_after=0.1))
OPERATIONS = {
    "live": Operation(
        [
            *both("batch.written", "identity.saved"),
            *map(Death, ("shard.claimed", "stream.entered", "batch.taken", "batch.planned", "batch.settled")),
            *map(Death, ("identity.resolved",)),
        ],
        write,
        sampled=(0, 1, 5, 7),
    ),
    "resync": Operation(
        [
            *both("claim.written", "resync.written", "resync.finished"),
            *map(Death, ("export.spooled", "resync.locked", "export.verified")),
            *both("queue.written"),
        ],
        lose_commit,
        sampled=(1, 2, 5, 4, 9),
    ),
    "resync with buffered events": Operation(both("resync.drained"), lose_commit_of_slow_host, write_to_fetched_repo),
    "failed resync": Operation([Death("resync.failed"), Death("batch.written", passes=3)], lose_commit_of_broken_host),
    "lease": Operation([Death("lease.renewed"), Death("lease.renewed", passes=2)], lose_commit_of_hanging_host),
    "new repos": Operation(both("new-repos.copied", "new-repos.finished"), create_unseen_account, sampled=(0, 3)),
    "gap and reconciliation": Operation(
        [*both("gap.opened", "crawl.page", "gap.closed"), *map(Death, ("crawl.saved", "reconciliation.compared"))],
        skip_messages,
        sampled=(1, 2, 4, 7),
    ),
    "hosts": Operation(both("hosts.saved"), lose_commit),
    "lists of hosts": Operation(
        [*both("hosts.added"), Death("hosts.page")],
        create_omitted_account,
        settings={"hosts_interval": "0.1"},
        tuning=LIST_HOSTS_SOON,
        sampled=(1, 2),
    ),
    "stop": Operation(
        [Death("claim.returned"), Death("daemon.draining")], lose_commit_of_hanging_host, stop_when_fetching
    ),
    "handles": Operation(both("handle.saved"), write, settings={"handle_rate": "100"}),
    "operations of a directory": Operation(
        both("operations.saved"), nothing, create_accounts, settings={"plc_follow": "true"}
    ),
    "erasure": Operation(both("erasure.written"), delete_account, settings={"deletion_grace": "0"}),
    "forgotten repos": Operation(
        both("repo.forgotten"), delete_account, settings={"deletion_grace": "0"}, tuning=FORGET_SOON
    ),
    "links": Operation(
        both("links.backfilled", "links.begun", "links.read", "links.recounted"),  # the backfill ends
        change_visibility,
        settings={"links": "true"},
        sampled=(0, 5),
    ),
    "large new repo": Operation(both("resync.copied"), create_large_account),
    "links that were turned off": Operation(both("links.removed"), keep_links),
}


async def perform(world: DeathWorld, operation: Operation, deaths: Iterable[Death]) -> None:
    """Let daemons do the operation and die at these moments, then another one complete it."""
    world.change_settings(operation.settings, operation.tuning)
    for death in deaths:
        await world.die(death, operation.before, operation.meanwhile)
    await world.settle()


@pytest.mark.proof("crashes")
@pytest.mark.parametrize("name", OPERATIONS)
async def test_killed_at_each_point(database: str, tmp_path: Path, record_property: RecordProperty, name: str) -> None:
    operation = OPERATIONS[name]
    async with death_world(database, tmp_path) as world:
        await perform(world, operation, operation.deaths)
        assert world.deaths.total() == len(operation.deaths)
        record_property("deaths", world.deaths.total())


QUIET_SECONDS = 0.5
"""Time without a new point after which a process has passed those of its operation."""
TRIES = 5
"""Processes that are to die at a point, until one reaches it."""
ALWAYS_PASSED = {"shard.claimed", "stream.entered", "batch.taken", "batch.settled"}
"""Points that each operation passes."""


def record_points(file: Path) -> None:
    """Let this process append each crash point that it passes to a file, a line for each."""

    def record(point: str) -> None:
        with file.open("a") as points:
            points.write(f"{point}\n")

    crash_points.hooks.append(record)


async def points_passed(
    world: DeathWorld, operation: Operation, file: Path, expected: set[str], death: Death | None = None
) -> set[str]:
    """Let a process do the operation until it dies, or has passed the expected points and soon no other one.

    It may not reach the point of its death this time.
    """
    file.write_text("")
    await operation.before(world)
    world.daemon.start(death)
    size, changed_at = 0, monotonic()

    def has_ended() -> bool:
        nonlocal size, changed_at
        passed = set(file.read_text().split())
        if len(passed) > size or not expected <= passed:
            size, changed_at = len(passed), monotonic()
        return world.daemon.has_died() or monotonic() > changed_at + QUIET_SECONDS

    async with running(*([operation.meanwhile(world)] if operation.meanwhile else [])):
        await until(has_ended, world.daemon.log_tail)
    if world.daemon.has_died():
        await world.count_death(death)
    world.daemon.close()
    await world.execute(EXPIRE_LEASES)
    return set(file.read_text().split())


@pytest.mark.timeout(600)
@pytest.mark.proof("crashes")
@pytest.mark.parametrize("name", OPERATIONS)
async def test_killed_at_each_other_point_that_the_operation_passes(
    database: str, tmp_path: Path, record_property: RecordProperty, name: str
) -> None:
    """For example, where the live path takes the messages that lead to a resync.

    A process dies at each point that two processes have passed. Points that only one of them has passed are passed
    once, like those of a backfill, or by chance, so a death there is only tried.
    """
    operation, file = OPERATIONS[name], tmp_path / "points"
    own = {crash_points.COMMITTED, *(death.point for death in operation.deaths)}
    async with death_world(database, tmp_path, prepare=partial(record_points, file)) as world:
        world.change_settings(operation.settings, operation.tuning)
        first = await points_passed(world, operation, file, ALWAYS_PASSED | {operation.deaths[0].point})
        second = await points_passed(world, operation, file, ALWAYS_PASSED)
        for point in sorted((first | second) - own):
            for _ in range(TRIES if point in first & second else 1):
                if not world.deaths[Death(point)]:
                    await points_passed(world, operation, file, ALWAYS_PASSED & first & second, Death(point))
        await world.settle()
        assert {Death(point) for point in (first & second) - own} <= set(world.deaths)
        record_property("deaths", world.deaths.total())


@pytest.mark.slow
async def test_killed_at_the_most_important_points(
    database: str, tmp_path: Path, record_property: RecordProperty
) -> None:
    async with death_world(database, tmp_path) as world:
        for operation in OPERATIONS.values():
            await perform(world, operation, [operation.deaths[number] for number in operation.sampled])
        record_property("deaths", world.deaths.total())


SCOPE_DEATHS = [
    *both("scope.narrowed", "scope.untracked", "scope.requested", "scope.marked"),
    Death("scope.recheck-planned"),
    *both("claim.written", "crawl.page", "erasure.written", "resync.finished"),
]
MIN_FANS = 6
"""Accounts that are always in scope. Each one has to be fetched after one of the changes."""
STABLE = "com.example.stable"


def removed(number: int) -> str:
    """Return the collection that leaves the scope with this change."""
    return f"com.example.removed.n{number}"


def added(number: int) -> str:
    """Return the collection that enters the scope with this change."""
    return f"com.example.added.n{number}"


def signal(number: int) -> str:
    """Return the signal collection that leaves the scope with this change; one account has no other records."""
    return f"com.example.signal.n{number}"


def collections_after(change: int, changes: int) -> list[str]:
    return [STABLE, *map(added, range(change)), *map(removed, range(change, changes))]


def signals_after(change: int, changes: int) -> list[str]:
    return [STABLE, *map(signal, range(change, changes))]


@tiers(SCOPE_DEATHS, (0, 3, 4, 7))
async def test_killed_while_a_changed_scope_is_followed(
    database: str, db: Database, tmp_path: Path, record_property: RecordProperty, deaths: Sequence[Death]
) -> None:
    """Before each death, a change removes a collection, adds another one, and untracks a repo that lacks signals."""
    changes = len(deaths)
    async with FilteredNetwork(collections=collections_after(0, changes)) as network:
        fans = [network.create_account(f"fan{number}.test") for number in range(max(changes, MIN_FANS))]
        for number, account in enumerate(fans):
            owned = [STABLE, *map(removed, range(changes)), added(number)]
            account.apply_writes([Write.create(f"{name}/{rkey}", {"$type": name}) for name in owned for rkey in "ab"])
        for number in range(changes):
            network.create_account(f"other{number}.test").create(signal(number), {"$type": signal(number)})

        async def change_scope(world: DeathWorld) -> None:
            done = world.deaths.total() + 1
            network.collections = set(collections_after(done, changes))
            network.dids = {account.did for account in fans}
            network.dids |= {did_of_other(network, number) for number in range(done, changes)}
            await world.db.scope.change(Track.SIGNAL, collections_after(done, changes), signals_after(done, changes))

        first, signals = (CollectionFilter(names(0, changes)) for names in (collections_after, signals_after))
        await db.scope.begin(Scope(track=Track.SIGNAL, collections=first, signal_collections=signals))
        async with death_world(database, tmp_path, steps=0, network=network) as world:
            for death in deaths:
                if death.point == "scope.requested":  # no repo may be desynchronized already
                    await world.settle()
                await world.die(death, change_scope)
            await world.settle()
            record_property("deaths", world.deaths.total())


def did_of_other(network: FaultyNetwork, number: int) -> str:
    return next(account.did for account in network.accounts.values() if account.handle == f"other{number}.test")


REMOVAL_DEATHS = both("scope.removed")


@tiers(REMOVAL_DEATHS, (0,))
async def test_killed_while_records_are_redacted(
    database: str, tmp_path: Path, record_property: RecordProperty, deaths: Sequence[Death]
) -> None:
    """Each death has an account of its own, whose record was stored before it was redacted."""
    async with FilteredNetwork() as network:
        accounts = [network.create_account(f"a{number}.test") for number in range(len(deaths))]
        for account in accounts:
            account.apply_writes([Write.create(f"{name}/{rkey}", {}) for name in (NOTE, STABLE) for rkey in "abcdefgh"])
        async with death_world(database, tmp_path, steps=0, network=network) as world:
            for death, account in zip(deaths, accounts, strict=True):

                async def redact(world: DeathWorld, did: str = account.did) -> None:
                    for rkey in "abcdefgh":
                        await world.db.removals.add(f"at://{did}/{STABLE}/{rkey}", "redact")

                await world.die(death, redact)
            network.collections = {NOTE}
            await world.settle()
            record_property("deaths", world.deaths.total())


RANDOM_DEATHS, SAMPLED_RANDOM_DEATHS = 40, 5
MIN_ROUNDS = 3
GROUP = 10
"""Deaths after which everything is compared."""
MAX_SECONDS = 0.6
FREQUENT = ("batch.taken", "batch.written", "batch.settled", "claim.written", "resync.written", "resync.finished")
"""Points that every process reaches several times."""
EVERYTHING = {"links": "true", "handle_rate": "100", "deletion_grace": "0"}


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


async def die_at_random(database: str, directory: Path, seed: int, deaths: int) -> None:
    """Half of the deaths are at a point that is reached for the first, second or third time, half after any time."""
    async with death_world(database, directory, EVERYTHING if seed % 2 else {}, seed=seed) as world:
        for number in range(1, deaths + 1):
            if world.random.random() < 0.5:
                death = Death(world.random.choice(FREQUENT), world.random.random() < 0.5, world.random.randint(1, 3))
                await world.die(death, nothing, keep_busy)
            else:
                await world.kill_after(MAX_SECONDS * world.random.random(), keep_busy)
            if number % GROUP == 0:
                await world.settle()
        await world.settle()
        assert world.deaths.total() == deaths


@pytest.mark.proof("crashes")
async def test_killed_at_random(
    database: str, tmp_path: Path, record_property: RecordProperty, random_seed: int
) -> None:
    await die_at_random(database, tmp_path, random_seed, RANDOM_DEATHS)
    record_property("deaths", RANDOM_DEATHS)


@pytest.mark.slow
async def test_killed_a_few_times_at_random(database: str, tmp_path: Path, record_property: RecordProperty) -> None:
    await die_at_random(database, tmp_path, 1, SAMPLED_RANDOM_DEATHS)
    record_property("deaths", SAMPLED_RANDOM_DEATHS)


TRIM_DEATHS = [*both("change-log.truncated"), Death("change-log.segment")] * 2
FEED_DEATHS = [*both("feed.begun", "feed.saved"), Death("feed.saved", passes=2)]
REPLAY_DEATHS = both("dead-letter.resolved")
COVER_DEATHS = both("gap.covered")
MIGRATION_DEATHS = [Death("migration.version"), *both("migration.done")]
NUMBERING_DEATHS = [Death(f"numbering.{step}", passes=passes) for step in ("begun", "done") for passes in (1, 2, 3)]


@tiers(TRIM_DEATHS, (1,))
async def test_killed_while_the_change_log_is_trimmed(
    database: str, tmp_path: Path, record_property: RecordProperty, deaths: Sequence[Death]
) -> None:
    async def write_and_read(world: DeathWorld) -> None:
        while True:
            world.act(1)
            reading = asyncio.create_task(world.check_change_log())
            try:
                await asyncio.shield(reading)
            except asyncio.CancelledError:  # a page counts as read once Postgres has returned it
                await reading
                raise
            await asyncio.sleep(0.1)

    async with death_world(database, tmp_path, {"change_retention": "1s", "change_bytes": "1MiB"}) as world:
        for death in deaths:
            await world.die(death, nothing, write_and_read)
        await world.settle()
        [(stored,)] = await world.execute("select count(*) from atproto.changes")
        assert stored < len(world.changes), "nothing was trimmed"
        record_property("deaths", world.deaths.total())


@tiers(FEED_DEATHS, (3,))
@pytest.mark.parametrize("batch", [1, 100])
async def test_killed_while_the_feed_delivers(
    database: str, tmp_path: Path, record_property: RecordProperty, deaths: Sequence[Death], batch: int
) -> None:
    """The webhook gets each record in its last state, although it is killed before an acknowledgement is stored."""
    async with WebhookServer() as server:
        settings = {"roles": "live,resync,feed", "webhook_url": server.url, "webhook_batch": str(batch)}
        async with death_world(database, tmp_path, settings) as world:
            for death in deaths:
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


@tiers(REPLAY_DEATHS, (1,))
async def test_replay_of_dead_letters_is_killed(
    database: str, tmp_path: Path, record_property: RecordProperty, deaths: Sequence[Death]
) -> None:
    replay = ("rejected", "replay", "--reason", "signature-invalid")
    async with death_world(database, tmp_path) as world:
        for death in deaths:
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


@tiers(COVER_DEATHS, (1,))
async def test_killed_when_the_stream_of_another_relay_covers_a_gap(
    database: str, tmp_path: Path, record_property: RecordProperty, deaths: Sequence[Death]
) -> None:
    """A second relay is added, whose gap the first one covers."""
    quick = replace(MORTAL, comparison=ComparisonSettings(margin=0.5))
    async with FaultyNetwork(relays=2) as network, death_world(database, tmp_path, network=network) as world:
        world.change_settings({"relays": ",".join(network.relay_urls)}, quick)
        for death in deaths:
            await world.die(death, write, write_on)
        await world.settle()
        gaps = await world.execute("select relay, reason, closed_by from atproto.gaps")
        assert [tuple(gap) for gap in gaps] == [(network.relay_urls[1], "no-cursor", network.relay_urls[0])]
        record_property("deaths", world.deaths.total())


@tiers(MIGRATION_DEATHS, (0, 2))
async def test_migration_is_killed(
    empty_database: str, tmp_path: Path, record_property: RecordProperty, deaths: Sequence[Death]
) -> None:
    """The schema of a killed migration is the one before it, or the complete one."""
    async with FaultyNetwork() as network:
        network.create_account("ada.test").create(NOTE, {"text": "stored after the migration"})
        daemon = DaemonFork(daemon_environment(network, empty_database, tmp_path), tmp_path, MORTAL)
        try:
            for death in deaths:
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
        record_property("deaths", len(deaths))


@pytest.mark.proof("cluster")
async def test_numbering_of_changes_is_killed(
    citus: CitusServer, tmp_path: Path, record_property: RecordProperty
) -> None:
    """On a cluster, a process of its own numbers the changes after their COMMIT."""
    dsn = await asyncio.to_thread(partial(citus.create, migrated=True))
    try:
        async with death_world(dsn, tmp_path) as world:
            for death in NUMBERING_DEATHS:
                await world.die(death, write, keep_busy)
            await world.settle()
            record_property("deaths", world.deaths.total())
    finally:
        await asyncio.to_thread(citus.drop, dsn)


DEATHS = [
    *(death for operation in OPERATIONS.values() for death in operation.deaths),
    *SCOPE_DEATHS,
    *REMOVAL_DEATHS,
    *TRIM_DEATHS,
    *FEED_DEATHS,
    *REPLAY_DEATHS,
    *COVER_DEATHS,
    *HOST_STREAM_DEATHS,
    *HINT_DEATHS,
    *REPO_CHECK_DEATHS,
    *MIGRATION_DEATHS,
    *NUMBERING_DEATHS,
]
"""All deaths at crash points."""


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
    assert {death.point for death in DEATHS} == set(points)
