"""A local network, a daemon in the test process, its database, and the checks that tests make on them."""

from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import asyncpg

from indexer.app.daemon import Daemon
from indexer.app.tuning import Tuning
from indexer.atproto.crypto import PrivateKey
from indexer.atproto.limits import Limits
from indexer.cli.demo import compare
from indexer.concurrency.stage_progress import StageProgress
from indexer.db import Database
from indexer.demo.local_network import RecordsByRepo
from indexer.demo.local_pds import GET_REPO
from indexer.demo.local_plc import LocalIdentity
from indexer.demo.local_relay import message_frame
from indexer.demo.local_repo import LocalChange
from indexer.sync.events import MalformedEvent, decode_frame
from tests.daemon_harness import run_daemon, settings_for, wait_for_cursor
from tests.database_checks import fetch
from tests.faulty_network import FaultyAccount, FaultyNetwork
from tests.lost_commits import lose_commit
from tests.quick_tuning import QUICK
from tests.waiting import until

POST = "app.bsky.feed.post"
LIKE = "app.bsky.feed.like"
REPO_ROW = """
    select *, (extract(epoch from next_attempt_at) - extract(epoch from now()))::float8 as wait
    from indexer.repo where did = $1
"""

UNKNOWN_KEY = PrivateKey.from_seed("k256", b"a key that no account has")


class FilteredNetwork(FaultyNetwork):
    """A network of which the database must contain only the given accounts and collections."""

    def __init__(self, dids: Iterable[str] | None = None, collections: Iterable[str] | None = None) -> None:
        super().__init__()
        self.dids = None if dids is None else set(dids)
        self.collections = None if collections is None else set(collections)

    def expected_records(self) -> RecordsByRepo:
        return {
            did: {
                path: cid
                for path, cid in records.items()
                if self.collections is None or path.partition("/")[0] in self.collections
            }
            for did, records in super().expected_records().items()
            if self.dids is None or did in self.dids
        }


