"""Number the changes of a distributed database, after their transactions are complete on all nodes.

COMMIT puts change batches into a queue, the table `unnumbered_batch`, and a process numbers them
(docs/decisions/0014-change-log-on-a-cluster.md):

    1. read the queue
    2. ask every node for the transactions that are prepared there
    3. number the batches whose transaction is not prepared on any node, in the order of the queue; one that has
       changes of the same bucket as an earlier batch that waits does so, too

Citus stores a row in `pg_dist_transaction` for each transaction that it prepares on a node. This row says which
transaction a prepared one belongs to, and which nodes a transaction has written if not all nodes answer.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from time import monotonic
from typing import NamedTuple

import asyncpg
import orjson

from indexer.concurrency.event_wait import wait_for_event
from indexer.concurrency.stage_progress import StageProgress
from indexer.crash_points import crash_point
from indexer.db import Database, DatabaseError
from indexer.db.connections import SERVER_SETTINGS, Connections
from indexer.db.database_errors import database_errors
from indexer.db.periodic import DatabaseAttempt
from indexer.sync.shard import BUCKETS
from indexer.telemetry.conditions import CLUSTER_NODE_UNAVAILABLE, TRANSACTIONS_IN_DOUBT, Conditions

ASK_SECONDS = 5.0
"""Time limit for the answers of the nodes."""
POLL_SECONDS = 0.2
"""Interval at which the queue is read even if this process wrote nothing: others may have."""
SPACING_SECONDS = 0.01
"""Minimum time from one look at the queue to the next. Several commits then share one."""
CHECK_SECONDS = 1.0
"""Interval at which the nodes are asked even if the queue is empty, at which a silent node is asked again, and at which
the start of the queue may move."""
IN_DOUBT_SECONDS = 2.0
"""A transaction that has been prepared for longer counts as in doubt. Otherwise, its COMMIT is running."""
RETRY_SECONDS = 0.5
FINISH_SECONDS = 1.0
"""Maximum time to number the last changes before the process ends. A later process numbers the rest."""

# One bucket of each node. The answers say which nodes they are from, in case that a shard was moved meanwhile.
_NODES = f"""
    select n.groupid, format('%s:%s', n.nodename, n.nodeport) as address, min(bucket)::smallint as bucket
    from generate_series(0, {BUCKETS - 1}) bucket
    join pg_dist_placement p
        on p.shardid = get_shard_id_for_distribution_column('indexer.resync_queue'::regclass, bucket::smallint)
    join pg_dist_node n on n.groupid = p.groupid and n.noderole = 'primary'
    group by 1, 2
"""
_QUEUE = """
    select u.commit_order, u.age, pg_snapshot_xmin(s)::text::bigint as min_xid,
        q.last_value - (not q.is_called)::integer as drawn
    from pg_current_snapshot() s cross join indexer.unnumbered_batch_commit_order_seq q
    left join indexer.unnumbered_batches($1) u on true
"""
# All transactions that began to write before have lower IDs. This one writes nothing.
_NEW_TRANSACTION = "select pg_current_xact_id()::text::bigint"
# The table has one row for each bucket and priority.
_PREPARED = """
    select indexer.prepared_transactions(bucket) from indexer.resync_queue
    where bucket = any($1::smallint[]) and priority = 0
