"""Number the changes of a distributed database, and report nodes and transactions that keep changes from it."""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from time import monotonic

from indexer.cluster.numbering import ClusterNode, NumberingSession, Prepared, QueueStart, numbering_session
from indexer.concurrency.event_wait import wait_for_event
from indexer.concurrency.stage_progress import StageProgress
from indexer.db import Database, DatabaseError
from indexer.db.periodic import DatabaseAttempt
from indexer.telemetry.conditions import CLUSTER_NODE_UNAVAILABLE, TRANSACTIONS_IN_DOUBT, Conditions
from indexer.telemetry.metrics import Metrics

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


class ChangeNumbering:
    """Numbers changes after their commit, as `indexer.cluster.numbering` describes. All processes do this.

    If the nodes do not answer together, each is asked alone until it answers. Meanwhile, changes of transactions that
    wrote such a node wait, and those of others do not.

    Attributes:
        stage: Its progress. Each look at the queue is work.
    """

    def __init__(self, db: Database, metrics: Metrics, conditions: Conditions) -> None:
        self._db = db
        self._metrics = metrics
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

    async def number(self, session: NumberingSession) -> list[ClusterNode]:
        """Assign numbers to the batches whose transactions are complete; return nodes of which not all have answered.

        Raises:
            DatabaseError: The database is unavailable.
        """
        self._db.committed.clear()  # the queue that is read now may lack later commits
        queue = await session.queue(self._start.place)
        self._start.advance(queue)
        is_check = monotonic() >= self._next_check
        if is_check:
            if self._start.needs_mark:
                self._start.mark(await session.new_transaction())
            self._nodes = await session.nodes()
            self._next_check = monotonic() + CHECK_SECONDS
        self._waiting = queue.batches
        if is_check or queue.batches:
            asked = [node for node in self._nodes if node not in self._silent]
            try:
                prepared = await session.prepared(asked)
            except DatabaseError:
                return asked
            numbered = await session.number(queue.batches, prepared) if queue.batches else {}
            if numbered:
                self._db.numbered.set()
            self._waiting = {place: age for place, age in queue.batches.items() if place not in numbered}
            self._report(prepared, numbered)
        return []

    async def _follow(self, session: NumberingSession, group: asyncio.TaskGroup) -> None:
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
        while node in self._nodes and (error := await self._ask_alone(node)):
            message = (
                f"the cluster node {node.address} does not answer, and is asked again: {error}; "
                f"{len(self._waiting)} change batches have no numbers yet"
            )
            self._conditions.report(CLUSTER_NODE_UNAVAILABLE, node.address, message=message)
            await asyncio.sleep(CHECK_SECONDS)
        self._silent.discard(node)
        self._conditions.end(CLUSTER_NODE_UNAVAILABLE, node.address)

    async def _ask_alone(self, node: ClusterNode) -> str | None:
        """Return why the node does not answer; None if it does, or if the database itself is unavailable."""
        error = None
        with DatabaseAttempt():
            async with numbering_session(self._db) as session:
                try:
                    await session.prepared([node])
                except DatabaseError as failure:
                    error = str(failure)
        return error

    def _report(self, prepared: Prepared, numbered: Mapping[int, float]) -> None:
        in_doubt = [age for ages in prepared.values() for age in ages.values() if age > IN_DOUBT_SECONDS]
        for age in numbered.values():
            self._metrics.numbering_seconds.observe(age)
        oldest = max([*in_doubt, *self._waiting.values()], default=0.0)
        if oldest <= IN_DOUBT_SECONDS:
            self._conditions.end(TRANSACTIONS_IN_DOUBT)
            return
        message = (
            f"{len(in_doubt)} transactions are prepared and not complete on nodes of the cluster, and "
            f"{len(self._waiting)} change batches have no numbers yet; the oldest for {oldest:.0f} s"
        )
        self._conditions.report(TRANSACTIONS_IN_DOUBT, message=message, value=round(oldest, 1))
