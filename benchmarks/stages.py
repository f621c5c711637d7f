"""The live path, one stage after the other in this process: what each costs a core when nothing runs beside it."""

import gc
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from time import process_time, time
from unittest.mock import patch

from benchmarks import usage
from benchmarks.clock import Clock
from indexer.atproto.car import split_car
from indexer.atproto.commit import Commit, decode_commit
from indexer.atproto.crypto import PublicKey
from indexer.atproto.limits import DEFAULT_LIMITS
from indexer.atproto.mst import Inversion, invert
from indexer.atproto.record import Value, decode_record
from indexer.atproto.syntax import CollectionFilter
from indexer.relay.subscription import Subscription
from indexer.store import Store
from indexer.sync import planning, verify
from indexer.sync.batch import BatchPlan, Received, plan_batch
from indexer.sync.events import CommitEvent
from indexer.sync.frames import decode_frame
from indexer.sync.ops import fold
from indexer.sync.plan import Batch, Cursor
from indexer.sync.planning import Ground, Policy, Signer
from indexer.sync.repo import Repo

BATCH = 500
PROOFS = ("split", "commit", "signature", "inversion", "values")
_LIMITS = DEFAULT_LIMITS
_POLICY = Policy(CollectionFilter(), _LIMITS)


async def receive(url: str, count: int) -> float:
    """Seconds of this process to take so many messages from a websocket, as the daemon does."""

    async def beginning(_: str) -> int:
        return 0

    subscription = Subscription((url,), _LIMITS.frame_bytes, "benchmark")
    async with aclosing(subscription.frames(beginning)) as frames:
        await anext(frames)
        began = process_time()
        for _ in range(count - 1):
            await anext(frames)
        return process_time() - began


async def apply(dsn: str, frames: Sequence[bytes], keys: Mapping[str, PublicKey], relay: str) -> dict[str, float]:
    """Brings the commits into the database, batch by batch; seconds by stage.

    "in turn" is what proofs and plans take more where each commit goes through all of them before the next one comes,
    as in the daemon: the processor's caches hold less of each then.
    """
    gc.freeze()  # the world is large, and a collection of it would fall on whatever stage it comes in
    async with opened(dsn) as (store, clock):
        path = LivePath(clock, keys, relay)
        for start in range(0, len(frames), BATCH):
            part = frames[start : start + BATCH]
            events = path.decode(part)
            repos = await path.load(store, events)
            path.plan_apart(events, part, repos)
            await path.write(store, path.plan_in_turn(events, part, repos))
    used = clock.used
    apart = {stage: used[stage] for stage in ("decode", *PROOFS, "plan")}
    in_turn = used["in turn"] - sum(used[stage] for stage in (*PROOFS, "plan"))
    return apart | {"in turn": in_turn, "client": used["client"], "database": used["database"]}


@asynccontextmanager
async def opened(dsn: str) -> AsyncIterator[tuple[Store, Clock]]:
    """A store that is connected, and the clock of its one connection."""
    store = await Store.open(dsn)
    try:
        backends = await usage.backends(dsn)
        yield store, Clock(lambda: usage.backend_seconds(backends))
    finally:
        await store.close()


class LivePath:
    """Commits on the live path: all of a batch through one stage, and then through the next."""

    def __init__(self, clock: Clock, keys: Mapping[str, PublicKey], relay: str) -> None:
        self.clock = clock
        self._signers = {did: Signer(key) for did, key in keys.items()}
        self._ground = Ground(_POLICY, relay, time())

    def decode(self, frames: Sequence[bytes]) -> list[CommitEvent]:
        with self.clock("decode"):
            events = [decode_frame(frame, _LIMITS) for frame in frames]
        return [event for event in events if isinstance(event, CommitEvent)]

    async def load(self, store: Store, events: Sequence[CommitEvent]) -> dict[str, Repo]:
        dids = list({event.did for event in events})
        with self.clock.database():
            return await store.repos(dids)

    def plan_apart(self, events: Sequence[CommitEvent], frames: Sequence[bytes], repos: Mapping[str, Repo]) -> None:
        """The proofs, and then, with all of them at hand, what is planning's own."""
        batch = _received(events, frames)
        with self._prove(events).at_hand(), self.clock("plan"):
            plan_batch(batch, repos, lambda _did: _TRUSTED, self._ground)

    def plan_in_turn(
        self, events: Sequence[CommitEvent], frames: Sequence[bytes], repos: Mapping[str, Repo]
    ) -> BatchPlan:
        batch = _received(events, frames)
        with self.clock("in turn"):
            return plan_batch(batch, repos, self._signers.get, self._ground)

    async def write(self, store: Store, plan: BatchPlan) -> None:
        cursor = Cursor(self._ground.relay, "0/1", plan.settled[-1].received.seq or 0)
        with self.clock.database():
            await store.apply(Batch(plan.writes, cursor=cursor))

    def _prove(self, events: Sequence[CommitEvent]) -> "_Proofs":
        clock = self.clock
        with clock("split"):
            cars = [split_car(event.blocks, _LIMITS, max_bytes=_LIMITS.commit_blocks_bytes) for event in events]
        with clock("commit"):
            commits = [decode_commit(blocks[roots[0]], roots[0]) for roots, blocks in cars]
        with clock("signature"):
            for event, commit in zip(events, commits, strict=True):
                key = self._signers[event.did].key
                if key is None or not key.verify(commit.sig, commit.unsigned):
                    raise ValueError(f"commit {event.seq} isn't signed by its key")
        steps = [
            (blocks, commit.data, fold(event.ops), event.prev_data or b"")
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
        return _Proofs(
            dict(zip((event.blocks for event in events), cars, strict=True)),
            {commit.cid: commit for commit in commits},
            dict(zip((commit.data for commit in commits), inversions, strict=True)),
            dict(zip((block for block, _ in records), values, strict=True)),
        )


def _received(events: Sequence[CommitEvent], frames: Sequence[bytes]) -> list[Received]:
    return [Received(event.seq, frame, event) for event, frame in zip(events, frames, strict=True)]


@dataclass(frozen=True, slots=True)
class _Proofs:
    """What came of a batch's proofs: by slice, by the commit's CID, by the tree's root, and by the record's block."""

    cars: Mapping[bytes, tuple[list[bytes], dict[bytes, bytes]]]
    commits: Mapping[bytes, Commit]
    inversions: Mapping[bytes, Inversion]
    values: Mapping[bytes, Value]

    @contextmanager
    def at_hand(self) -> Iterator[None]:
        """Within the block, planning takes them from here."""
        with (
            patch.object(verify, "split_car", lambda data, *_, **__: self.cars[data]),
            patch.object(verify, "decode_commit", lambda _, cid: self.commits[cid]),
            patch.object(verify, "invert", lambda _, root, *__: self.inversions[root]),
            patch.object(planning, "decode_record", lambda block, *_: self.values[block]),
        ):
            yield


class _TrustedKey(PublicKey):
    """Stands in where signatures have been verified before."""

    def __init__(self) -> None:
        pass

    def verify(self, sig: bytes, message: bytes) -> bool:  # noqa: ARG002
        return True


_TRUSTED = Signer(_TrustedKey())
