"""A proxy before a relay, which loses some of the commits of its stream."""

from indexer.atproto.limits import DEFAULT_LIMITS
from indexer.sync.events import CommitEvent, decode_frame
from tests.http_proxy import HttpMessages, HttpProxy, frame_sizes
from tests.tcp_proxy import Messages

FINAL, CONTROL = 0x80, 0x08
"""Bits of the first byte of a frame: it is the last one of a message; it belongs to none."""

Commit = tuple[str, str]
"""DID and rev."""


class RelayProxy(HttpProxy):
    """Forwards to the relay at this port, and notes the commits of its stream.

    Attributes:
        lose_every: It loses one commit of so many, again and again if the relay repeats it; None: it loses none.
        last_seq: The sequence number of the last commit.
    """

    def __init__(self, port: int, lose_every: int | None = None) -> None:
        super().__init__(port)
        self.lose_every = lose_every
        self.last_seq = 0
        self._loses: dict[Commit, bool] = {}

    @property
    def relay_url(self) -> str:
        """The websocket URL of the proxy."""
        return f"ws://localhost:{self.port}"

    @property
    def passed(self) -> set[Commit]:
        """The commits that were forwarded."""
        return {commit for commit, is_lost in self._loses.items() if not is_lost}

    @property
    def lost(self) -> set[Commit]:
        """The commits that were lost."""
        return {commit for commit, is_lost in self._loses.items() if is_lost}

    def has_read(self, did: str, rev: str) -> bool:
        """Return True if the relay has sent this commit."""
        return (did, rev) in self._loses

    def messages(self) -> tuple[Messages, Messages]:
        return HttpMessages(), StreamMessages()

    def passes(self, kind: str, message: bytes) -> bool:
        event = decode_frame(content_of(message), DEFAULT_LIMITS) if kind == "server message" else None
        if not isinstance(event, CommitEvent):
            return True
        self.last_seq = event.seq
        is_due = self.lose_every is not None and (len(self._loses) + 1) % self.lose_every == 0
        return not self._loses.setdefault((event.did, event.rev), is_due)


class StreamMessages(HttpMessages):
    """As `HttpMessages`, but with whole messages of the websocket: a relay may send one in several frames."""

    def first(self) -> tuple[str, int]:
        if not self.is_websocket:
            return super().first()
        return "message", max([stop for _, stop in first_message(self.buffer)], default=0)


def first_message(data: bytes | bytearray) -> list[tuple[int, int]]:
    """Return where the content of each frame of the first message begins and ends; empty if it is not complete.

    A frame that belongs to no message, such as a ping, counts as one, or as a part of the message around it.
    """
    parts: list[tuple[int, int]] = []
    start = 0
    while (sizes := frame_sizes(data, start))[1]:
        header, size = sizes
        parts.append((start + header, start + size))
        if data[start] & FINAL and (len(parts) == 1 or not data[start] & CONTROL):
            return parts
        start += size
    return []


def content_of(message: bytes) -> bytes:
    """Return the content of a message, without the headers of its frames."""
    return b"".join([message[start:stop] for start, stop in first_message(message)])
