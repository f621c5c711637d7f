import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from indexer.atproto.limits import DEFAULT_LIMITS
from indexer.localnet.relay import message_frame
from indexer.metrics import Metrics
from indexer.service.inbox import Inbox
from indexer.service.reader import Place, Reader
from indexer.sync.events import MalformedEvent
from indexer.sync.shard import Shard, bucket_of
from tests.serving import until


def did(shard: Shard) -> str:
    return next(name for n in range(1_000) if shard.owns(name := f"did:plc:{n:024}"))


OURS, OTHERS = did(Shard(0, 2)), did(Shard(1, 2))


def identity(seq: int, did: str) -> bytes:
    return message_frame("#identity", {"seq": seq, "did": did, "time": "2026-01-01T00:00:00Z"})


class Stream:
    """A subscription that says this, and is silent then."""

    def __init__(self, frames: Sequence[bytes]) -> None:
        self._frames = frames
        self.skipped = 0

    async def frames(self, cursor_of: Any) -> AsyncIterator[bytes]:
        await cursor_of("wss://relay.test")
        for frame in self._frames:
            yield frame
        await asyncio.get_running_loop().create_future()


class Saved:
    async def cursor(self, _relay: str, _shard: str) -> int | None:
        return None


class Reading:
    def __init__(self, *frames: bytes, shard: Shard) -> None:
        self.inbox = Inbox(1_000_000)
        self.place = Place(lambda: True)
        self.metrics = Metrics()
        store: Any = Saved()
        stream: Any = Stream(frames)
        self.reader = Reader(store, stream, self.inbox, self.place, shard, "live", DEFAULT_LIMITS, self.metrics)

    def count(self, outcome: str) -> float | None:
        return self.metrics.registry.get_sample_value("indexer_events_total", {"kind": "identity", "outcome": outcome})

    async def __aenter__(self) -> "Reading":  # noqa: PYI034 - nothing derives from it
        self.task = asyncio.create_task(self.reader.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


async def test_messages_of_others_move_our_place_and_nothing_else() -> None:
    frames = [identity(seq, OTHERS) for seq in range(1, 6)]
    async with Reading(*frames, frames[-1], shard=Shard(0, 2)) as reading:
        await until(lambda: reading.count("replayed") == 1)
        assert (reading.place.watermark.position, reading.inbox.held, reading.count("ignored")) == (5, 0, 5)


@pytest.mark.parametrize(
    ("frame", "refuses"),
    [
        (b"", Shard(0, 2)),
        (message_frame("#commit", {"seq": 6}), Shard(0, 2)),
        (identity(3, OURS), Shard(0, 2)),
        (identity(3, OTHERS), Shard(1, 2)),
    ],
    ids=["no frame", "no DID", "behind, ours", "behind, theirs"],
)
async def test_what_is_refused_is_refused_by_one_shard(frame: bytes, refuses: Shard) -> None:
    for shard in (Shard(0, 2), Shard(1, 2)):
        own = OURS if shard.index == 0 else OTHERS
        async with Reading(identity(5, own), frame, identity(7, own), shard=shard) as reading:
            await until(lambda reading=reading: reading.inbox.held >= 2)  # type: ignore[misc]
            refused = [one.event for one in await reading.inbox.take(9, 0) if isinstance(one.event, MalformedEvent)]
            assert len(refused) == (shard == refuses), (shard, refused)


async def test_one_of_ours_that_waits_does_not_let_those_of_others_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("indexer.service.reader.MOST_OPEN", 10)
    frames = [identity(seq, OTHERS) for seq in range(2, 50)]
    async with Reading(identity(1, OURS), *frames, shard=Shard(0, 2)) as reading:
        taken = await reading.inbox.take(1, 0)
        await until(lambda: len(reading.place.watermark) > 10)
        assert reading.place.watermark.position is None
        assert reading.count("ignored") == 10
        reading.place.watermark.done((1,))
        reading.inbox.finished(taken)
        await until(lambda: reading.place.watermark.position == 49)


async def test_a_number_behind_the_newest_is_refused() -> None:
    async with Reading(identity(5, OURS), identity(3, OURS), identity(6, OURS), shard=Shard()) as reading:
        await until(lambda: reading.inbox.held == 3)
        [_, refused, _] = await reading.inbox.take(3, 0)
        assert (refused.seq, refused.event.kind, refused.did) == (None, "malformed", OURS)
        assert reading.reader.trouble is None, "the next one was in its place again"


def test_the_two_are_not_of_one_shard() -> None:
    assert bucket_of(OURS) < 128 <= bucket_of(OTHERS)
