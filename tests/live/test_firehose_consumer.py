import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any, Literal, Self, cast

import pytest

from indexer.atproto.limits import DEFAULT_LIMITS
from indexer.core.core import PYTHON_CORE, Core
from indexer.db.gaps import OpenGaps
from indexer.demo.local_relay import message_frame
from indexer.live.firehose_consumer import PROOF_TIMEOUT, FirehoseConsumer, StreamContinuity
from indexer.live.inbox import Inbox
from indexer.live.stream_position import StreamPosition
from indexer.net.relay.subscription import Connection, Subscription
from indexer.reasons import GapReason
from indexer.sync.events import MAX_SEQ, IdentityEvent, MalformedEvent
from indexer.sync.shard import Shard
from indexer.sync.stream import MAX_STEP, Cursor, Gap, OpenGap
from indexer.telemetry.metrics import Metrics
from tests.faulty_network import error_frame
from tests.native_module import CountingCore
from tests.sync.signing_account import SigningAccount, encoded_frame
from tests.waiting import until


def did_of(shard: Shard) -> str:
    return next(name for n in range(1_000) if shard.owns(name := f"did:plc:{n:024}"))


OWN_DID, OTHER_DID = did_of(Shard(0, 2)), did_of(Shard(1, 2))
RELAY = "wss://relay.test"
AT_FIVE = Cursor(RELAY, "0/1", 5, "2026-01-01T00:00:00Z")


def identity(seq: int, did: str) -> bytes:
    return message_frame("#identity", {"seq": seq, "did": did, "time": "2026-01-01T00:00:00Z"})


class FakeSubscription:
    """Delivers the given frames; after a reconnection those of the next connection; and then nothing more."""

    def __init__(self, frames: Sequence[bytes], next_frames: Sequence[bytes]) -> None:
        self._connections = [frames, next_frames]
        self.oversized = set[str]()
        self.connection: Connection | None = None
        self.reconnections = 0
        self.cursors: list[int | None] = []

    def reconnect(self) -> None:
        self.reconnections += 1

    async def frames(self, cursor_of: Any) -> AsyncIterator[bytes]:
        for number, frames in enumerate(self._connections[:2]):
            if number <= self.reconnections:
                self.cursors.append(await cursor_of("wss://relay.test"))
                for frame in frames:
                    yield frame
        await asyncio.get_running_loop().create_future()


class FakeStore:
    """Has the given cursors, no synchronized repo, and stores gaps."""

    def __init__(self, cursors: Sequence[Cursor]) -> None:
        self._cursors = cursors
        self.gaps = self
        self.opened: list[OpenGap] = []
        self.last_seqs: dict[int, int] = {}

    async def cursors(self) -> Sequence[Cursor]:
        return self._cursors

    async def has_synchronized_repo(self, _buckets: range) -> bool:
        return False

    async def open(self, gap: Gap) -> OpenGap:
        self.opened.append(OpenGap(len(self.opened) + 1, gap, 0.0))
        return self.opened[-1]

    async def load_open(self) -> Sequence[OpenGap]:
        return list(self.opened)

    async def set_last_seq(self, gap_id: int, last_seq: int) -> None:
        self.last_seqs[gap_id] = last_seq


class RunningConsumer:
    """A consumer that reads the given frames."""

    def __init__(
        self,
        *frames: bytes,
        shard: Shard,
        cursors: Sequence[Cursor] = (),
        core: Core = PYTHON_CORE,
        proof_timeout: float = PROOF_TIMEOUT,
        next_frames: Sequence[bytes] = (),
        start: Literal["live", "oldest"] = "live",
    ) -> None:
        self.inbox = Inbox(1_000_000)
        self.position = StreamPosition(lambda: True)
        self.metrics = Metrics()
        self.db = FakeStore(cursors)
        db: Any = self.db
        self.subscription = FakeSubscription(frames, next_frames)
        subscription = cast("Subscription", self.subscription)
        self.gaps = OpenGaps(db.gaps, shard, self.metrics)
        self.continuity = StreamContinuity(
            db,
            self.gaps,
            subscription,
            shard,
            start,
            proof_timeout=proof_timeout,
        )
        self.consumer = FirehoseConsumer(
            subscription,
            self.continuity,
            self.inbox,
            self.position,
            shard,
            core.decoder(DEFAULT_LIMITS, shard),
            self.metrics,
        )

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


async def test_native_core_decodes_commits() -> None:
    account, core = SigningAccount(), CountingCore()
    frames = [encoded_frame("commit", account.first_commit()), encoded_frame("identity", account.identity_event())]
    async with RunningConsumer(*frames, shard=Shard(), core=core) as running:
        await until(lambda: running.inbox.unsettled == 2)
        assert [message.event.kind for message in await running.inbox.take(9)] == ["commit", "identity"]
    assert (core.frames, core.decoded) == (2, 1)


GAP = Gap(RELAY, "0/1", GapReason.CURSOR_OUTDATED, first_seq=6, last_seq=8)
OUTDATED = message_frame("#info", {"name": "OutdatedCursor", "message": ""})


