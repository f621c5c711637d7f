"""Hold commits that have come too early: another stream may bring the ones before them."""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from indexer.live.inbox import Inbox, message_bytes
from indexer.sync.batch import ReceivedMessage, has_rev_below

HOLD_SECONDS = 5.0
"""The time in which another stream must bring what an early commit lacks."""
MAX_HELD_SHARE = 1 / 4
"""Share of the bytes of one stream in the inbox that held messages may occupy."""


@dataclass(eq=False, slots=True)
class _Hold:
    """An early commit of a DID with this rev, all later messages of the DID, and the end of their wait."""

    did: str
    rev: str
    messages: list[ReceivedMessage]
    end: asyncio.TimerHandle

    @property
    def bytes(self) -> int:
        return sum(map(message_bytes, self.messages))


class HeldMessages:
    """Holds early commits, and the later messages of their DIDs, until a message with a lower rev comes.

    If none comes within `seconds`, or if the messages exceed their share of the inbox, they are planned as they are.

    Attributes:
        overdue: The DIDs whose messages are planned as they are.
    """

    def __init__(self, inbox: Inbox, seconds: float = HOLD_SECONDS) -> None:
        self.overdue: set[str] = set()
        self._inbox = inbox
        self._seconds = seconds
        self._holds: dict[str, _Hold] = {}

    def hold_back(self, messages: Iterable[ReceivedMessage]) -> list[ReceivedMessage]:
        """Return the messages to plan. A message with a lower rev than the held ones comes before them."""
        free = []
        for message in messages:
            hold = self._holds.get(message.did) if message.did else None
            if hold is None:
                free.append(message)
            elif has_rev_below(message, hold.rev):
                free += [message, *self._release(hold.did)]
            else:
                hold.messages.append(message)
        self._limit()
        return free

    def hold(self, did: str, rev: str, messages: Sequence[ReceivedMessage]) -> None:
        """Hold messages of a DID. The first one is an early commit with this rev."""
        end = asyncio.get_running_loop().call_later(self._seconds, self._end, did)
        self._holds[did] = _Hold(did, rev, list(messages), end)
        self._limit()

    def discard_overdue(self, dids: Iterable[str]) -> None:
        """Note that messages of these DIDs are settled."""
        if self.overdue:
            self.overdue.difference_update(dids)

    def _limit(self) -> None:
        while self._holds and sum([one.bytes for one in self._holds.values()]) > self._inbox.share * MAX_HELD_SHARE:
            self._end(max(self._holds, key=lambda did: self._holds[did].bytes))

    def _end(self, did: str) -> None:
        self.overdue.add(did)
        self._inbox.put_back(self._release(did))

    def _release(self, did: str) -> list[ReceivedMessage]:
        hold = self._holds.pop(did)
        hold.end.cancel()
        return hold.messages
