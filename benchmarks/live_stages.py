"""Measure the stages of the live path one by one, in this process and with nothing else running."""

import gc
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import ExitStack, aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from time import process_time, time
from unittest.mock import patch

from benchmarks import cpu_usage
from benchmarks.stage_clock import StageClock
from indexer.app.clients import core_of
from indexer.app.settings import DEMO_SETTINGS, load_from_environment
from indexer.atproto.car import split_car
from indexer.atproto.commit import Commit, decode_commit
from indexer.atproto.crypto import PublicKey
from indexer.atproto.inversion import Inversion, invert
from indexer.atproto.limits import DEFAULT_LIMITS
from indexer.atproto.record import Value, decode_record
from indexer.db import Database
from indexer.net.relay.subscription import Subscription
from indexer.sync import changes, verify
from indexer.sync.batch import BatchPlan, ReceivedMessage, plan_batch
from indexer.sync.changes import Batch
from indexer.sync.events import CommitEvent, decode_frame
from indexer.sync.policy import KeyState, PlanContext, Policy
from indexer.sync.repo import Repo
from indexer.sync.scope import Scope
from indexer.sync.shard import Shard
from indexer.sync.stream import NO_STREAM, Cursor, Origin
from indexer.sync.verify import fold_operations

BATCH_SIZE = 500
VERIFICATION_STAGES = ("split", "commit", "signature", "inversion", "values")
_LIMITS = DEFAULT_LIMITS
_POLICY = Policy(Scope(), _LIMITS)


async def receive_seconds(url: str, count: int) -> float:
    """Return the CPU seconds to receive `count` messages from a websocket, as the daemon does."""

    async def from_beginning(_: str) -> int:
        return 0

    subscription = Subscription((url,), _LIMITS.frame_bytes, "benchmark")
    async with aclosing(subscription.frames(from_beginning)) as frames:
        await anext(frames)
        began = process_time()
        for _ in range(count - 1):
            await anext(frames)
        return process_time() - began


def decode_seconds(frames: Sequence[bytes]) -> float:
    """Return the CPU seconds to decode frames with the core of the daemon."""
    decode = core_of(load_from_environment(*DEMO_SETTINGS)).decoder(_LIMITS, Shard())
    began = process_time()
    for frame in frames:
        decode(frame)
    return process_time() - began


async def apply_in_stages(
    dsn: str, frames: Sequence[bytes], keys: Mapping[str, PublicKey], relay: str
) -> dict[str, float]:
    """Apply commits to the database batch by batch, and return the CPU seconds of each stage.

    "interleaving" is the additional cost of verification and planning when each commit goes through all stages before
    the next one, as in the daemon: the CPU caches then contain less of each stage.
    """
    gc.freeze()  # the workload is large; a garbage collection of it would distort the stage in which it happens
    async with connect_database(dsn) as (db, clock):
        path = LivePath(clock, keys, relay)
        for start in range(0, len(frames), BATCH_SIZE):
            part = frames[start : start + BATCH_SIZE]
            events = path.decode(part)
            repos = await path.load(db, events)
            path.plan_in_stages(events, part, repos)
            await path.write(db, path.plan_interleaved(events, part, repos))
    cpu = clock.cpu
    stages = {stage: cpu[stage] for stage in ("decode", *VERIFICATION_STAGES, "plan")}
    interleaving = cpu["interleaved"] - sum(cpu[stage] for stage in (*VERIFICATION_STAGES, "plan"))
    return stages | {"interleaving": interleaving, "client": cpu["client"], "database": cpu["database"]}


@asynccontextmanager
async def connect_database(dsn: str) -> AsyncIterator[tuple[Database, StageClock]]:
    """Connect a store, with a clock that measures its one connection."""
    db = await Database.open(dsn)
    try:
        backends = await cpu_usage.backend_pids(dsn)
        yield db, StageClock(lambda: cpu_usage.backend_seconds(backends))
    finally:
        await db.close()


