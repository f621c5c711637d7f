"""The dead letters that a schedule allows, and those that it demands. Like the oracle, it knows the schedule only."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tests.simulation.fault_schedule import (
    AccountFault,
    ChangedScope,
    Commit,
    Damage,
    DamagedCommit,
    Episode,
    ForgedMessage,
    Forgery,
    Join,
    LostWindow,
    Migrate,
    RepeatedMessages,
    RestartedSequence,
    RotateKey,
    Schedule,
    UndecodableMessages,
)

Cause = tuple[str | None, str]
"""The DID, if the message shows one, and the reason."""
Row = tuple[str, int | None, str | None, str]
"""Relay, sequence number, DID and reason of a stored dead letter."""

DAMAGES: Mapping[Damage, str] = {
    "blocks cut": "car-malformed",
    "bit flipped": "block-hash-mismatch",
    "frame cut": "frame-malformed",
    "frame empty": "frame-malformed",
}
FORGERIES: Mapping[ForgedMessage, str] = {
    "commit by another key": "signature-invalid",
    "sync by another key": "signature-invalid",
    "commit of another repo": "envelope-mismatch",
    "sync of another repo": "envelope-mismatch",
    "high-S signature": "signature-invalid",
    "future commit": "future-rev",
}
UNREADABLE: Cause = (None, "frame-malformed")


@dataclass(frozen=True)
class ExpectedDeadLetters:
    """The limits of the dead letters of a world.

    Attributes:
        most: How many messages of one relay may be rejected, by their cause. Messages without a readable number are
            rejected again at each connection, so they are not counted.
        least: How many dead letters there have to be, by their cause.
    """

    most: Mapping[Cause, int]
    least: Mapping[Cause, int]

    def contradictions(self, rows: Iterable[Row]) -> list[str]:
        """Return what is wrong with the stored dead letters."""
        stored, numbers = Counter[Cause](), set[tuple[str, int, Cause]]()
        for relay, seq, did, reason in rows:
            stored[did, reason] += 1
            numbers |= {(relay, seq, (did, reason))} if seq is not None else set()
        counts = Counter((relay, cause) for relay, _, cause in numbers)
        return [
            *(f"nothing is to be rejected for {cause}" for cause in stored.keys() - self.most.keys()),
            *(
                f"{count} messages of {relay} are rejected for {cause}"
                for (relay, cause), count in counts.items()
                if count > self.most.get(cause, count)
            ),
            *(
                f"there are {stored[cause]} dead letters for {cause}, not {count}"
                for cause, count in self.least.items()
                if stored[cause] < count
            ),
        ]


def dead_letters_of(schedule: Schedule) -> ExpectedDeadLetters:
    """Return the dead letters that the schedule gives."""
    most, least = _of_honest_messages(schedule), Counter[Cause]()
    synchronized = {action.did for action in schedule.first}
    for number, episode in enumerate(schedule.episodes):
        lost = any(isinstance(fault, LostWindow | RestartedSequence) for fault in episode.faults)
        if lost or _changes_scope([episode]):
            synchronized.clear()
        for fault in episode.faults:
            match fault:
                case Forgery():
                    most[fault.did, FORGERIES[fault.kind]] += 1
                    least[fault.did, FORGERIES[fault.kind]] += 1
                case UndecodableMessages():
                    most[UNREADABLE] += fault.count
                    least[UNREADABLE] += fault.count
                case DamagedCommit():
                    reason = DAMAGES[fault.damage]
                    cause = UNREADABLE if reason == "frame-malformed" else (fault.did, reason)
                    most[cause] += 1
                    # The blocks of a message are not read if its repo waits for a fetch. The message may be read as
                    # late as after a change of the scope, when the repo has been fetched.
                    is_read = fault.did in synchronized and not _changes_scope(schedule.episodes[number + 1 :])
                    least[cause] += not lost and (cause == UNREADABLE or is_read)
        synchronized -= {fault.did for fault in episode.faults if isinstance(fault, AccountFault)}
    return ExpectedDeadLetters(most, +least)


def _changes_scope(episodes: Iterable[Episode]) -> bool:
    return any(isinstance(fault, ChangedScope) for episode in episodes for fault in episode.faults)


def _of_honest_messages(schedule: Schedule) -> Counter[Cause]:
    """Return how many messages may be rejected that accounts have sent: repeated ones, and those before a new key."""
    most = Counter[Cause]()
    # Each such fault repeats its messages twice.
    repeated = sum(2 * fault.count for fault in schedule.faults if isinstance(fault, RepeatedMessages))
    signed = Counter(action.did for action in schedule.actions if isinstance(action, Commit | RotateKey | Migrate))
    for action in schedule.actions:
        if isinstance(action, Join) and repeated:
            most[action.did, "seq-not-increasing"] = repeated
        if isinstance(action, RotateKey | Migrate):
            most[action.did, "signature-invalid"] = signed[action.did] + repeated
    return most
