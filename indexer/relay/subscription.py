"""One relay's `com.atproto.sync.subscribeRepos` at a time, kept open for ever (spec §1).

The subscription connects, with the cursor it is given, and hands out frames. It knows nothing of what is in
them but what the connection needs: error frames end it. Lost connections, silence, text frames and messages
over the limit lead to a new connection after a growing pause; several relays are tried in order.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from random import uniform

import structlog
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidURI

PATH = "/xrpc/com.atproto.sync.subscribeRepos"
TOO_BIG = 1009  # the close code that we send for a message over the limit
STEPS = 32  # over a message that is too large, before the relay counts as one that doesn't work
QUEUED = 4  # messages received and not asked for yet; more of them would only be more memory

log = structlog.get_logger(__name__)


class _Direct(connect):
    """Follows no redirect: it could lead to an address that only we can reach."""

    def process_redirect(self, exc: Exception) -> Exception:
        return exc


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
    reading: bool = True


@dataclass(slots=True)
class Hurdle:
    """How often a message over the limit has come behind a cursor, which didn't move meanwhile.

    Each time, the next connection begins one number further: so nothing that stands behind it is passed over.
    """

    cursor: int | None
    tries: int = 0
    counted: bool = False


@dataclass(slots=True)
class Subscription:
    """Frames of the first of `relays` that works.

    A message over `max_bytes` is never received: it ends the connection, and a later one steps over it. `skipped`
    counts the places where that was so.
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

        Nothing of a former connection comes after `cursor_of` was called. A text message, which version 0 of the
        protocol doesn't have, is handed out like any other, as its bytes, to be refused by what reads it.
        """
        attempt = 0
        hurdles: dict[str, Hurdle] = {}
        while True:
            relay = self.relays[attempt % len(self.relays)]
            started = asyncio.get_running_loop().time()
            cursor = await cursor_of(relay)
            hurdle = hurdles.pop(relay, Hurdle(cursor))
            if hurdle.cursor != cursor:
                hurdle = Hurdle(cursor)
            try:
                async with aclosing(self._frames_of(relay, cursor, hurdle.tries)) as frames:
                    async for frame in frames:
                        if hurdle.tries and not hurdle.counted:
                            hurdle.counted = True
                            self.skipped += 1
                        yield frame
            except (ConnectionClosed, OSError, TimeoutError, InvalidHandshake, InvalidURI, EOFError) as error:
                self._lost(relay, error)
                if isinstance(error, ConnectionClosed) and error.sent is not None and error.sent.code == TOO_BIG:
                    hurdle.tries += 1
                    hurdles[relay] = hurdle
            finally:
                self.connection = None
            stable = asyncio.get_running_loop().time() - started > self.pace.stable
            stepping = relay in hurdles and hurdle.tries < STEPS  # no fault of the relay's, so it is asked again soon
            attempt = 0 if stable else attempt + (not stepping)
            round_ = max(0, attempt - 1) // len(self.relays)
            pause = min(self.pace.pause_first * 2.0 ** min(round_, 16), self.pace.pause_most)
            await asyncio.sleep(pause * uniform(0.75, 1.25))  # noqa: S311 - spread, not secrecy

    async def _frames_of(self, relay: str, cursor: int | None, steps: int) -> AsyncGenerator[bytes, None]:
        cursor = None if cursor is None else cursor + steps
        log.info("relay.connecting", relay=relay, cursor=cursor)
        async with await self._connect(relay, cursor) as socket:
            self.connection = Connection(relay, cursor)
            self.last_error = None
            log.info("relay.connected", relay=relay)
            guard = asyncio.create_task(self._guard(socket, self.connection))
            try:
                while True:
                    frame = await socket.recv(decode=False)
                    self.connection.frames += 1
                    self.connection.reading = False
                    yield frame
                    self.connection.reading = True
            finally:
                guard.cancel()
                await asyncio.wait([guard])
                if not guard.cancelled():
                    guard.result()

    async def _guard(self, socket: ClientConnection, connection: Connection) -> None:
        """Ends a connection on which we have waited too long for a frame; a timer for each frame would cost more."""
        frames = -1
        while frames != connection.frames or not connection.reading:
            frames = connection.frames
            await asyncio.sleep(self.pace.silence)
        await socket.close(reason=f"no message for {self.pace.silence:g} s")

    async def _connect(self, relay: str, cursor: int | None) -> ClientConnection:
        return await _Direct(
            f"{relay.rstrip('/')}{PATH}" + ("" if cursor is None else f"?cursor={cursor}"),
            max_size=self.max_bytes,
            max_queue=QUEUED,
            compression=None,
            open_timeout=self.pace.open,
            ping_interval=self.pace.ping,
            ping_timeout=self.pace.ping,
            close_timeout=1,
            proxy=None,
            user_agent_header=self.user_agent,
        )

    def _lost(self, relay: str, error: BaseException) -> None:
        self.last_error = f"{type(error).__name__}: {error}"[:300]
        log.warning("relay.lost", relay=relay, error=self.last_error)