class LivePath:
    """The live path, in which all commits of a batch go through one stage before the next stage begins.

    Attributes:
        clock: The measured time by stage.
    """

    def __init__(self, clock: StageClock, keys: Mapping[str, PublicKey], relay: str) -> None:
        self.clock = clock
        self._keys = {did: KeyState(key) for did, key in keys.items()}
        self._context = PlanContext(_POLICY, time(), Origin(relay))

    def decode(self, frames: Sequence[bytes]) -> list[CommitEvent]:
        """Decode the frames of commits."""
        with self.clock("decode"):
            events = [decode_frame(frame, _LIMITS) for frame in frames]
        return [event for event in events if isinstance(event, CommitEvent)]

    async def load(self, db: Database, events: Sequence[CommitEvent]) -> dict[str, Repo]:
        """Load the rows of the repos."""
        dids = list({event.did for event in events})
        with self.clock.database():
            return await db.repos.load(dids)

    def plan_in_stages(self, events: Sequence[CommitEvent], frames: Sequence[bytes], repos: Mapping[str, Repo]) -> None:
        """Verify the batch in stages, then plan it with these results and measure only the planning."""
        batch = _received(events, frames)
        with self._verify(events).substituted(), self.clock("plan"):
            plan_batch(batch, repos, lambda _did: _ACCEPTING, self._context)

    def plan_interleaved(
        self, events: Sequence[CommitEvent], frames: Sequence[bytes], repos: Mapping[str, Repo]
    ) -> BatchPlan:
        """Verify and plan the batch commit by commit, as the daemon does."""
        batch = _received(events, frames)
        with self.clock("interleaved"):
            return plan_batch(batch, repos, self._keys.get, self._context)

    async def write(self, db: Database, plan: BatchPlan) -> None:
        """Write the batch."""
        cursor = Cursor(self._context.origin.relay, "0/1", plan.settled[-1].received.seq or 0)
        with self.clock.database():
            await db.write(Batch(plan.writes, cursors=(cursor,)))

    def _verify(self, events: Sequence[CommitEvent]) -> "_VerificationResults":
        clock = self.clock
        with clock("split"):
            cars = [split_car(event.blocks, _LIMITS, max_bytes=_LIMITS.commit_blocks_bytes) for event in events]
        with clock("commit"):
            commits = [decode_commit(blocks[roots[0]], roots[0]) for roots, blocks in cars]
        with clock("signature"):
            for event, commit in zip(events, commits, strict=True):
                key = self._keys[event.did].key
                if key is None or not key.verify(commit.sig, commit.unsigned):
                    raise ValueError(f"the signature of commit {event.seq} is invalid")
        steps = [
            (blocks, commit.data, fold_operations(event.ops), event.prev_data or b"")
            for event, commit, (_, blocks) in zip(events, commits, cars, strict=True)
        ]
        with clock("inversion"):
            inversions = [invert(*step, _LIMITS) for step in steps]
        records = [
            (blocks[op.cid], op.path.partition("/")[0])
            for event, (_, blocks) in zip(events, cars, strict=True)
            for op in event.ops
            if op.cid is not None
        ]
        with clock("values"):
            values = [decode_record(block, collection, _LIMITS) for block, collection in records]
        return _VerificationResults(
            dict(zip((event.blocks for event in events), cars, strict=True)),
            {commit.cid: commit for commit in commits},
            dict(zip((commit.data for commit in commits), inversions, strict=True)),
            dict(zip((block for block, _ in records), values, strict=True)),
        )


def _received(events: Sequence[CommitEvent], frames: Sequence[bytes]) -> list[ReceivedMessage]:
    return [ReceivedMessage(NO_STREAM, event.seq, frame, event) for event, frame in zip(events, frames, strict=True)]


@dataclass(frozen=True, slots=True)
class _VerificationResults:
    """The results of the verification stages for one batch.

    Attributes:
        cars: The roots and blocks by slice.
        commits: The commits by CID.
        inversions: The inversions by the CID of the new tree's root.
        values: The record values by block.
    """

    cars: Mapping[bytes, tuple[list[bytes], dict[bytes, bytes]]]
    commits: Mapping[bytes, Commit]
    inversions: Mapping[bytes, Inversion]
    values: Mapping[bytes, Value]

    @contextmanager
    def substituted(self) -> Iterator[None]:
        """Inside the block, planning uses these results instead of computing them."""
        with ExitStack() as patches:
            for module, name, substitute in (
                (verify, "split_car", lambda data, *_, **__: self.cars[data]),
                (verify, "decode_commit", lambda _, cid: self.commits[cid]),
                (verify, "invert", lambda _, root, *__: self.inversions[root]),
                (changes, "decode_record", lambda block, *_: self.values[block]),
            ):
                patches.enter_context(patch.object(module, name, substitute))
            yield


class _AcceptingKey(PublicKey):
    """Accepts every signature. The signatures have been verified before."""

    def __init__(self) -> None:
        pass

    def verify(self, sig: bytes, message: bytes) -> bool:  # noqa: ARG002
        return True


_ACCEPTING = KeyState(_AcceptingKey())
