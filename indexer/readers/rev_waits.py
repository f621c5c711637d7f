"""Answer a client as soon as the stored records of a repo include a rev. One query reads the repos of all clients."""

import asyncio
from collections import Counter
from time import monotonic
from typing import NoReturn

from aiohttp import web

from indexer.atproto.syntax import is_did, is_tid
from indexer.concurrency.event_wait import wait_for_event
from indexer.db import Database
from indexer.db.periodic import DatabaseAttempt
from indexer.net.server.connection_limit import WEBSOCKETS
from indexer.readers.access import answer, problem, rev_header
from indexer.sync.repo import Repo

READ_SECONDS = 0.02
"""Pause between two queries while clients wait."""
MAX_SECONDS = 30.0


class RevWaits:
    """The clients that wait, each on a connection that counts as a websocket."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self._waiting = Counter[str]()
        self._wanted, self._read = asyncio.Event(), asyncio.Event()
        self._rows: dict[str, Repo] = {}

    async def run(self) -> NoReturn:
        """Read the repos while clients wait. Only an exception that is a bug ends it."""
        while True:
            await self._wanted.wait()
            with DatabaseAttempt():
                self._rows = await self._db.repos.load(sorted(self._waiting))
                self._read.set()
                self._read = asyncio.Event()
            await asyncio.sleep(READ_SECONDS)

    async def respond(self, request: web.Request) -> web.Response:
        """Answer with 200 when the rev is reached, with 504 when the timeout has ended. Both say the present rev.

        Raises:
            web.HTTPServiceUnavailable: Too many clients wait, or have websockets.
        """
        did, rev, text = request.match_info["did"], request.query.get("rev", ""), request.query.get("timeout", "10")
        try:
            seconds = float(text)
        except ValueError:
            seconds = -1.0
        if not (is_did(did) and is_tid(rev) and 0 <= seconds <= MAX_SECONDS):
            return problem(400, f"use /wait-for/DID?rev=REV&timeout=SECONDS, with at most {MAX_SECONDS:.0f} seconds")
        ends = monotonic() + seconds
        with request.app[WEBSOCKETS].hold(request, None, for_anyone=True) as held:
            repo = (await self._db.repos.load([did])).get(did)
            self._waiting[did] += 1
            try:
                while not (reached := repo is not None and repo.shows(rev)) and (left := ends - monotonic()) > 0:
                    if held.displaced.is_set() or request.transport is None:
                        raise web.HTTPServiceUnavailable(text="too many clients wait; try again later")
                    self._wanted.set()
                    if await wait_for_event(self._read, min(left, 1.0)):
                        repo = self._rows.get(did, repo)
            finally:
                self._waiting -= Counter([did])
                if not self._waiting:
                    self._wanted.clear()
        shown = repo.shown_rev if repo else None
        body = {"did": did, "rev": shown, "reached": reached}
        return answer(body, 200 if reached else 504, rev_header(shown))
