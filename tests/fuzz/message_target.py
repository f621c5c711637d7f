"""Messages of all kinds: how the Python code decodes and plans them, also without the native core."""

from random import Random
from typing import Any

from indexer.atproto.cbor import CborError, decode_pair, encode
from indexer.atproto.crypto import PrivateKey
from indexer.atproto.limits import DEFAULT_LIMITS
from indexer.atproto.mst import EMPTY_TREE
from indexer.sync.batch import ReceivedMessage, plan_batch
from indexer.sync.events import (
    CommitEvent,
    InfoEvent,
    MalformedEvent,
    OtherShardEvent,
    StreamError,
    SyncEvent,
    decode_frame,
)
from indexer.sync.policy import KeyState
from indexer.sync.repo import Head, Outcome, Repo, SyncStatus
from tests.fuzz.comparison import OLDEST_REV, SMALL_LIMITS, DifferenceError
from tests.fuzz.fuzz_target import FuzzTarget, MutateBytes
from tests.fuzz.mutation import mutate_frame
from tests.fuzz.outcome_counts import OutcomeCounts
from tests.fuzz.seed_files import published_frames, some_of
from tests.fuzz.seeds import LINK, accounts, random_commit, random_value
from tests.sync.signing_account import CONTEXT, encoded_frame

STRANGER = PrivateKey.from_seed("k256", b"a key that no account has").public
STATUSES = (None, "takendown", "suspended", "deleted", "deactivated", "desynchronized", "throttled", "other")
FIELDS = ("seq", "did", "repo", "rev", "time", "blocks", "active", "status", "handle", "name", "message", "error")
VALUES = (None, 0, -1, 2**63, "", "\0", b"", LINK, True, OLDEST_REV)
FIELD_SHARE = 0.6
"""Share of mutations of messages without operations that change one field."""


class Messages(FuzzTarget):
    """Messages: each one has exactly one outcome, and one that the account has not signed changes nothing.

    Half of the inputs, by their size, are checked with a key that has signed none of them.
    """

    def __init__(self) -> None:
        self._owners = accounts()
        self._keys = {owner.did: owner.key_state._replace(final=True) for owner in self._owners}
        kinds = ("commit", "sync", "identity", "account", "info", "error", "unknown", "malformed")
        self.counts = OutcomeCounts(*kinds, "applied", "rejected", "forged")

    def seeds(self, random: Random, count: int) -> list[bytes]:
        """Return messages of all kinds: new ones, and for a third of them published ones, if there are any."""
        made = some_of(published_frames(), random, count // 3)
        return made + [self._message(number, random) for number in range(count - len(made))]

    def mutate(self, data: bytes, random: Random, mutate_bytes: MutateBytes) -> bytes:
        """Return mutated bytes, a mutated commit, or a message with another value of a field."""
        try:
            header, payload = decode_pair(data)
        except CborError:
            return mutate_bytes(data)
        if not isinstance(header, dict) or not isinstance(payload, dict) or header.get("t") == "#commit":
            return mutate_frame(data, random, mutate_bytes, self._owners)
        if random.random() > FIELD_SHARE:
            return mutate_bytes(data)
        values = (*VALUES, self._owners[0].did, random_value(random, 2))
        try:
            return encode(header) + encode(payload | {random.choice(FIELDS): random.choice(values)})
        except (TypeError, ValueError, OverflowError):  # a value that has no encoding
            return mutate_bytes(data)

    def compare(self, data: bytes) -> None:
        """Decode and plan a message. Raises `DifferenceError`."""
        self.counts.executions += 1
        limits = SMALL_LIMITS if len(data) % 4 == 0 else DEFAULT_LIMITS
        event = decode_frame(data, limits)
        self.counts.add(event.kind)
        _compare_with_other_shard(event, decode_frame(data, limits, lambda _: False))
        if isinstance(event, InfoEvent | StreamError | OtherShardEvent):
            return
        forged = len(data) % 2 == 0
        row = None if event.did is None else Repo(event.did, 1, SyncStatus.SYNCHRONIZED, None, _head_before(event))
        message = ReceivedMessage(CONTEXT.origin, event.seq, data, event)
        key_state = KeyState(STRANGER, final=True)
        plan = plan_batch(
            [message],
            {row.did: row} if row else {},
            lambda did: key_state if forged else self._keys.get(did, key_state),
            CONTEXT,
        )
        if len(plan.settled) != 1 or plan.waiting or plan.postponed:
            raise DifferenceError(f"not one outcome: {plan}")
        rejected = plan.settled[0].outcome is Outcome.REJECTED
        if rejected != (len(plan.dead_letters) == 1) or (rejected and plan.writes):
            raise DifferenceError(f"a rejected message leaves a dead letter, and changes nothing: {plan}")
        if forged and isinstance(event, CommitEvent | SyncEvent) and plan.writes:
            raise DifferenceError(f"a message that the account has not signed changes its repo: {plan}")
        self.counts.add("rejected", rejected)
        self.counts.add("applied", plan.settled[0].outcome is Outcome.APPLIED)
        self.counts.add("forged", forged and rejected and not isinstance(event, MalformedEvent))

    def _message(self, number: int, random: Random) -> bytes:
        owner = self._owners[number % len(self._owners)]
        match number % 8:
            case 0:
                return encoded_frame("sync", owner.sync_event())
            case 1:
                return encoded_frame("identity", owner.identity_event() | {"handle": "alice.test"})
            case 2:
                status = random.choice(STATUSES)
                return encoded_frame("account", owner.account_event(active=status is None, status=status))
            case 3:
                return _without_sequence(random)
            case _:
                return random_commit(owner, random).frame


def _without_sequence(random: Random) -> bytes:
    """Return an `#info` message, an error, a message of an unknown type, or no message."""
    match random.randrange(4):
        case 0:
            return encoded_frame("info", {"name": "OutdatedCursor", "message": "text"})
        case 1:
            return encode({"op": -1}) + encode({"error": "ConsumerTooSlow", "message": "text"})
        case 2:
            return encoded_frame("other", {"seq": 1})
        case _:
            return encode({"op": 1, "t": "#commit"}) + encode({"seq": 1})


def _head_before(event: Any) -> Head:
    """Return the state that a commit claims as the one before it; an empty repo for other messages."""
    if isinstance(event, CommitEvent):
        return Head(OLDEST_REV, event.prev_data or EMPTY_TREE, event.commit)
    return Head(OLDEST_REV, EMPTY_TREE, LINK)


def _compare_with_other_shard(event: Any, other: Any) -> None:
    """Compare an event with what a process decodes that owns no account. It does not check most fields."""
    if event.kind in ("commit", "sync", "identity", "account"):
        expected = OtherShardEvent(event.seq, event.kind, event.did, event.time)
        if other != expected:
            raise DifferenceError(f"whole: {expected}\nfor another shard: {other}")
    elif other != event and not (isinstance(event, MalformedEvent) and isinstance(other, OtherShardEvent)):
        raise DifferenceError(f"whole: {event}\nfor another shard: {other}")
