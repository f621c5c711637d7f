"""Each stage is stalled in turn: `/healthz` fails with its name, and recovers when the cause is gone."""

import fcntl
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from indexer.db.migrate import migrate
from indexer.embedded import database as embedded_database
from indexer.embedded import postgres_stage
from indexer.resync.queue import MaintenanceSettings
from indexer.sync.scope import Track
from indexer.sync.shard import BUCKETS
from tests.daemon.health_checks import HealthChecks, health_checks
from tests.daemon.running_daemon import LIKE, POST, RunningDaemon, post, running_daemon
from tests.db.change_log_helpers import connected
from tests.faulty_network import Fault, FaultyAccount
from tests.net.identity.name_server import NameServer
from tests.quick_tuning import QUICK
from tests.readers.jetstream_client import subscribed
from tests.readers.webhook_server import WebhookServer
from tests.waiting import until

SHORT = 0.5
"""The limit of the stage that a test stalls, in seconds."""
ALWAYS_LOOKING = replace(
    QUICK,
    maintenance=MaintenanceSettings(search_interval=0.1, unproven_interval=0.1),
    identity_refresh_interval=0.1,
    scope=replace(QUICK.scope, settle=0.0),
    count_interval=0.1,
    host_save_interval=0.1,
)
"""The periodic stages look for work all the time."""


@dataclass
class World:
    """A daemon that has caught up, and what its stages depend on."""

    daemon: RunningDaemon
    account: FaultyAccount
    names: NameServer
    directory: Path
    webhook: WebhookServer


Stall = Callable[[World], AbstractAsyncContextManager[None]]


@asynccontextmanager
async def locked(world: World, *tables: str) -> AsyncIterator[None]:
    """Let every statement that uses one of the tables wait."""
    async with connected(world.daemon.dsn) as connection, connection.transaction():
        for table in tables:
            await connection.execute(f"lock table indexer.{table} in access exclusive mode")
        yield


def lock_of(table: str) -> Stall:
    return lambda world: locked(world, table)


@asynccontextmanager
async def stalled_consumer(world: World) -> AsyncIterator[None]:
    """Keep the consumer from loading the cursor for its next connection."""
    async with locked(world, "cursor"):
        world.daemon.stages.streams[0].subscription.reconnect()
        yield


@asynccontextmanager
async def stalled_writer(world: World) -> AsyncIterator[None]:
    async with locked(world, "repo"):
        world.account.create(POST, post("waits for the lock"))
        yield


@asynccontextmanager
async def stalled_inbox(world: World) -> AsyncIterator[None]:
    """Keep the batch writer from taking the second message, because it cannot finish the first one."""
    async with stalled_writer(world):
        await until(lambda: world.daemon.stages.batch_writer.stage.waits_since is not None)
        world.account.create(POST, post("is not taken"))
        yield


@asynccontextmanager
async def stalled_lookups(world: World) -> AsyncIterator[None]:
    """Look up a key while the directory does not answer."""
    faults = world.daemon.network.plc.faults
    faults.append(Fault("", hang=True, times=None))
    world.daemon.create_account("unknown.test")
    yield
    faults.clear()


@asynccontextmanager
async def stalled_narrowing(world: World) -> AsyncIterator[None]:
    """Remove collections while the records cannot be read."""
    async with locked(world, "record"):
        await world.daemon.db.scope.change(collections=[LIKE])
        yield


@asynccontextmanager
async def stalled_backfill(world: World) -> AsyncIterator[None]:
    """Add collections while the repos cannot be read."""
    await world.daemon.db.scope.change(collections=[LIKE])
    async with locked(world, "repo"):
        await world.daemon.db.scope.change(collections=["app.bsky.*"])
        yield


@asynccontextmanager
async def stalled_discovery(world: World) -> AsyncIterator[None]:
    """Choose a signal collection while the progress of its list cannot be read."""
    await world.daemon.db.scope.change(Track.LISTED)
    await world.daemon.db.scope.change(Track.SIGNAL, signal_collections=[POST])
    async with locked(world, "crawl_progress"):
        yield


@asynccontextmanager
async def stalled_handles(world: World) -> AsyncIterator[None]:
    """Verify a handle while the name server does not answer."""
    world.names.silent = True
    world.daemon.create_account("silent.test")
    yield
    world.names.silent = False


@asynccontextmanager
async def stalled_reader(world: World) -> AsyncIterator[None]:
    """Keep the log from being read for a subscriber."""
    async with world.daemon.stages.serve_http() as address, subscribed(address), locked(world, "change"):
        yield


@asynccontextmanager
async def stalled_lock(world: World) -> AsyncIterator[None]:
    """End the session of the shard lock, and keep the lock from being acquired again."""
    [owner] = await world.daemon.execute("select pid from indexer.shard_owner where first_bucket < $1", BUCKETS)
    async with locked(world, "shard_owner"):
        await world.daemon.execute("select pg_terminate_backend($1)", owner["pid"])
        yield


@asynccontextmanager
async def stalled_hosts(world: World) -> AsyncIterator[None]:
    """Keep the state of a host from being saved after a request to it."""
    async with locked(world, "host"):
        world.daemon.create_account("new.test")
        yield


