"""Requests of clients of tap, to a server with a real Postgres: a reference decides which ones are valid."""

from contextlib import AsyncExitStack
from http import HTTPStatus
from random import Random
from typing import Any, cast
from urllib.parse import quote

import aiohttp
import orjson
from aiohttp import web
from aiohttp.test_utils import TestServer
from yarl import URL

from indexer.net.identity.identity_cache import IdentityCache
from indexer.readers.access import Access
from indexer.readers.tap.routes import TapRoutes
from indexer.sync.scope import Scope
from tests.fuzz import syntax_reference as reference
from tests.fuzz.comparison import DifferenceError
from tests.fuzz.database_targets import FuzzDatabase
from tests.fuzz.examples import DID, IDENTIFIERS, PATTERNS
from tests.fuzz.fuzz_target import FuzzTarget, MutateBytes, text_of
from tests.fuzz.json_mutation import mutate_json
from tests.fuzz.outcome_counts import OutcomeCounts

CHANGES = (
    ("POST", "/repos/add", "dids"),
    ("POST", "/repos/remove", "dids"),
    ("PUT", "/collection-filters", "collections"),
    ("PUT", "/signal-collections", "collections"),
)
QUESTIONS = ("/info/", "/resolve/")
KEPT_INPUTS = 1_000
"""Inputs after which all repos are deleted, so that the cost of an input does not grow in a long run."""


class StoredIdentities:
    """Looks nothing up: only the stored identities are known, and there are none."""

    async def lookup(self, did: str) -> object:
        """Do nothing."""


class TapRequests(FuzzTarget):
    """Requests: one byte that selects the path, and the body or the DID in the path. Postgres checks the changes."""

    def __init__(self) -> None:
        self._database = FuzzDatabase()
        self._resources = AsyncExitStack()
        self._database.run(self._start())
        self.counts = OutcomeCounts("changes", "refused changes", "answers", "unknown repos")

    async def _start(self) -> None:
        db = self._database.db
        await db.scope.begin(Scope())
        application = web.Application()
        application.add_routes(TapRoutes(db, cast(IdentityCache, StoredIdentities())).routes(Access(None)))
        self._server = await self._resources.enter_async_context(TestServer(application))
        self._client = await self._resources.enter_async_context(aiohttp.ClientSession())

    def close(self) -> None:
        """Stop both servers."""
        self._database.run(self._resources.aclose())
        self._database.close()

    def seeds(self, random: Random, count: int) -> list[bytes]:
        """Return requests with valid and with invalid texts, some of them in a body of another form."""
        made = []
        for number in range(count):
            path = number % (len(CHANGES) + len(QUESTIONS))
            valid = random.choice((IDENTIFIERS[:2], (*IDENTIFIERS, "", "\0", "é"), PATTERNS))
            texts = random.sample(valid, random.randrange(len(valid) + 1))
            if path < len(CHANGES):
                body = random.choice(({CHANGES[path][2]: texts}, {CHANGES[path][2]: texts}, {}, texts))
                made.append(bytes([path]) + orjson.dumps(body))
            else:
                made.append(bytes([path]) + random.choice((DID, "".join(texts[:1]))).encode())
        return made

    def mutate(self, data: bytes, random: Random, mutate_bytes: MutateBytes) -> bytes:
        """Return a mutated body."""
        return data[:1] + mutate_json(data[1:], random, mutate_bytes)

    def compare(self, data: bytes) -> None:
        """Send a request. Raises `DifferenceError`."""
        self.counts.executions += 1
        if self.counts.executions % KEPT_INPUTS == 0:
            self._database.run(self._database.connection.execute("delete from indexer.repo"))
        path, body = (data or b"\0")[0] % (len(CHANGES) + len(QUESTIONS)), data[1:]
        if path < len(CHANGES):
            self._compare_change(*CHANGES[path], body)
        else:
            self._compare_answer(QUESTIONS[path - len(CHANGES)], text_of(body)[:2_000])

    def _compare_change(self, method: str, path: str, name: str, body: bytes) -> None:
        """Send a change. An empty list may be accepted (it selects all collections) or refused."""
        status, answer = self._database.run(self._send(method, path, body))
        texts = _texts(body, name)
        check = reference.is_did if name == "dids" else reference.is_pattern
        expected = HTTPStatus.BAD_REQUEST if texts is None or not all(map(check, texts)) else HTTPStatus.OK
        if status != expected and (texts != [] or status not in (HTTPStatus.OK, HTTPStatus.BAD_REQUEST)):
            raise DifferenceError(f"{path}: status {status} instead of {expected}: {answer!r}")
        self.counts.add("changes" if status == HTTPStatus.OK else "refused changes")

    def _compare_answer(self, path: str, did: str) -> None:
        """Ask about a repo. One of them is tracked."""
        if did == DID:
            self._database.run(self._database.db.scope.track([DID]))
        status, answer = self._database.run(self._send("GET", path + quote(did, safe=""), b""))
        if status == HTTPStatus.OK and orjson.loads(answer)["did"] != did:
            raise DifferenceError(f"{path}: an answer about another repo than {did!r}: {answer!r}")
        known = did == DID and path == "/info/"
        if status not in ((HTTPStatus.OK,) if known else (HTTPStatus.OK, HTTPStatus.NOT_FOUND, HTTPStatus.BAD_REQUEST)):
            raise DifferenceError(f"{path}: status {status} for {did!r}: {answer!r}")
        self.counts.add("answers" if status == HTTPStatus.OK else "unknown repos")

    async def _send(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        """Send a request; return the status and the body of the answer."""
        url = URL(f"{self._server.make_url('/')}".rstrip("/") + path, encoded=True)
        async with self._client.request(method, url, data=body) as response:
            return response.status, await response.read()


def _texts(body: bytes, name: str) -> list[str] | None:
    """Return the list of texts in a body; None if it has another form."""
    try:
        document: Any = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    texts = document.get(name) if isinstance(document, dict) else None
    return texts if isinstance(texts, list) and all(isinstance(text, str) for text in texts) else None
