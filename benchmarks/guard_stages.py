"""Measure the CPU time of each stage and of its floor in turns, for `benchmarks.guard`."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from math import fsum
from pathlib import Path

from benchmarks import database_rows, floor, harness, live_stages
from benchmarks.floor import BareScript, SignatureCheck, VerificationInput
from benchmarks.live_stages import LivePath
from benchmarks.report import generation_progress
from benchmarks.resync_stages import timed_resyncs
from benchmarks.stage_clock import StageClock
from benchmarks.workload import Workload, WorkloadSpec, load_workload
from indexer.atproto.crypto import PublicKey, parse_did_key
from indexer.sync.repo import SyncStatus

RELAY = "wss://relay.test"

Seconds = Mapping[str, float]
"""CPU seconds by stage."""

Round = Callable[[], Awaitable[tuple[Seconds, Seconds]]]
"""Measures one round: the CPU seconds of the stages, and the floor of each stage."""


@dataclass(frozen=True, slots=True)
class GuardSizes:
    """The amount of work.

    Attributes:
        repos: Repos of the live workload; also the commits of one round of "writing".
        records: Mean number of records of these repos.
        planned: Commits of one round of "planning".
        received: Messages of one round of "receiving".
        export_records: Number of records of an export.
        exports: Resyncs of one round of "resyncing".
        max_rounds: The highest number of rounds that the workload is large enough for.
    """

    repos: int = 400
    records: int = 150
    planned: int = 300
    received: int = 1_000
    export_records: int = 1_900
    exports: int = 2
    max_rounds: int = 8


@dataclass(frozen=True)
class GuardWorkload:
    """The workloads and what is derived from them before the measurement.

    Attributes:
        sizes: The amount of work.
        live: The workload with commits.
        exports: The workload with exports.
    """

    sizes: GuardSizes
    live: Workload
    exports: Workload

    @classmethod
    def load(cls, sizes: GuardSizes) -> "GuardWorkload":
        """Load both workloads; generate them if they do not exist yet."""
        # Each round of "writing" takes one commit per repo for the indexer and one for the bare script. Doubled
        # receiving takes two messages for each one that is counted.
        commits = max(2 * sizes.max_rounds * sizes.repos, 2 * sizes.received)
        live = WorkloadSpec(sizes.repos, sizes.records, sigma=0.4, commits=commits)
        exports = WorkloadSpec(sizes.max_rounds * sizes.exports, sizes.export_records, sigma=0.0, exports=True)
        return cls(sizes, load_workload(live, generation_progress), load_workload(exports, generation_progress))

    @cached_property
    def keys(self) -> dict[str, PublicKey]:
        """The signing keys by DID."""
        accounts = [*self.live.accounts, *self.exports.accounts]
        return {account.did: parse_did_key(account.key) for account in accounts}

    @cached_property
    def checks(self) -> dict[str, SignatureCheck]:
        """The signature checks of the floor by DID."""
        return {did: floor.signature_check(key) for did, key in self.keys.items()}

    def verification_inputs(self, count: int) -> list[VerificationInput]:
        """Return the inputs of the floor for the first commits."""
        frames = self.live.frames(range(1, count + 1))
        return [floor.parse_message(frame, self.checks).verification for frame in frames]


@asynccontextmanager
async def planning(workload: GuardWorkload, directory: Path) -> AsyncIterator[Round]:  # noqa: ARG001
    """Measure decoding, verification and planning of commits, without a database."""
    count = workload.sizes.planned
    repos = {
        account.did: database_rows.repo_before(account, SyncStatus.SYNCHRONIZED, 0.0)
        for account in workload.live.accounts
    }
    frames = list(workload.live.frames(range(1, count + 1)))
    inputs = workload.verification_inputs(count)

    async def measure() -> tuple[Seconds, Seconds]:
        path = LivePath(StageClock(), workload.keys, RELAY)
        events = path.decode(frames)
        path.plan_in_stages(events, frames, repos)
        path.plan_interleaved(events, frames, repos)
        return path.clock.cpu, dict.fromkeys(path.clock.cpu, floor.verification_seconds(inputs))

    yield measure


@asynccontextmanager
async def receiving(
    workload: GuardWorkload,
    directory: Path,  # noqa: ARG001
    messages_per_frame: int = 1,
) -> AsyncIterator[Round]:
    """Measure receiving messages from a websocket. `messages_per_frame` messages are sent for each counted one."""
    count = workload.sizes.received
    inputs = workload.verification_inputs(count)

    async def measure() -> tuple[Seconds, Seconds]:
        task = asyncio.create_task(live_stages.receive_seconds(relay.url, count))
        await relay.wait_for_subscribers(1)
        await relay.command(1, messages_per_frame * count, 0)
        seconds = await task
        await relay.wait_for_subscribers(0)
        return {"socket": seconds}, {"socket": floor.verification_seconds(inputs)}

    async with harness.load_process("load_relay", workload.live) as relay:
        yield measure


@asynccontextmanager
async def writing(workload: GuardWorkload, directory: Path) -> AsyncIterator[Round]:
    """Measure loading and writing the rows of one batch. The floor is the bare script."""
    repos = workload.sizes.repos
    frames_left = workload.live.frames(range(1, 2 * workload.sizes.max_rounds * repos + 1))

    async def measure() -> tuple[Seconds, Seconds]:
        frames = list(islice(frames_left, repos))
        path = LivePath(clock, workload.keys, RELAY)
        events = path.decode(frames)
        clock.cpu.clear()
        await path.write(db, path.plan_interleaved(events, frames, await path.load(db, events)))
        messages = [floor.parse_message(frame, workload.checks) for frame in islice(frames_left, repos)]
        await script.write(floor.batch_statements(messages))
        return clock.cpu, _script_seconds(script, "client")

    async with harness.database(directory) as database:
        dsn = database.dsn
        await database_rows.insert_workload(
            dsn, workload.live, lambda _: "https://pds.test", status=SyncStatus.SYNCHRONIZED
        )
        await database_rows.vacuum_and_checkpoint([dsn])
        async with live_stages.connect_database(dsn) as (db, clock), floor.bare_script(dsn) as script:
            yield measure


@asynccontextmanager
async def resyncing(workload: GuardWorkload, directory: Path) -> AsyncIterator[Round]:
    """Measure resyncs of repos without stored records. The floor is verification, or the bare script."""
    exports = workload.exports
    accounts_left = iter(exports.accounts)

    async def measure() -> tuple[Seconds, Seconds]:
        accounts = {account.did: account for account in islice(accounts_left, workload.sizes.exports)}
        await database_rows.make_due(dsn, list(accounts))
        spent = await resyncs.run()
        async for changes in floor.read_changes(dsn, list(accounts)):
            await script.write_export([floor.head_row(account) for account in accounts.values()], changes)
        verification = fsum(
            floor.export_verification_seconds(exports.exports[slice(*account.export)], workload.checks[did])
            for did, account in accounts.items()
        )
        return spent, dict.fromkeys(spent, verification) | _script_seconds(script, "apply")

    async with harness.load_process("export_host", exports) as host, harness.database(directory) as database:
        dsn = database.dsn
        async with live_stages.connect_database(dsn) as (db, _):
            await db.repos.add([account.did for account in exports.accounts])
        await database_rows.postpone_resyncs(dsn)
        await database_rows.vacuum_and_checkpoint([dsn])
        async with (
            timed_resyncs(dsn, host.url, directory / "spool") as resyncs,
            floor.bare_script(dsn) as script,
        ):
            yield measure


def _script_seconds(script: BareScript, client: str) -> dict[str, float]:
    """Return the floor of the database stages since the last call.

    The script's own CPU time is so short that it is only meaningful together with that of Postgres.
    """
    cpu = dict(script.clock.cpu)
    script.clock.cpu.clear()
    return {client: cpu["client"] + cpu["database"], "database": cpu["database"]}
