"""One relay's `com.atproto.sync.subscribeRepos` at a time, kept open for ever (spec §1).

The subscription connects, with the cursor it is given, and hands out frames. It knows nothing of what is in
them but what the connection needs: error frames end it. Lost connections, silence, text frames and messages
over the limit lead to a new connection after a growing pause; several relays are tried in order.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from random import uniform

import structlog
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidURI

PATH = "/xrpc/com.atproto.sync.subscribeRepos"
TOO_BIG = 1009  # the close code that we send for a message over the limit

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds: how long to wait for what, and between attempts."""

    open: float = 15.0
    ping: float = 30.0
    silence: float = 90.0
    pause_first: float = 1.0
    pause_most: float = 60.0
    stable: float = 60.0  # a connection that lived this long starts the pauses afresh


@dataclass(slots=True)
class Connection:
    """What is known of the present connection, for readiness and the status page."""

    relay: str
    cursor: int | None
    frames: int = 0


@dataclass(slots=True)
class Subscription:
    """Frames of the first of `relays` that works.

    A message over `max_bytes` is never received: it ends the connection, and the next one steps over it, which
    `skipped` counts.
    """

    relays: Sequence[str]
    max_bytes: int
    user_agent: str
    skipped: int = 0
    pace: Pace = field(default_factory=Pace)
    connection: Connection | None = None
    last_error: str | None = None

    async def frames(self, cursor_of: Callable[[str], Awaitable[int | None]]) -> AsyncGenerator[bytes, None]:
        """Frames, for ever. Each connection begins behind `cursor_of(relay)`; None asks for live ones only.

        Nothing of a former connection comes after `cursor_of` was called.
        """
        attempt = 0
        too_big: dict[str, int] = {}
        while True:
            relay = self.relays[attempt % len(self.relays)]
            started = asyncio.get_running_loop().time()
            try:
                cursor = await cursor_of(relay)
                async for frame in self._frames_of(relay, cursor, too_big.get(relay, 0)):
                    yield frame
            except ConnectionClosed as error:
                self._lost(relay, error)
                if error.sent is not None and error.sent.code == TOO_BIG:
                    # Each fruitless connection steps further; one that got frames has passed the last such place.
                    fruitless = self.connection is None or self.connection.frames == 0
                    too_big[relay] = 1 + (too_big.get(relay, 0) if fruitless else 0)
                    self.skipped += not fruitless or too_big[relay] == 1
                else:
                    too_big.pop(relay, None)
            except (OSError, TimeoutError, InvalidHandshake, InvalidURI, EOFError) as error:
                self._lost(relay, error)
            finally:
                self.connection = None
            stable = asyncio.get_running_loop().time() - started > self.pace.stable
            attempt = 0 if stable else attempt + 1
            round_ = max(0, attempt - 1) // len(self.relays)
            pause = min(self.pace.pause_first * 2.0 ** min(round_, 16), self.pace.pause_most)
            await asyncio.sleep(pause * uniform(0.75, 1.25))  # noqa: S311 - spread, not secrecy

    async def _frames_of(self, relay: str, cursor: int | None, step_over: int) -> AsyncIterator[bytes]:
        if cursor is not None and step_over:
            cursor += 2 ** (step_over - 1)
        url = f"{relay.rstrip('/')}{PATH}" + ("" if cursor is None else f"?cursor={cursor}")
        log.info("relay.connecting", relay=relay, cursor=cursor)
        async with connect(
            url,
            max_size=self.max_bytes,
            max_queue=16,
            compression=None,
            open_timeout=self.pace.open,
            ping_interval=self.pace.ping,
            ping_timeout=self.pace.ping,
            close_timeout=1,
            proxy=None,
            user_agent_header=self.user_agent,
        ) as socket:
            self.connection = Connection(relay, cursor)
            self.last_error = None
            log.info("relay.connected", relay=relay)
            while True:
                yield await self._receive(socket)
                self.connection.frames += 1

    async def _receive(self, socket: ClientConnection) -> bytes:
        async with asyncio.timeout(self.pace.silence):
            frame = await socket.recv()
        if isinstance(frame, str):
            raise ConnectionError("a text message, which version 0 of the protocol doesn't have")
        return frame

    def _lost(self, relay: str, error: BaseException) -> None:
        self.last_error = f"{type(error).__name__}: {error}"[:300]
        log.warning("relay.lost", relay=relay, error=self.last_error)
