"""Relays that remember what they sent, and lose, damage and delay it; hosts that count; a directory that can hang."""

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

from indexer.demo.local_pds import GET_REPO, LocalPds
from indexer.demo.local_relay import SentMessage, message_frame
from tests.faulty_network import FaultyPds, FaultyPlc, FaultyRelay

Damage = Callable[[dict[str, Any]], bytes]
"""Returns the frame of a damaged message, from the payload of the message."""


class RecordingRelay(FaultyRelay):
    """A relay.

    Attributes:
        ended: The messages of the sequences that the relay has ended.
        starts: The number before the first message of each sequence. Each sequence is below the one before.
        held: Messages that wait to be sent, by DID. Those of other accounts are sent at once.
        damages: How to damage the next commit of an account, by DID.
        damaged: The number of damaged commits by DID.
        newest: The sequence number of the newest event in the present sequence; 0 if there is none.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.ended: list[list[SentMessage]] = []
        self.starts = [self.seq]
        self.held: dict[str, list[tuple[LocalPds, str, dict[str, Any]]]] = {}
        self.damages: dict[str, Damage] = {}
        self.damaged: Counter[str] = Counter()
        self.newest = 0

    @property
    def sequences(self) -> list[list[SentMessage]]:
        """The messages of each sequence, in the order of the sequences."""
        return [*self.ended, self.log]

    @property
    def websocket_url(self) -> str:
        """The URL of the stream."""
        return self.url.replace("http", "ws", 1)

    def receive(self, pds: LocalPds, did: str, kind: str, payload: dict[str, Any]) -> None:
        if did in self.held:
            self.held[did].append((pds, kind, payload))
        elif kind == "#commit" and did in self.damages:
            damage = self.damages.pop(did)
            self.inject(damage(payload | {"seq": self.seq + 1}))
            self.damaged[did] += 1
        else:
            sent = len(self.log)
            super().receive(pds, did, kind, payload)
            self.newest = self.seq if len(self.log) > sent else self.newest

    def release(self, did: str) -> int:
        """Send the messages that waited; return their number."""
        waited = self.held.pop(did)
        for pds, kind, payload in waited:
            self.receive(pds, did, kind, payload)
        return len(waited)

    def sequence_of(self, seq: int) -> int:
        """Return the index of the sequence that a number belongs to."""
        return next((index for index, start in enumerate(self.starts) if seq > start), len(self.ended))

    def restart_sequence(self, first_seq: int = 0) -> None:
        self.ended.append(self.log)
        self.starts.append(first_seq)
        self.newest = 0
        super().restart_sequence(first_seq)


class CountingPds(FaultyPds):
    """A host.

    Attributes:
        fetched: How often the repo of each account was requested, by DID.
        lies: Further entries of the first page of its list of accounts.
        lied: How often it has sent them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fetched: Counter[str] = Counter()
        self.lies: list[dict[str, Any]] = []
        self.lied = 0

    def application(self) -> web.Application:
        application = super().application()
        application.middlewares.insert(0, self._count)
        return application

    async def _list_repos(self, request: web.Request) -> web.Response:
        response = await super()._list_repos(request)
        if not self.lies or "cursor" in request.query:
            return response
        self.lied += 1
        page = json.loads(response.text or "")
        return web.json_response(page | {"repos": page["repos"] + self.lies})

    @web.middleware
    async def _count(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path == GET_REPO:
            self.fetched[request.query.get("did", "")] += 1
        return await handler(request)


class HangingPlc(FaultyPlc):
    """A directory that can stop to answer. It answers the requests that have waited when it goes on.

    Attributes:
        waited: The number of requests that had to wait.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waited = 0
        self._answers = asyncio.Event()
        self._answers.set()

    def application(self) -> web.Application:
        application = super().application()
        application.middlewares.insert(0, self._wait)
        return application

    def hang(self) -> None:
        self._answers.clear()

    def go_on(self) -> None:
        self._answers.set()

    @web.middleware
    async def _wait(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        self.waited += not self._answers.is_set()
        await self._answers.wait()
        return await handler(request)


DAMAGES: dict[str, Damage] = {
    "blocks cut": lambda payload: message_frame("#commit", payload | {"blocks": payload["blocks"][:-20]}),
    "bit flipped": lambda payload: message_frame(
        "#commit", payload | {"blocks": payload["blocks"][:-1] + bytes([payload["blocks"][-1] ^ 1])}
    ),
    "frame cut": lambda payload: message_frame("#commit", payload)[:-10],
    "frame empty": lambda _: b"",
}
