"""Each stage is stalled in turn: `/healthz` fails with its name, and recovers when the cause is gone."""

import ast
import fcntl
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from indexer.localnet.http_server import Fault
from indexer.localnet.local_account import LocalAccount
from indexer.service.resync.queue_maintenance import MaintenanceSettings
from indexer.store import connections, report_queries
from indexer.store.embedded import database as embedded_database
from indexer.store.embedded import postgres_stage
from indexer.store.migrate import migrate
from indexer.sync.scope import Track
from indexer.sync.shard import BUCKETS, Placement
from tests.daemon.health_checks import health_checks
from tests.daemon.running_daemon import LIKE, POST, RunningDaemon, post, running_daemon
from tests.identity.name_server import NameServer
from tests.quick_tuning import QUICK
from tests.service.feed.jetstream_client import subscribed
from tests.service.feed.webhook_server import WebhookServer
from tests.source_code import INDEXER, source_calls
from tests.waiting import until

SHORT = 1.0
"""The limit of the stage that a test stalls, in seconds."""
ALWAYS_LOOKING = replace(
    QUICK,
    maintenance=MaintenanceSettings(search_interval=0.1, unproven_interval=0.1),
    identity_refresh_interval=0.1,
    scope_settle=0.0,
    count_interval=0.1,
    host_save_interval=0.1,
)
"""The periodic stages look for work all the time."""


@dataclass
class World:
    """A daemon that has caught up, and what its stages depend on."""

    daemon: RunningDaemon
    account: LocalAccount
    names: NameServer
    directory: Path
    webhook: WebhookServer


Stall = Callable[[World], AbstractAsyncContextManager[None]]


@asynccontextmanager
async def locked(world: World, *tables: str) -> AsyncIterator[None]:
    """Let every statement that uses one of the tables wait."""
    connection = await asyncpg.connect(world.daemon.dsn)
    try:
        async with connection.transaction():
            for table in tables:
                await connection.execute(f"lock table indexer.{table} in access exclusive mode")
            yield
    finally:
        await connection.close()


def lock_of(table: str) -> Stall:
    return lambda world: locked(world, table)


@asynccontextmanager
async def stalled_consumer(world: World) -> AsyncIterator[None]:
    """Keep the consumer from loading the cursor for its next connection."""
    async with locked(world, "cursor"):
        world.daemon.stages.subscription.reconnect()
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
        await world.daemon.store.set_collections([LIKE])
        yield


@asynccontextmanager
async def stalled_untracking(world: World) -> AsyncIterator[None]:
    """Want fewer repos while the repos cannot be read."""
    async with locked(world, "repo"):
        await world.daemon.store.change_scope(Track.LISTED)
        yield


@asynccontextmanager
async def stalled_backfill(world: World) -> AsyncIterator[None]:
    """Add collections while the repos cannot be read."""
    await world.daemon.store.set_collections([LIKE])
    async with locked(world, "repo"):
        await world.daemon.store.set_collections(["app.bsky.*"])
        yield


@asynccontextmanager
async def stalled_discovery(world: World) -> AsyncIterator[None]:
    """Choose a signal collection while the progress of its list cannot be read."""
    await world.daemon.store.change_scope(Track.LISTED)
    await world.daemon.store.change_scope(Track.SIGNAL, signal_collections=[POST])
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
    """Kill the server, and hold the lock of its directory like a process that is starting one."""
    postgres = world.directory / "postgres"
    pid = int((postgres / "data" / "postmaster.pid").read_text().splitlines()[0])
    with (postgres / "lock").open() as lock:
        os.kill(pid, signal.SIGKILL)
        fcntl.flock(lock, fcntl.LOCK_EX)  # the event loop waits, too, so that nobody else gets the lock
        yield


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
    "embedded Postgres": stalled_postgres,
    "firehose consumer": stalled_consumer,
    "handle checks": stalled_handles,
    "host states": stalled_hosts,
    "identity refresh": lock_of("identity"),
    "inbox": stalled_inbox,
    "jetstream reader": stalled_reader,
    "key lookups": stalled_lookups,
    "lease expiry": lock_of("repo"),
    "links": lock_of("link_delta"),
    "open gaps": lock_of("gap"),
    "parked repos": lock_of("repo"),
    "reconciliation": lock_of("crawl_progress"),
    "repo counts": lock_of("repo"),
    "resync pool": lock_of("repo"),
    "scope": lock_of("scope"),
    "scope backfill": stalled_backfill,
    "scope narrowing": stalled_narrowing,
    "scope untracking": stalled_untracking,
    "shard lock": stalled_lock,
    "signal discovery": stalled_discovery,
    "tap feed": lock_of("change_batch"),
    "unproven repos": lock_of("repo"),
    "webhook": stalled_webhook,
}
"""By stage: the function that stalls it during a block."""
SAMPLE = {"batch writer", "firehose consumer", "reconciliation", "resync pool"}
"""Stages that are stalled in `make test`; the others are stalled in `make proof`."""

