"""Connect to the stream of a relay once, and return the first event that it sends."""

import asyncio

from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidURI

from indexer.atproto.limits import Limits
from indexer.relay.subscription import ConnectionSettings, open_stream
from indexer.sync.events import Event
from indexer.sync.frames import decode_frame


async def first_event(
    relay: str, cursor: int | None, limits: Limits, user_agent: str, *, connect_timeout: float, message_timeout: float
) -> Event | None:
    """Return the first event after `cursor` (None: the next one); None if the relay sends nothing in time.

    Raises:
        OSError: The relay cannot be reached, refuses the connection, or ends it (includes TimeoutError).
    """
    settings = ConnectionSettings(connect_timeout=connect_timeout)
    try:
        socket = await open_stream(relay, cursor, limits.frame_bytes, user_agent, settings)
        async with socket:
            try:
                async with asyncio.timeout(message_timeout):
                    return decode_frame(await socket.recv(decode=False), limits)
            except TimeoutError:
                return None
            finally:
                # A relay that sends its window would not answer a close frame before it has sent all of it.
                socket.transport.abort()
    except (ConnectionClosed, InvalidHandshake, InvalidURI, EOFError) as error:
        raise ConnectionError(f"{type(error).__name__}: {error}") from error
