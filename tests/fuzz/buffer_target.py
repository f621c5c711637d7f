"""Resync buffers: events that were buffered during a resync have the effects that they would have had live.

An input is a row of frames of one account, each after four bytes with its size. The export is the state before the
first commit in it, or after it.
"""

from contextlib import suppress
from random import Random
from typing import NamedTuple

from indexer.atproto.limits import DEFAULT_LIMITS
from indexer.atproto.mst import EMPTY_TREE
from indexer.demo.local_repo import Write
from indexer.errors import UpstreamError
from indexer.sync.batch import BatchPlan, ReceivedMessage, plan_batch
from indexer.sync.changes import RecordChange
from indexer.sync.events import CommitEvent, SyncEvent, decode_frame
from indexer.sync.repo import Head, Repo, SyncStatus
from indexer.sync.resync import Completion
from indexer.sync.verify import verify_commit
from tests.fuzz.comparison import OLDEST_REV, DifferenceError
from tests.fuzz.fuzz_target import FuzzTarget, MutateBytes
from tests.fuzz.mutation import mutate_frame
from tests.fuzz.outcome_counts import OutcomeCounts
from tests.fuzz.seed_files import published_commits, some_of
from tests.fuzz.seeds import accounts, random_path, random_record, replace_records
from tests.sync.signing_account import CONTEXT, SigningAccount, encoded_frame

SIZE_BYTES = 4
MAX_FRAMES = 8


class Buffers(FuzzTarget):
    """Rows of frames of one account: planned live, and buffered and drained at the end of a resync."""

    def __init__(self) -> None:
        self._owners = accounts()
        self._owner_of = {owner.did: owner for owner in self._owners}
        self.counts = OutcomeCounts("buffered", "drained to the end", "broken off")

    def seeds(self, random: Random, count: int) -> list[bytes]:
        """Return published commits, a fifth if there are so many, and histories of up to five new ones."""
        made = some_of([join([frame]) for frame in published_commits(self._owners)], random, count // 5)
        return made + [join(history(random.choice(self._owners), random)) for _ in range(count - len(made))]

    def mutate(self, data: bytes, random: Random, mutate_bytes: MutateBytes) -> bytes:
        """Drop, repeat, exchange or mutate a frame."""
        frames = split_frames(data)
        if not frames or random.random() < 0.05:
            return mutate_bytes(data)
        index = random.randrange(len(frames))
        match random.randrange(5):
            case 0:
                del frames[index]
            case 1:
                frames.insert(random.randrange(len(frames) + 1), frames[index])
            case 2:
                frames.append(frames.pop(index))
            case _:
                frames[index] = mutate_frame(frames[index], random, mutate_bytes, self._owners)
        return join(frames[:MAX_FRAMES])

    def compare(self, data: bytes) -> None:
        """Plan the frames both ways. Raises `DifferenceError`."""
        self.counts.executions += 1
        messages = _messages(split_frames(data))
        commits = [received.event for received in messages if isinstance(received.event, CommitEvent)]
        owner = self._owner_of.get(commits[0].did) if commits else None
        if owner is None:
            return
        messages = [received for received in messages if received.did == owner.did]
        head = _head_of_export(commits[0], owner, after=len(data) % 3 == 0)
        synchronized = Repo(owner.did, 1, SyncStatus.SYNCHRONIZED, None, head)
        claimed = Repo(owner.did, 1, SyncStatus.IN_PROGRESS, None)
        live, buffered = _plan(messages, synchronized, owner), _plan(messages, claimed, owner)
        expected = _result(synchronized, live)
        found = _drained(claimed, buffered, head, owner)
        if found != expected:
            raise DifferenceError(f"live: {expected}\nbuffered: {found}")
        self.counts.add("buffered", sum([len(write.buffered) for write in buffered.writes]))
        self.counts.add("drained to the end" if found.status is SyncStatus.SYNCHRONIZED else "broken off")


class Result(NamedTuple):
    """The state of the repo after its events, and the changes of its records."""

    status: SyncStatus
    head: Head | None
    changes: list[RecordChange]


def _result(before: Repo, plan: BatchPlan) -> Result:
    [after, changes] = next(((write.repo, write.changes) for write in plan.writes), (before, ()))
    return Result(after.sync_status, after.head, list(changes))


def _drained(claimed: Repo, plan: BatchPlan, head: Head, owner: SigningAccount) -> Result:
    """Return the end of a resync with this head. Half of the buffered events arrive before the row is locked."""
    [locked, buffered] = next(((write.repo, write.buffered) for write in plan.writes), (claimed, ()))
    completion, changes = Completion(claimed, head, owner.key_state, CONTEXT), list[RecordChange]()
    middle = len(buffered) // 2
    completion.add(buffered[:middle])
    for last in (False, True):
        more = True
        while more:
            more = completion.plan_slice()
            changes += completion.changes
        if not last:
            completion.lock(locked)
            completion.add(buffered[middle:])
    [write] = completion.end().writes
    return Result(write.repo.sync_status, write.repo.head, changes)


def history(owner: SigningAccount, random: Random) -> list[bytes]:
    """Return the frames of one to five commits on a repo with random records, some with a `#sync` of the last one."""
    replace_records(owner, random, random_record)
    frames = [encoded_frame("commit", owner.commit(*_writes(owner, random))) for _ in range(random.randrange(1, 6))]
    return frames + [encoded_frame("sync", owner.sync_event())] * (random.random() < 0.3)


def _writes(owner: SigningAccount, random: Random) -> list[Write]:
    paths = {random_path(random) for _ in range(random.choice((1, 1, 2)))} | set(sorted(owner.repo.records)[:1])
    writes = []
    for path in sorted(paths):
        if path in owner.repo.records:
            writes.append(Write("update", path, random_record(random)) if random.random() < 0.5 else Write.delete(path))
        else:
            writes.append(Write("create", path, random_record(random)))
    return writes


def _plan(messages: list[ReceivedMessage], row: Repo, owner: SigningAccount) -> BatchPlan:
    return plan_batch(messages, {row.did: row}, lambda _: owner.key_state._replace(final=True), CONTEXT)


def _head_of_export(first: CommitEvent, owner: SigningAccount, *, after: bool) -> Head:
    """Return the head after the first commit, if it is valid, or the head before it, as the commit claims it."""
    if after:
        with suppress(UpstreamError):
            return verify_commit(first, owner.key.public, DEFAULT_LIMITS).head
    return Head(first.since or OLDEST_REV, first.prev_data or EMPTY_TREE, first.commit)


def _messages(frames: list[bytes]) -> list[ReceivedMessage]:
    """Return the messages that a daemon would buffer."""
    events = [(frame, decode_frame(frame, DEFAULT_LIMITS)) for frame in frames]
    return [
        ReceivedMessage(CONTEXT.origin, event.seq, frame, event)
        for frame, event in events
        if isinstance(event, CommitEvent | SyncEvent)
    ]


def join(frames: list[bytes]) -> bytes:
    """Return the input of these frames."""
    return b"".join(len(frame).to_bytes(SIZE_BYTES) + frame for frame in frames)


def split_frames(data: bytes) -> list[bytes]:
    """Return the frames of an input."""
    frames: list[bytes] = []
    while data and len(frames) < MAX_FRAMES:
        size = int.from_bytes(data[:SIZE_BYTES])
        frames.append(data[SIZE_BYTES : SIZE_BYTES + size])
        data = data[SIZE_BYTES + size :]
    return frames