@pytest.mark.parametrize(("seqs", "gaps"), [([4, 5, 6], []), ([9], [GAP])], ids=["replayed", "missing"])
async def test_gap_is_stored_before_the_first_message_after_it(seqs: list[int], gaps: list[Gap]) -> None:
    consumer = RunningConsumer(*[identity(seq, OWN_DID) for seq in seqs], shard=Shard(), cursors=[AT_FIVE])
    async with consumer:
        await until(lambda: consumer.inbox.unsettled == 1)
        assert [message.seq for message in await consumer.inbox.take(9)] == [seqs[-1]]
        assert (consumer.count("replayed") or 0) == len(seqs) - 1
        assert [opened.gap for opened in consumer.db.opened] == gaps


@pytest.mark.parametrize(("frames", "expected"), [([4], False), ([4, 5], True), ([9], True)])
async def test_the_stream_reaches_the_present_only_when_the_stored_cursor_is_proven_or_a_gap_is_open(
    frames: list[int], expected: bool
) -> None:
    consumer = RunningConsumer(*[identity(seq, OWN_DID) for seq in frames], shard=Shard(), cursors=[AT_FIVE])
    async with consumer as running:
        await until(lambda: running.inbox.unsettled + (running.count("replayed") or 0) == len(frames))
        assert not running.continuity.is_known, "not connected"
        running.subscription.connection = Connection(RELAY)
        assert running.continuity.is_known is expected


async def test_a_silent_relay_is_known_when_the_gap_is_open() -> None:
    async with RunningConsumer(shard=Shard(), cursors=[AT_FIVE], proof_timeout=0.0) as running:
        await until(lambda: running.position.origin.relay != "")
        running.subscription.connection = Connection(RELAY)
        assert not running.continuity.is_known
        await running.continuity.check_silence()
        assert [opened.gap.reason for opened in running.db.opened] == [GapReason.CURSOR_UNPROVEN]
        assert running.continuity.is_known


async def test_a_gap_after_the_highest_number_can_be_stored() -> None:
    """Postgres has no number above it. An error would end the daemon again and again."""
    cursor = replace(AT_FIVE, seq=MAX_SEQ)
    for frames, cursors in (([OUTDATED], [MAX_SEQ - 1, MAX_SEQ]), ([], [MAX_SEQ - 1])):
        consumer = RunningConsumer(*frames, shard=Shard(), cursors=[cursor], proof_timeout=0.0, next_frames=frames)
        async with consumer:
            await until(lambda: consumer.subscription.cursors == cursors)  # noqa: B023 - ends before the next round
            consumer.subscription.connection = Connection(RELAY)
            await consumer.continuity.check_silence()
            assert [opened.gap.first_seq for opened in consumer.db.opened] == [None]


async def test_a_gap_of_the_former_owner_of_the_shard_is_known_before_the_first_message() -> None:
    consumer = RunningConsumer(identity(5, OWN_DID), shard=Shard(), cursors=[AT_FIVE])
    await consumer.gaps.refresh()
    opened = await consumer.db.gaps.open(Gap(RELAY, "0/1", GapReason.CURSOR_OUTDATED))
    async with consumer:
        await until(lambda: consumer.count("replayed") == 1)
        assert consumer.gaps.gaps == [opened]


@pytest.mark.parametrize(
    ("next_frames", "gaps", "last_seqs"),
    [
        ([OUTDATED, identity(9, OWN_DID)], [6], {1: 8}),
        ([identity(9, OWN_DID)], [], {}),
    ],
    ids=["the next one is lost, too", "numbers are unused"],
)
async def test_outdated_cursor_opens_a_gap_only_if_more_than_the_stored_message_is_lost(
    next_frames: list[bytes], gaps: list[int], last_seqs: dict[int, int]
) -> None:
    """The relay has forgotten message 5, which is stored. It is asked again, for the messages after it."""
    frames = [OUTDATED, identity(9, OWN_DID)]
    async with RunningConsumer(*frames, shard=Shard(), cursors=[AT_FIVE], next_frames=next_frames) as running:
        await until(lambda: running.inbox.unsettled == 1)
        assert [message.seq for message in await running.inbox.take(9)] == [9]
        assert running.subscription.cursors == [4, 5]
        assert [opened.gap.first_seq for opened in running.db.opened] == gaps
        assert running.db.last_seqs == last_seqs


async def test_host_on_which_nothing_happened_for_a_day_opens_no_gap() -> None:
    """It calls the message at the cursor outdated, and sends nothing after it."""
    async with RunningConsumer(OUTDATED, shard=Shard(), cursors=[AT_FIVE], proof_timeout=0.0) as running:
        await until(lambda: running.subscription.cursors == [4, 5])
        running.subscription.connection = Connection(RELAY)
        before = running.continuity.is_known
        await running.continuity.check_silence()
        assert (before, running.continuity.is_known) == (False, True)
        assert await running.consumer.begin_connection(RELAY) == 4, "another sequence would have another message there"
        assert running.db.opened == []


