"""The live path, one stage after the other in this process: what each costs a core when nothing runs beside it."""

import asyncio
import gc
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from time import perf_counter, process_time, time

from benchmarks.stand import Load
from indexer.atproto.car import split_car
from indexer.atproto.commit import decode_commit
from indexer.atproto.crypto import PublicKey
from indexer.atproto.limits import DEFAULT_LIMITS
from indexer.atproto.mst import invert
from indexer.atproto.record import decode_record
from indexer.atproto.syntax import CollectionFilter
from indexer.relay.subscription import Subscription
from indexer.store import Store
from indexer.sync.batch import Received, plan_batch
from indexer.sync.events import CommitEvent
from indexer.sync.frames import decode_frame
from indexer.sync.ops import fold
from indexer.sync.plan import Batch, Cursor
from indexer.sync.planning import Ground, Policy, Signer

BATCH = 500
_POLICY = Policy(CollectionFilter(), DEFAULT_LIMITS)


class Clock:
    """Seconds by stage: of this process's time, and by the clock."""

    def __init__(self) -> None:
        self.used: dict[str, float] = defaultdict(float)
        self.passed: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        began, used = perf_counter(), process_time()
        yield
        self.passed[stage] += perf_counter() - began
        self.used[stage] += process_time() - used


async def receive(load: Load, seqs: range) -> float:
    """Seconds of this process to take these messages from a websocket, as the daemon does."""

    async def beginning(_: str) -> int:
        return 0

    async def take() -> float:
        subscription = Subscription((load.url,), DEFAULT_LIMITS.frame_bytes, "benchmark")
        async with aclosing(subscription.frames(beginning)) as frames:
            await anext(frames)
            began = process_time()
            for _ in seqs[1:]:
                await anext(frames)
            return process_time() - began

    taking = asyncio.create_task(take())
    await load.subscribed(1)
    await load.tell(seqs[0], seqs[-1], 0)
    return await taking


async def apply(dsn: str, frames: Sequence[bytes], keys: Mapping[str, PublicKey], relay: str) -> dict[str, float]:
    """Brings the commits into the database, batch by batch; seconds by stage.

    "client" is this process's time in the two database stages, "database" the rest of their time by the clock.
    """
    clock = Clock()
    gc.freeze()  # the world is large, and a collection of it would fall on whatever stage it comes in
    store = await Store.open(dsn)
    await store.repos(list(keys)[:1])  # connects
    signers = {did: Signer(key) for did, key in keys.items()}
    for start in range(0, len(frames), BATCH):
        await _apply(store, clock, frames[start : start + BATCH], signers, relay)
    await store.close()
    used, passed = clock.used, clock.passed
    proofs = ("split", "commit", "signature", "inversion", "values")
    return {
        "decode": used["decode"],
        **{stage: used[stage] for stage in proofs},
        "plan": used["plan"] - sum(used[stage] for stage in proofs),
        "client": used["load"] + used["apply"],
        "database": passed["load"] + passed["apply"] - used["load"] - used["apply"],
    }


async def _apply(
    store: Store, clock: Clock, frames: Sequence[bytes], signers: Mapping[str, Signer], relay: str
) -> None:
    with clock("decode"):
        events = [decode_frame(frame, DEFAULT_LIMITS) for frame in frames]
    commits = [event for event in events if isinstance(event, CommitEvent)]
    _prove(clock, commits, signers)
    batch = [Received(event.seq, frame, event) for frame, event in zip(frames, commits, strict=True)]
    with clock("load"):
        repos = await store.repos(list({event.did for event in commits}))
    with clock("plan"):
        plan = plan_batch(batch, repos, signers.get, Ground(_POLICY, relay, time()))
    with clock("apply"):
        await store.apply(Batch(plan.writes, cursor=Cursor(relay, "0/1", commits[-1].seq)))


def _prove(clock: Clock, events: Sequence[CommitEvent], signers: Mapping[str, Signer]) -> None:
    """What planning does within, apart: it is done again there."""
    limits = DEFAULT_LIMITS
    with clock("split"):
        cars = [split_car(event.blocks, limits, max_bytes=limits.commit_blocks_bytes) for event in events]
    with clock("commit"):
        commits = [decode_commit(blocks[roots[0]], roots[0]) for roots, blocks in cars]
    with clock("signature"):
        for event, commit in zip(events, commits, strict=True):
            key = signers[event.did].key
            if key is None or not key.verify(commit.sig, commit.unsigned):
                raise ValueError(f"commit {event.seq} isn't signed by its key")
    with clock("inversion"):
        for event, commit, (_, blocks) in zip(events, commits, cars, strict=True):
            invert(blocks, commit.data, fold(event.ops), event.prev_data or b"", limits)
    with clock("values"):
        for event, (_, blocks) in zip(events, cars, strict=True):
            for op in event.ops:
                if op.cid is not None:
                    decode_record(blocks[op.cid], op.path.partition("/")[0], limits)
