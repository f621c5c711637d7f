"""Find the present end of a relay's stream."""

import asyncio

from indexer.atproto.limits import Limits
from indexer.net.relay.subscription import ConnectionSettings, open_stream
from indexer.sync.events import InfoEvent, MalformedEvent, StreamError, UnknownEvent, decode_frame
from indexer.sync.stream import Position

LIVE_TIMEOUT = 30.0
"""Seconds in which the relay must send a message."""


async def live_position(relay: str, limits: Limits, user_agent: str) -> Position | None:
    """Return number and time of the next valid message that the relay sends; None if it sends none in time.

    Raises:
        OSError: The relay is unavailable.
    """
    try:
        async with asyncio.timeout(LIVE_TIMEOUT):
            async with open_stream(relay, None, limits.frame_bytes, user_agent, ConnectionSettings()) as socket:
                while True:
                    event = decode_frame(await socket.receive(), limits)
                    if not isinstance(event, InfoEvent | StreamError | UnknownEvent | MalformedEvent):
                        return Position(event.seq, event.time)
    except TimeoutError:
        return None
