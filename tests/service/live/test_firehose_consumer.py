import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any, Self

import pytest

from indexer.atproto.limits import DEFAULT_LIMITS
from indexer.localnet.local_relay import message_frame
from indexer.monitoring.metrics import Metrics
from indexer.service.live.firehose_consumer import ConsumerSettings, FirehoseConsumer
from indexer.service.live.inbox import Inbox
from indexer.service.live.stream_position import StreamPosition
from indexer.sync.events import MalformedEvent
from indexer.sync.shard import Shard, bucket_of
from tests.waiting import until


def did_of(shard: Shard) -> str:
    return next(name for n in range(1_000) if shard.owns(name := f"did:plc:{n:024}"))


OWN_DID, OTHER_DID = did_of(Shard(0, 2)), did_of(Shard(1, 2))


def identity(seq: int, did: str) -> bytes:
    return message_frame("#identity", {"seq": seq, "did": did, "time": "2026-01-01T00:00:00Z"})


class FakeSubscription:
    """Delivers the given frames, and then nothing more."""

    def __init__(self, frames: Sequence[bytes]) -> None:
        self._frames = frames
        self.skipped = 0

    async def frames(self, cursor_of: Any) -> AsyncIterator[bytes]:
        await cursor_of("wss://relay.test")
        for frame in self._frames:
            yield frame
        await asyncio.get_running_loop().create_future()


class FakeStore:
    """Has no stored cursor."""

    async def cursor(self, _relay: str, _shard: str) -> int | None:
        return None


class RunningConsumer:
    """A consumer that reads the given frames."""

    def __init__(self, *frames: bytes, shard: Shard, max_pending: int = 1_000) -> None:
        self.inbox = Inbox(1_000_000)
        self.position = StreamPosition(lambda: True)
        self.metrics = Metrics()
        store: Any = FakeStore()
        subscription: Any = FakeSubscription(frames)
        settings = ConsumerSettings(shard, DEFAULT_LIMITS, max_pending=max_pending)
        self.consumer = FirehoseConsumer(store, subscription, self.inbox, self.position, settings, self.metrics)

    def count(self, outcome: str) -> float | None:
        return self.metrics.registry.get_sample_value("indexer_events_total", {"kind": "identity", "outcome": outcome})

    async def __aenter__(self) -> Self:
        self.task = asyncio.create_task(self.consumer.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


async def test_messages_of_other_shards_only_advance_the_position() -> None:
    frames = [identity(seq, OTHER_DID) for seq in range(1, 6)]
    async with RunningConsumer(*frames, frames[-1], shard=Shard(0, 2)) as running:
        await until(lambda: running.count("replayed") == 1)
        assert (running.position.watermark.position, running.inbox.unsettled, running.count("ignored")) == (5, 0, 5)


@pytest.mark.parametrize(
    ("frame", "recording_shard"),
    [
        (b"", Shard(0, 2)),
        (message_frame("#commit", {"seq": 6}), Shard(0, 2)),
        (identity(3, OWN_DID), Shard(0, 2)),
        (identity(3, OTHER_DID), Shard(1, 2)),
    ],
    ids=["no frame", "no DID", "lower seq, own DID", "lower seq, other DID"],
)
async def test_rejection_is_recorded_by_one_shard(frame: bytes, recording_shard: Shard) -> None:
    for shard in (Shard(0, 2), Shard(1, 2)):
        own = OWN_DID if shard.index == 0 else OTHER_DID
        async with RunningConsumer(identity(5, own), frame, identity(7, own), shard=shard) as running:
            await until(lambda running=running: running.inbox.unsettled >= 2)  # type: ignore[misc]
            rejected = [
                message.event for message in await running.inbox.take(9) if isinstance(message.event, MalformedEvent)
            ]
            assert len(rejected) == (shard == recording_shard), (shard, rejected)


async def test_pending_sequence_numbers_behind_an_unsettled_message_are_bounded() -> None:
    frames = [identity(seq, OTHER_DID) for seq in range(2, 50)]
    async with RunningConsumer(identity(1, OWN_DID), *frames, shard=Shard(0, 2), max_pending=10) as running:
        taken = await running.inbox.take(1)
        await until(lambda: len(running.position.watermark) > 10)
        assert running.position.watermark.position is None
        assert running.count("ignored") == 10
        running.position.watermark.mark_done((1,))
        running.inbox.settle(taken)
        await until(lambda: running.position.watermark.position == 49)


async def test_lower_sequence_number_is_rejected() -> None:
    async with RunningConsumer(
        identity(5, OWN_DID), identity(3, OWN_DID), identity(6, OWN_DID), shard=Shard()
    ) as running:
        await until(lambda: running.inbox.unsettled == 3)
        [_, rejected, _] = await running.inbox.take(3)
        assert (rejected.seq, rejected.event.kind, rejected.did) == (None, "malformed", OWN_DID)
        assert running.consumer.last_error is None, "the next message was in order"


def test_the_two_dids_belong_to_different_shards() -> None:
    assert bucket_of(OWN_DID) < 128 <= bucket_of(OTHER_DID)