@asynccontextmanager
async def stalled_postgres(world: World) -> AsyncIterator[None]:
    """Kill the server, and hold the lock of its directory like a process of it that does not end."""
    postgres = world.directory / "postgres"
    pid = int((postgres / "data" / "postmaster.pid").read_text().splitlines()[0])
    directory = os.open(postgres, os.O_RDONLY | os.O_DIRECTORY)
    os.kill(pid, signal.SIGKILL)
    fcntl.flock(directory, fcntl.LOCK_EX)  # the event loop waits, too, so that nobody else gets the lock
    yield
    os.close(directory)


@asynccontextmanager
async def stalled_webhook(world: World) -> AsyncIterator[None]:
    """Send an event while the webhook does not answer."""
    world.webhook.answering.clear()
    world.account.create(POST, post("is not accepted"))
    yield
    world.webhook.answering.set()


STALLS: dict[str, Stall] = {
    "account erasure": lock_of("repo"),
    "batch writer": stalled_writer,
    "change log retention": lock_of("change"),
    "firehose consumer": stalled_consumer,
    "handle checks": stalled_handles,
    "host lists": lock_of("host_list"),
    "host states": stalled_hosts,
    "host streams": lock_of("subscribed_host"),
    "identity refresh": lock_of("identity"),
    "inbox": stalled_inbox,
    "jetstream reader": stalled_reader,
    "key lookups": stalled_lookups,
    "lease expiry": lock_of("repo"),
    "links": lock_of("change_batch"),
    "open gaps": lock_of("gap"),
    "parked repos": lock_of("repo"),
    "reconciliation": lock_of("crawl_progress"),
    "repo counts": lock_of("repo"),
    "resync pool": lock_of("repo"),
    "scope": lock_of("scope"),
    "shard lock": stalled_lock,
    "tap feed": lock_of("change_batch"),
    "unproven repos": lock_of("repo"),
    "webhook": stalled_webhook,
    # The last ones change the scope.
    "scope backfill": stalled_backfill,
    "scope narrowing": stalled_narrowing,
    "signal discovery": stalled_discovery,
    "embedded Postgres": stalled_postgres,
}
"""By stage: the function that stalls it during a block."""
SAMPLE = ("batch writer", "firehose consumer", "reconciliation", "resync pool")
"""Stages that are stalled in `make test`; the others are stalled in `make proof`."""

STALLS_ON_A_CLUSTER: dict[str, Stall] = {"change numbering": lock_of("unnumbered_batch")}
"""The same for the stages that a daemon has only on a distributed database (tests/citus/test_stall_on_a_cluster.py)."""


@asynccontextmanager
async def world_of(dsn: str | None, directory: Path) -> AsyncIterator[tuple[World, HealthChecks]]:
    """Run a daemon with all stages. Without a database, it has a server of its own."""
    async with AsyncExitStack() as stack:
        postgres = postgres_stage()
        if dsn is None:
            options = {"fsync": "off", "shared_buffers": "16MB"}
            dsn = await stack.enter_async_context(embedded_database(None, directory, options, stage=postgres))
            await migrate(dsn)
        names = await stack.enter_async_context(NameServer())
        webhook = await stack.enter_async_context(WebhookServer())
        host, port = names.address[:2]
        settings: dict[str, Any] = {
            "dns_servers": f"{host}:{port}",
            "handle_rate": "20",
            "change_bytes": "100000000",
            "roles": "live,resync,feed",
            "http_bind": "127.0.0.1:0",
            "webhook_url": webhook.url,
            "links": True,
        }
        daemon = await stack.enter_async_context(
            running_daemon(dsn, directory, others=[postgres], tuning=ALWAYS_LOOKING, **settings)
        )
        account = daemon.create_account("ada.test")
        await daemon.wait_until_equal()
        checks = await stack.enter_async_context(health_checks(daemon))
        yield World(daemon, account, names, directory, webhook), checks


async def assert_stalls_are_visible(dsn: str | None, directory: Path, stages: Iterable[str]) -> None:
    """Stall these stages of a daemon in turn; assert that its health check names each one until it continues."""
    async with world_of(dsn, directory) as (world, checks):
        watched, layout = world.daemon.stages.probe.stages, world.daemon.db.layout
        stalls = STALLS | ({} if layout.commit_numbers else STALLS_ON_A_CLUSTER)
        assert watched.keys() == stalls.keys(), "the daemon watches each stage of the table"
        await checks.wait_until_healthy()
        for stage in stages:
            limit, watched[stage].limit = watched[stage].limit, SHORT
            async with stalls[stage](world):
                reason = await checks.wait_for_stall(stage)
                assert reason["code"] == "stage-stalled"
                assert reason["value"] >= SHORT
                assert (await checks.get("/readyz"))[0] == 503
            await checks.wait_until_healthy()
            watched[stage].limit = limit
        await world.daemon.wait_for_cursor()


@pytest.mark.slow
async def test_stalled_stages_fail_the_health_check_by_name_until_their_cause_is_gone(
    database: str, tmp_path: Path
) -> None:
    await assert_stalls_are_visible(database, tmp_path, SAMPLE)


@pytest.mark.proof("daemon")
async def test_each_stage_that_stalls_fails_the_health_check_by_name(database: str, tmp_path: Path) -> None:
    await assert_stalls_are_visible(database, tmp_path, [name for name in STALLS if name != "embedded Postgres"])


@pytest.mark.proof("daemon")
@pytest.mark.one_server("the daemon runs the server")
async def test_stalled_embedded_postgres_fails_the_health_check_by_name(tmp_path: Path) -> None:
    await assert_stalls_are_visible(None, tmp_path, ["embedded Postgres"])
