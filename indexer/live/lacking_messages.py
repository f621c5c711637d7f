"""Find out which relay's stream lacks messages that another relay's stream has brought."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import takewhile
from math import inf

MISSING_SECONDS = 60.0
"""Time in which a stream must bring a message that another one has brought."""
MAX_MISSING = 100_000
"""Messages that are expected from one stream at the same time, about 14 MB: at 300 messages/s, those of an outage of
five minutes. What follows is not compared."""
MAX_INACTIVE = 100_000
"""Accounts of which a relay said that they are not active, and that are remembered."""
OMITS_SECONDS = 600.0
"""Time after a charge in which a relay counts as one that omits messages."""

_REV_LENGTH = 13


@dataclass(slots=True)
class _Stream:
    """The state of one relay's stream. Times are monotonic seconds."""

    caught_up_since: float | None = None  # None while it is not connected, or behind the network
    was_caught_up: bool = False  # True if it was caught up at some time
    # When another stream brought each message that this one has not brought, oldest first. The keys are DID and rev in
    # one string, which takes half of the memory of a tuple.
    missing: dict[str, float] = field(default_factory=dict)
    inactive: set[str] = field(default_factory=set)  # accounts that are not active, in the relay's own words
    withheld: set[str] = field(default_factory=set)  # inactive accounts whose messages the relay withholds
    newest: float = -inf  # when the newest of the messages that it has brought arrived for the first time
    charged: int = 0  # the number of messages with which it was charged
    charged_at: float = -inf  # when it was charged last


class LackingMessages:
    """The #commit and #sync messages that some relays' streams have brought and others have not, by DID and rev.

    A stream is charged with a message that another one has brought, if it was connected and caught up for all of the
    next `seconds` and has not brought it. While it is not, messages wait: it may still have them. Nothing excuses it
    afterwards, in particular no new sequence. It is fair:

    - Only a message that shows a new, proven state of its account is expected from other streams. So what is forged,
      or cannot be checked, charges nobody.
    - A stream owes no message from before it was caught up for the first time, and none that another one brings while
      that one catches up.
    - It owes no message of an account of which its relay says that it is not active, for whatever reason: such accounts
      are counted elsewhere. This is what the relay has said on its stream since the process started.

    A relay can avoid a charge by a message with the right DID and rev and false blocks, which other rules reject.

    Attributes:
        not_compared: The number of messages that each stream may lack and that are not known, because too many waited.
    """

    def __init__(self, relays: Iterable[str], seconds: float = MISSING_SECONDS, max_missing: int = MAX_MISSING) -> None:
        self._seconds = seconds
        self._max_missing = max_missing
        self._streams = {relay: _Stream() for relay in relays}
        self._others = {relay: [other for other in self._streams if other != relay] for relay in self._streams}
        self.not_compared = dict.fromkeys(self._streams, 0)

    def set_caught_up(self, relay: str, now: float, *, caught_up: bool) -> None:
        """Note whether a stream is connected and not behind (monotonic seconds)."""
        stream = self._streams[relay]
        if not caught_up:
            stream.caught_up_since = None
        elif stream.caught_up_since is None:
            stream.caught_up_since, stream.was_caught_up = now, True

    def set_status(self, relay: str, did: str, *, active: bool, withheld: bool = False) -> None:
        """Note what an #account message of a relay says about an account."""
        stream = self._streams[relay]
        for accounts, is_one in ((stream.inactive, not active), (stream.withheld, withheld)):
            if not is_one:
                accounts.discard(did)
            elif len(accounts) < MAX_INACTIVE:
                accounts.add(did)

    def add(self, relay: str, did: str, rev: str, now: float, *, is_new: bool) -> None:
        """Note a message that a stream has brought. With `is_new`, it is authentic and has the highest known rev.

        `now` is in monotonic seconds, which never decrease from call to call.
        """
        key, stream = did + rev, self._streams[relay]
        first_at = stream.missing.pop(key, -inf)
        stream.newest = max(stream.newest, now if is_new else first_at)
        if not is_new or stream.caught_up_since is None:
            return
        for name in self._others[relay]:
            other = self._streams[name]
            if not other.was_caught_up:
                continue
            if len(other.missing) < self._max_missing:
                other.missing[key] = now
            else:
                self.not_compared[name] += 1

    def charges(self, now: float) -> dict[str, list[tuple[str, str]]]:
        """Return DID and rev of the messages with which each stream is charged now; each message once."""
        latest, charged = now - self._seconds, {}
        for relay, stream in self._streams.items():
            if stream.caught_up_since is None or stream.caught_up_since > latest:
                continue
            if messages := _overdue(stream, latest):
                charged[relay] = messages
                stream.charged_at = now
                stream.charged += len(messages)
        return charged

    def is_compared(self, relay: str) -> bool:
        """Return True while a stream is caught up, so that it is charged with what it lacks."""
        return self._streams[relay].caught_up_since is not None

    def charged(self, relay: str) -> int:
        """Return the number of messages with which a stream was charged so far."""
        return self._streams[relay].charged

    def newest(self, relay: str) -> float:
        """Return when the newest message that a stream has brought arrived for the first time, from any stream."""
        return self._streams[relay].newest

    def omits(self, relay: str, now: float) -> bool:
        """Return True if a relay withholds an account, or was charged lately."""
        stream = self._streams[relay]
        return bool(stream.withheld) or now - stream.charged_at < OMITS_SECONDS


def _overdue(stream: _Stream, latest: float) -> list[tuple[str, str]]:
    """Remove the messages that were brought until `latest`; return those with which the stream is charged."""
    missing = stream.missing
    overdue = [key for key, _ in takewhile(lambda item: item[1] <= latest, missing.items())]
    for key in overdue:
        del missing[key]
    messages = [(key[:-_REV_LENGTH], key[-_REV_LENGTH:]) for key in overdue]
    return [(did, rev) for did, rev in messages if did not in stream.inactive]