@dataclass
class RunningDaemon:
    """A daemon that indexes a local network.

    Attributes:
        stages: The stages of the daemon.
        dsn: The database of the daemon.
        recorded: The sequence numbers of dead letters that were seen.
    """

    network: FaultyNetwork
    stages: Daemon
    dsn: str
    limits: Limits
    recorded: set[int] = field(default_factory=set)

    @property
    def db(self) -> Database:
        return self.stages.db

    async def wait_for_cursor(self) -> None:
        """Wait until everything that the relay has sent is in the database. Its last message must have a number.

        The cursor does not pass malformed messages at the end; they become dead letters.
        """
        seqs = set[int]()
        for sent in reversed(self.network.relay.log):
            if not isinstance(decode_frame(sent.frame, self.limits), MalformedEvent):
                await wait_for_cursor(self.stages, self.network.relay_url, sent.seq)
                break
            seqs.add(sent.seq)

        async def stored() -> bool:
            rows = await self.execute("select seq from atproto.rejected where seq = any($1::bigint[])", list(seqs))
            self.recorded |= {row["seq"] for row in rows}  # a replay may remove them later
            return seqs <= self.recorded

        await until(stored, lambda: f"dead letters {seqs}")

    async def wait_until_equal(self) -> None:
        """Wait until everything is read and the database equals the network."""
        await self.wait_for_cursor()
        differences = ["not compared"]

        async def equal() -> bool:
            nonlocal differences
            differences = await compare(self.network, self.db)
            return not differences

        await until(equal, lambda: differences[:5])

    async def resync_until_equal(self, account: FaultyAccount) -> None:
        """Make every attempt of the repo due at once, instead of after a minute or more, until it is synchronized."""

        async def synchronized() -> bool:
            await self.execute("update indexer.repo set next_attempt_at = null where did = $1", account.did)
            return bool((await self.repo_row(account))["sync_status"] == "synchronized")

        await until(synchronized)
        await self.wait_until_equal()

    async def execute(self, statement: str, *values: Any) -> list[asyncpg.Record]:
        return await fetch(self.dsn, statement, *values)

    async def repo_row(self, account: FaultyAccount) -> asyncpg.Record:
        """Return the row of the repo. `wait` is the seconds until its next attempt, infinite if it is parked."""
        [row] = await self.execute(REPO_ROW, account.did)
        return row

    async def record_rows(self, account: FaultyAccount) -> list[asyncpg.Record]:
        """Return the stored records of the account, including those that are not visible."""
        return await self.execute("select * from indexer.record where did = $1 order by collection, rkey", account.did)

    async def dead_letters(self) -> list[tuple[str | None, str]]:
        """Return DID and reason of each dead letter, in the order of their IDs."""
        return [
            (did, reason) for did, reason in await self.execute("select did, reason from atproto.rejected order by id")
        ]

    def counter(self, name: str, **labels: str) -> float:
        """Return the value of the counter `indexer_{name}_total` with exactly these labels."""
        value = self.stages.metrics.registry.get_sample_value(f"indexer_{name}_total", labels)
        assert value is not None, (name, labels)
        return value

    def counter_sum(self, name: str) -> float:
        """Return the sum of the counter `indexer_{name}_total` over all its labels."""
        return sum(
            sample.value
            for family in self.stages.metrics.registry.collect()
            for sample in family.samples
            if sample.name == f"indexer_{name}_total"
        )

    async def wait_for_counter(self, name: str, *, above: float = 0, **labels: str) -> None:
        """Wait until the counter `indexer_{name}_total` is greater than `above`."""
        await until(lambda: self.counter(name, **labels) > above, lambda: (name, labels, self.stages.status.document()))

    @property
    def export_requests(self) -> int:
        """The number of exports that the PDSs were asked for."""
        return sum(pds.requests[GET_REPO] for pds in self.network.pdses)

    def create_account(self, handle: str, records: int = 5) -> FaultyAccount:
        """Create an account with this many posts."""
        account = self.network.create_account(handle)
        for number in range(records):
            account.create(POST, post(number), rkey=f"{number:03}")  # the same tree in every run
        return account

    def lose_commit(self, account: FaultyAccount) -> None:
        """Create two posts. The relay does not send the commit of the first one."""
        lose_commit(account, POST)

    def inject(self, kind: str, payload: dict[str, Any]) -> None:
        """Let the relay send this message, with the next sequence number."""
        relay = self.network.relay
        relay.inject(message_frame(kind, payload | {"seq": relay.seq + 1}))


@asynccontextmanager
async def running_daemon(
    dsn: str,
    directory: Path,
    network: FaultyNetwork | None = None,
    others: Sequence[StageProgress] = (),
    tuning: Tuning = QUICK,
    **settings: Any,
) -> AsyncIterator[RunningDaemon]:
    """Run a daemon on a network that is already running, or on a new one."""
    if network is None:
        async with FaultyNetwork() as new, running_daemon(dsn, directory, new, others, tuning, **settings) as daemon:
            yield daemon
        return
    loaded = settings_for(network.relay_url, network.plc_url, directory, **settings)
    async with run_daemon(loaded, dsn, others, tuning) as stages:
        yield RunningDaemon(network, stages, dsn, loaded.limits)


def post(text: object) -> dict[str, Any]:
    return {"$type": POST, "text": str(text)}


def publish_key_silently(network: FaultyNetwork, account: FaultyAccount) -> None:
    """Publish the account's identity in the directory, without an `#identity` message. It undoes a tombstone."""
    identity = LocalIdentity(account.handle, account.key.public.did_key(), account.pds.url)
    network.plc.publish(account.did, identity)


def commit_payload(did: str, change: LocalChange, time: str, **changes: Any) -> dict[str, Any]:
    """Return the payload of a `#commit` message for `change`, with changed fields."""
    return {
        "repo": did,
        "commit": change.commit.cid,
        "rev": change.commit.rev,
        "since": change.since,
        "prevData": change.prev_data,
        "ops": change.ops,
        "blocks": change.blocks,
        "time": time,
        "blobs": [],
        "rebase": False,
        "tooBig": False,
    } | changes
