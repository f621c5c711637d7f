"""Copies: messages that another stream has brought before. They are dropped before they are verified."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from indexer.concurrency.bounded_dict import BoundedDict
from indexer.live.inbox import Inbox
from indexer.sync.batch import ReceivedMessage, SettledMessage
from indexer.sync.events import AccountEvent, CommitEvent, MalformedEvent, UnknownEvent
from indexer.sync.repo import Outcome
from indexer.sync.stream import Origin

MAX_RECENT = 100_000
"""Messages that are remembered, at about 200 bytes each. A later copy is planned, and changes nothing."""

_Place = tuple[Origin, int]


class Copies:
    """Recognizes copies, while several streams are read.

    Two messages are copies if all fields but their numbers are equal, the blocks included; of commits, also the times
    may differ. So a forged message with the rev of a real one never takes its place.

    A copy whose first message is not settled waits for it, and its number is done in the same transaction. If the first
    one is rejected, its copies are planned on their own: each relay gets its dead letter. A later copy is done at once.
    """

    def __init__(self, inbox: Inbox, max_recent: int = MAX_RECENT) -> None:
        self._inbox = inbox
        # By fingerprint: the place of the first message; None when it is settled.
        self._recent = BoundedDict[int, _Place | None](max_recent)
        self._waiting = defaultdict[_Place, list[ReceivedMessage]](list)

    def hold_back(self, messages: Sequence[ReceivedMessage]) -> tuple[Sequence[ReceivedMessage], list[ReceivedMessage]]:
        """Return the messages that are no copies, and the copies that are done. Other copies wait."""
        if self._inbox.streams == 1:
            return messages, []
        first, done = [], []
        for message in messages:
            if (identity := _identify(message)) is None:
                first.append(message)
                continue
            place, fingerprint = identity
            first_place = place if place in self._waiting else self._recent.get(fingerprint, place)
            if first_place is None:
                done.append(message)
            elif first_place != place:
                self._waiting[first_place].append(message)
            else:  # it is the first one, and may have been put back
                self._recent[fingerprint] = place
                first.append(message)
        return first, done

    def without_copies(self, messages: Sequence[ReceivedMessage]) -> Sequence[ReceivedMessage]:
        """Return the messages that `hold_back` would probably not hold back. Nothing changes."""
        if self._inbox.streams == 1:
            return messages
        first, places = [], dict[int, _Place | None]()
        for message in messages:
            if (identity := _identify(message)) is not None:
                place, fingerprint = identity
                if places.setdefault(fingerprint, self._recent.get(fingerprint, place)) != place:
                    continue
            first.append(message)
        return first

    def of(self, settled: Iterable[SettledMessage]) -> list[ReceivedMessage]:
        """Return the copies that are done together with these messages."""
        if not self._waiting:
            return []
        accepted = [received for received, outcome, *_ in settled if not _counts_for_itself(received, outcome)]
        places = [(message.origin, message.seq) for message in accepted if message.seq is not None]
        return [copy for place in places for copy in self._waiting.get(place, ())]

    def settle(self, settled: Iterable[SettledMessage]) -> tuple[list[ReceivedMessage], list[ReceivedMessage]]:
        """Note that the outcomes are durable; return the copies that are done, and those to plan on their own."""
        done: list[ReceivedMessage] = []
        again: list[ReceivedMessage] = []
        for received, outcome, *_ in settled if self._recent or self._waiting else ():
            if (identity := _identify(received)) is None:
                continue
            place, fingerprint = identity
            if self._recent.get(fingerprint) == place:
                if _counts_for_itself(received, outcome):
                    del self._recent[fingerprint]
                else:
                    self._recent[fingerprint] = None
            (again if _counts_for_itself(received, outcome) else done).extend(self._waiting.pop(place, ()))
        return done, again


def _counts_for_itself(message: ReceivedMessage, outcome: Outcome) -> bool:
    """Return True if the outcome is not that of its copies, too: it was rejected, or the stream is that of a host.

    Such a stream adds no account, so what is ignored there may count on the stream of a relay.
    """
    return outcome is Outcome.REJECTED or (outcome is Outcome.IGNORED and message.origin.host is not None)


def _identify(message: ReceivedMessage) -> tuple[_Place, int] | None:
    """Return the place of a message, and a number that only its copies share; None if it has no copies.

    Python's hash of bytes and texts has a secret key, so nobody can make another message with the same number.
    """
    origin, seq, _, event, _ = message
    if seq is None or isinstance(event, UnknownEvent | MalformedEvent):
        return None
    if isinstance(event, AccountEvent):  # a report of a host is not one of a relay
        return (origin, seq), hash((event[1:], origin.host))
    return (origin, seq), hash(event[1:8] if isinstance(event, CommitEvent) else event[1:])