STALLS_ON_A_CLUSTER: dict[str, Stall] = {"change numbering": lock_of("unnumbered_batch")}
"""The same for the stages that a daemon has only on a distributed database (tests/citus/test_stall_on_a_cluster.py)."""

COMMANDS = {"discover"}
"""Stages of commands, which have no health checks. tests/service/crawl/test_discover.py stalls it."""

STAGES_OF_TASKS = {
    "queue maintenance": {"lease expiry", "parked repos", "unproven repos"},
    "shard ownership": {"shard lock"},
    "stream continuity": {"open gaps"},
}
"""The stages of the tasks of the daemon that have other names."""

MONITORS = {
    "daemon monitor",
    "database monitor",
    "event loop delay",
    "garbage collection",
    "identity cache",
    "status samples",
}
"""Tasks of the daemon that are no stages: they watch the others or the process, and no work waits for them."""


@asynccontextmanager
async def world_of(dsn: str, directory: Path, stage: str) -> AsyncIterator[World]:
    """Run a daemon with all stages. For the stage of the embedded Postgres, it has a server of its own."""
    async with AsyncExitStack() as stack:
        postgres = postgres_stage()
        if stage == postgres.name:
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
        yield World(daemon, account, names, directory, webhook)


@pytest.mark.slow
@pytest.mark.parametrize(
    "stage",
    [stage if stage in SAMPLE else pytest.param(stage, marks=pytest.mark.proof("daemon")) for stage in STALLS],
)
async def test_stalled_stage_fails_the_health_check_by_name_until_its_cause_is_gone(
    database: str, tmp_path: Path, stage: str
) -> None:
    await assert_stall_is_visible(database, tmp_path, stage)


async def assert_stall_is_visible(database: str, tmp_path: Path, stage: str) -> None:
    async with world_of(database, tmp_path, stage) as world, health_checks(world.daemon) as checks:
        await checks.wait_until_healthy()
        stages = world.daemon.stages.probe.stages
        is_distributed = world.daemon.store.placement is Placement.DISTRIBUTED
        stalls = STALLS | (STALLS_ON_A_CLUSTER if is_distributed else {})
        assert stages.keys() == stalls.keys(), "the daemon watches each stage of the table"
        stages[stage].limit = SHORT
        async with stalls[stage](world):
            reason = await checks.wait_for_stall(stage)
            assert reason["code"] == "stage-stalled"
            assert reason["value"] >= SHORT
            assert (await checks.get("/readyz"))[0] == 503
        await checks.wait_until_healthy()
        await world.daemon.wait_for_cursor()


LOCKED_TABLES = ("repo", "change", "identity", "gap", "crawl_progress")
STALLED_BY_LOCKS = {
    "account erasure",
    "batch writer",
    "change log retention",
    "identity refresh",
    "lease expiry",
    "open gaps",
    "parked repos",
    "reconciliation",
    "repo counts",
    "resync pool",
    "unproven repos",
}


@pytest.mark.proof("daemon")
@pytest.mark.slow
async def test_stages_whose_statements_are_cancelled_again_and_again_have_stalled(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time limit of a statement is shorter than the limits of the stages, so attempts end before the stall."""
    monkeypatch.setattr(connections, "STATEMENT_TIMEOUT", 0.5)
    monkeypatch.setattr(report_queries, "COUNT_MILLISECONDS", 300)
    async with world_of(database, tmp_path, "") as world, health_checks(world.daemon) as checks:
        await checks.wait_until_healthy()
        for name in STALLED_BY_LOCKS:
            world.daemon.stages.probe.stages[name].limit = 3 * SHORT
        async with locked(world, *LOCKED_TABLES):
            world.account.create(POST, post("waits for the lock"))
            for name in sorted(STALLED_BY_LOCKS):
                await checks.wait_for_stall(name)
        await checks.wait_until_healthy()


def test_every_stage_in_the_source_is_stalled_by_a_test() -> None:
    named = {
        ast.literal_eval(call.args[0])
        for _module, _function, call in source_calls()
        if isinstance(call.func, ast.Name) and call.func.id == "StageProgress" and call.args
    }
    assert named == STALLS.keys() | STALLS_ON_A_CLUSTER.keys() | COMMANDS


def test_every_task_of_the_daemon_is_a_stage_that_a_test_stalls() -> None:
    functions = [
        node
        for path in INDEXER.glob("daemon*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name in {"_stages", "stages"}
    ]
    names = {
        ast.literal_eval(key)
        for function in functions
        for node in ast.walk(function)
        if isinstance(node, ast.Dict)
        for key in node.keys
        if key
    }
    assert names >= {"batch writer", "resync pool", "webhook", "scope backfill"}
    stages = set[str]().union(*[STAGES_OF_TASKS.get(name, {name}) for name in names - MONITORS])
    without_task = {"inbox", "embedded Postgres"}  # these two have no task of their own
    assert stages == (STALLS.keys() | STALLS_ON_A_CLUSTER.keys()) - without_task