"""


class ClusterNode(NamedTuple):
    """A node that has shards, by the number by which Citus knows it, with one of the buckets that it has."""

    id: int
    address: str
    bucket: int


class Queue(NamedTuple):
    """The state of the queue in one snapshot.

    Attributes:
        batches: The age of each committed batch in seconds, by its place in the queue; in the order of the queue.
        min_xid: All transactions with a lower ID have ended.
        drawn: A place in the queue. Places up to this one belong to transactions that have begun to write.
    """

    batches: Mapping[int, float]
    min_xid: int
    drawn: int


Prepared = Mapping[int, Mapping[str, float]]
"""For each node that has answered: the ages in seconds of the transactions that are prepared there, by their names."""


@dataclass
class QueueStart:
    """The place in the queue before which nothing will appear any more, computed from successive states of the queue.

    Rows that were deleted stay in the table as long as a transaction may see them, such as a backup or an export of
    hours. Without the start, each look at the queue would pass all of them.

    Attributes:
        place: All batches up to this place are numbered, or were rolled back.
    """

    place: int = 0
    _drawn: int = 0
    _mark: tuple[int, int] | None = None

    @property
    def needs_mark(self) -> bool:
        """True if the start can move only after `mark`."""
        return self._mark is None and self._drawn > self.place

    def advance(self, queue: Queue) -> None:
        """Note the state of the queue, which was read from this start on."""
        if self._mark is not None and queue.min_xid >= self._mark[1]:
            # Whoever had a place up to the mark has ended, so the queue shows all that will ever be there.
            self.place = min([self._mark[0], *(first - 1 for first in list(queue.batches)[:1])])
            self._mark = None
        self._drawn = queue.drawn

    def mark(self, xid: int) -> None:
        """Note the ID of a transaction that began after the last noted state of the queue was read.

        All transactions that had drawn a place by then have lower IDs. The end of a snapshot (`pg_snapshot_xmax`) says
        less: it is after the last transaction that has ended, so transactions that run may have higher IDs.
        """
        self._mark = self._drawn, xid


@asynccontextmanager
async def numbering_session(pool: Connections) -> AsyncIterator[asyncpg.Connection]:
    """Open a session that numbers the changes of a distributed database."""
    async with pool.own_connection(SERVER_SETTINGS | {"application_name": "indexer numbering"}) as connection:
        yield connection


async def load_queue(connection: asyncpg.Connection, start: int) -> Queue:
    """Return the queue after the place `start`."""
    rows = await connection.fetch(_QUEUE, start)
    batches = {row["commit_order"]: row["age"] for row in rows if row["commit_order"] is not None}
    return Queue(batches, rows[0]["min_xid"], rows[0]["drawn"])


async def load_prepared(connection: asyncpg.Connection, nodes: Iterable[ClusterNode]) -> Prepared:
    """Ask these nodes for the transactions that Citus has prepared there, within `ASK_SECONDS`.

    Their names begin with `citus_`; other programs may prepare transactions of their own. A node is missing in the
    result if its bucket was moved.

    Raises:
        DatabaseError: One of the nodes does not answer, or the database is unavailable.
    """
    if not (buckets := [node.bucket for node in nodes]):
        return {}
    with database_errors():
        rows = await connection.fetch(_PREPARED, buckets, timeout=ASK_SECONDS)
    answers = [orjson.loads(answer) for (answer,) in rows]
    return {
        answer["node"]: {name: age for name, age in answer["ages"].items() if name.startswith("citus_")}
        for answer in answers
    }


async def assign_numbers(connection: asyncpg.Connection, batches: Iterable[int], prepared: Prepared) -> set[int]:
    """Assign numbers to the batches at these places whose transactions are complete; return their places."""
    names = [(node, name) for node, ages in prepared.items() for name in ages]
    arguments = list(batches), list(prepared), [node for node, _ in names], [name for _, name in names]
    crash_point("numbering.begun")
    rows = await connection.fetch("select commit_order from indexer.number_changes($1, $2, $3, $4)", *arguments)
    crash_point("numbering.done")
    return {row["commit_order"] for row in rows}


class ChangeNumbering:
    """Numbers changes after their commit, as described above. All processes do this.

    If the nodes do not answer together, each is asked alone until it answers. Meanwhile, changes of transactions that
    wrote such a node wait, and those of others do not.

    Attributes:
        stage: Its progress. Each look at the queue is work.
    """

    def __init__(self, db: Database, conditions: Conditions) -> None:
        self._db = db
        self._conditions = conditions
        self._start = QueueStart()
        self._nodes: list[ClusterNode] = []
        self._silent = set[ClusterNode]()
        self._next_check = 0.0
        self._waiting: Mapping[int, float] = {}
        self.stage = StageProgress("change numbering")

    async def run(self) -> None:
        """Assign numbers forever. Only an exception that is a bug ends it."""
        async with asyncio.TaskGroup() as group:
            while True:
                with DatabaseAttempt(self.stage):
                    async with numbering_session(self._db) as session:
                        self._start = QueueStart()  # a standby that was promoted meanwhile may be a little behind
                        await self._follow(session, group)
                await asyncio.sleep(RETRY_SECONDS)

    async def finish(self) -> None:
        """Assign numbers until nothing waits, at most for `FINISH_SECONDS`. Call it when `run` has been cancelled."""
        with DatabaseAttempt(), suppress(TimeoutError):
            async with asyncio.timeout(FINISH_SECONDS), numbering_session(self._db) as session:
                self._start = QueueStart()
                began = monotonic()
                while not await self.number(session) and self._waiting:
                    await self._wait_for_commit(began)
                    began = monotonic()

    async def number(self, session: asyncpg.Connection) -> list[ClusterNode]:
        """Assign numbers to the batches whose transactions are complete; return nodes of which not all have answered.

        Raises:
            DatabaseError: The database is unavailable.
        """
        self._db.committed.clear()  # the queue that is read now may lack later commits
        queue = await load_queue(session, self._start.place)
        self._start.advance(queue)
        is_check = monotonic() >= self._next_check
        if is_check:
            if self._start.needs_mark:
                self._start.mark(await session.fetchval(_NEW_TRANSACTION))
            self._nodes = [ClusterNode(*row) for row in await session.fetch(_NODES)]
            self._next_check = monotonic() + CHECK_SECONDS
        self._waiting = queue.batches
        if is_check or queue.batches:
            asked = [node for node in self._nodes if node not in self._silent]
            try:
                prepared = await load_prepared(session, asked)
            except DatabaseError:
                return asked
            numbered = await assign_numbers(session, queue.batches, prepared) if queue.batches else set()
            self._waiting = {place: age for place, age in queue.batches.items() if place not in numbered}
            self._report(prepared)
        return []

    async def _follow(self, session: asyncpg.Connection, group: asyncio.TaskGroup) -> None:
        """Assign numbers until nodes do not answer. Then the session may be unusable."""
        while True:
            began = monotonic()
            asked = await self.number(session)
            for node in asked:
                self._silent.add(node)
                group.create_task(self._wait_for_answer(node), name=f"answer of {node.address}")
            if asked:
                return
            self.stage.failed(None)
            self.stage.idle()
            await self._wait_for_commit(began)
            self.stage.begin()

    async def _wait_for_commit(self, began: float) -> None:
        """Wait until there may be something to number. What waits is tried less and less often."""
        oldest = max(self._waiting.values(), default=POLL_SECONDS)
        await wait_for_event(self._db.committed, min(oldest, POLL_SECONDS))
        await asyncio.sleep(began + SPACING_SECONDS - monotonic())

    async def _wait_for_answer(self, node: ClusterNode) -> None:
        """Ask a node alone until it answers, or until it has no shards any more."""
        while node in self._nodes:
            error = None
            with DatabaseAttempt():  # if the database itself is unavailable, the node is asked with the others again
                async with numbering_session(self._db) as session:
                    try:
                        await load_prepared(session, [node])
                    except DatabaseError as failure:
                        error = failure
            if error is None:
                break
            message = (
                f"the cluster node {node.address} does not answer, and is asked again: {error}; "
                f"{len(self._waiting)} change batches have no numbers yet"
            )
            self._conditions.report(CLUSTER_NODE_UNAVAILABLE, node.address, message=message)
            await asyncio.sleep(CHECK_SECONDS)
        self._silent.discard(node)
        self._conditions.end(CLUSTER_NODE_UNAVAILABLE, node.address)

    def _report(self, prepared: Prepared) -> None:
        in_doubt = [age for ages in prepared.values() for age in ages.values() if age > IN_DOUBT_SECONDS]
        oldest = max([*in_doubt, *self._waiting.values()], default=0.0)
        if oldest <= IN_DOUBT_SECONDS:
            self._conditions.end(TRANSACTIONS_IN_DOUBT)
            return
        message = (
            f"{len(in_doubt)} transactions are prepared and not complete on nodes of the cluster, and "
            f"{len(self._waiting)} change batches have no numbers yet; the oldest for {oldest:.0f} s"
        )
        self._conditions.report(TRANSACTIONS_IN_DOUBT, message=message, value=round(oldest, 1))