async def test_outdated_cursor_of_a_stream_that_is_read_from_its_oldest_message_opens_no_gap() -> None:
    async with RunningConsumer(OUTDATED, identity(9, OWN_DID), shard=Shard(), start="oldest") as running:
        await until(lambda: running.inbox.unsettled == 1)
        assert (running.subscription.cursors, running.db.opened) == ([0], [])


@pytest.mark.parametrize(
    ("frame", "expected"),
    [
        (error_frame("FutureCursor", "Cursor in the future."), 1),
        (identity(3, OWN_DID), 2),
        (identity(5, OWN_DID).replace(b"2026-01-01", b"2026-01-02"), 2),
    ],
    ids=["FutureCursor", "lower seq", "other message at the cursor"],
)
async def test_another_sequence_is_entered_anew(frame: bytes, expected: int) -> None:
    """The messages of this connection change nothing."""
    frames, later = [frame, identity(6, OWN_DID)], [identity(2, OWN_DID), identity(3, OWN_DID)]
    async with RunningConsumer(*frames, shard=Shard(), cursors=[AT_FIVE], next_frames=later) as running:
        await until(lambda: running.inbox.unsettled == 2)
        assert (running.count("replayed"), running.subscription.reconnections) == (expected, 1)
        assert (running.subscription.cursors, running.position.origin.epoch) == ([4, None], 1)
        assert [opened.gap.reason for opened in running.db.opened] == [GapReason.SEQUENCE_RESTARTED]


async def test_gap_before_a_stream_without_a_cursor_is_opened_when_the_relay_is_silent_or_sends_a_message() -> None:
    """No attempt to connect opens one."""
    other = replace(AT_FIVE, relay="wss://other.test")
    for frames, silent in (([], True), ([identity(9, OWN_DID)], False)):
        async with RunningConsumer(*frames, shard=Shard(), cursors=[other], proof_timeout=0.0) as running:
            await until(lambda: running.subscription.cursors == [None])
            await running.continuity.check_silence()
            assert running.db.opened == [] or not silent
            running.subscription.connection = Connection(RELAY)
            await running.continuity.check_silence()
            await until(lambda: running.inbox.unsettled == len(frames))  # noqa: B023
            assert [opened.gap.reason for opened in running.db.opened] == [GapReason.NO_CURSOR]
            assert running.continuity.is_known


@pytest.mark.parametrize(
    "odd",
    [
        message_frame("#later", {"seq": MAX_SEQ}),
        message_frame("#commit", {"seq": MAX_SEQ, "repo": OWN_DID}),
        message_frame("#commit", {"seq": 1, "repo": OWN_DID}),
        identity(MAX_SEQ, OWN_DID),
        identity(MAX_SEQ, OTHER_DID),
    ],
    ids=["unknown type", "malformed", "malformed, low number", "valid", "valid, of another shard"],
)
async def test_odd_sequence_number_refuses_no_later_message(odd: bytes) -> None:
    frames = [identity(5, OWN_DID), identity(6, OWN_DID), odd, identity(7, OWN_DID), identity(8, OWN_DID)]
    async with RunningConsumer(*frames, shard=Shard(0, 2), cursors=[replace(AT_FIVE, shard="0/2")]) as running:
        await until(lambda: running.position.watermark.position_if_done([6, 7, 8]).seq == 8)
        events = [message.event for message in await running.inbox.take(9)]
        valid = [event.seq for event in events if isinstance(event, IdentityEvent) and event.seq != MAX_SEQ]
        assert (valid, running.consumer.last_error, running.db.opened) == ([6, 7, 8], None, [])


async def test_odd_sequence_number_at_the_start_of_a_connection_proves_nothing() -> None:
    """It neither begins a new epoch nor opens a gap."""
    odd = [message_frame("#later", {"seq": seq}) for seq in (1, MAX_SEQ)]
    frames = [*odd, identity(5, OWN_DID), identity(6, OWN_DID)]
    async with RunningConsumer(*frames, shard=Shard(0, 2), cursors=[replace(AT_FIVE, shard="0/2")]) as running:
        await until(lambda: running.inbox.unsettled > 0)
        assert (running.db.opened, running.subscription.reconnections) == ([], 0)
        assert running.position.watermark.position_if_done([6]).seq == 6


async def test_leap_that_the_next_message_confirms_moves_the_cursor_once_it_is_settled() -> None:
    leap = 6 + 2 * MAX_STEP
    frames = [identity(6, OWN_DID), identity(leap, OWN_DID), identity(leap + 1, OTHER_DID)]
    async with RunningConsumer(*frames, shard=Shard(0, 2)) as running:
        taken = await running.inbox.take(2)
        if len(taken) < 2:
            taken += await running.inbox.take(1)
        assert running.position.watermark.position is None
        running.position.watermark.mark_done([6])
        running.inbox.settle(taken)
        await until(lambda: running.position.watermark.position == leap + 1)
