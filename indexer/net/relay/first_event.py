"""Connect to the stream of a relay once, and return the first event that it sends."""

import asyncio

from indexer.atproto.limits import Limits
from indexer.net.relay.subscription import ConnectionSettings, open_stream
from indexer.sync.events import Event, decode_frame


async def first_event(
    relay: str, cursor: int | None, limits: Limits, user_agent: str, *, connect_timeout: float, message_timeout: float
) -> Event | None:
    """Return the first event after `cursor` (None: the next one); None if the relay sends nothing in time.

    Raises:
        OSError: The relay cannot be reached, refuses the connection, or ends it (includes TimeoutError).
    """
    settings = ConnectionSettings(connect_timeout=connect_timeout)
    async with open_stream(relay, cursor, limits.frame_bytes, user_agent, settings) as socket:
        try:
            async with asyncio.timeout(message_timeout):
                return decode_frame(await socket.receive(), limits)
        except TimeoutError:
            return None
