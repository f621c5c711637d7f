"""Send events to a webhook until it answers with a 2xx status, one request at a time per repo."""

import asyncio
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus

from aiohttp import hdrs

from indexer.concurrency.stage_progress import StageProgress, Work
from indexer.db import DatabaseError
from indexer.db.change_log_reads import LoggedChange
from indexer.errors import UnavailableError
from indexer.net.http.http_client import OutboundClient, host_of
from indexer.readers.access import USER
from indexer.readers.tap.deliveries import Deliveries, Event
from indexer.readers.tap.feed import TapFeed
from indexer.reasons import FetchFailure
from indexer.sync.backoff import backoff_seconds
from indexer.telemetry.conditions import WEBHOOK_FAILING, Conditions
from indexer.telemetry.metrics import Metrics

CONCURRENCY = 16
"""Concurrent requests, for different repos."""
REQUEST_TIMEOUT = 30.0
FIRST_RETRY_SECONDS, MAX_RETRY_SECONDS = 1.0, 60.0
DATABASE_RETRY_SECONDS = 1.0


@dataclass(eq=False, repr=False)  # its text would have the password
class Webhook:
    """The stage that sends the events of the feed. A request that fails delays only later events of its repos.

    Attributes:
        first_retry: Seconds after which an event is sent again for the first time.
        max_retry: The longest pause until an event is sent again, in seconds.
        stage: Its progress. A request is work.
    """

    _feed: TapFeed
    _client: OutboundClient
    _url: str
    _batch: int
    _password: str | None
    _conditions: Conditions
    _metrics: Metrics
    first_retry: float = FIRST_RETRY_SECONDS
    max_retry: float = MAX_RETRY_SECONDS

    def __post_init__(self) -> None:
        self.stage = StageProgress("webhook")
        self._headers: dict[str, str] = {hdrs.CONTENT_TYPE: "application/json"}
        if self._password is not None:
            self._headers[hdrs.AUTHORIZATION] = "Basic " + b64encode(f"{USER}:{self._password}".encode()).decode()

    async def run(self) -> None:
        """Send events forever. Only an exception that is a bug ends it."""
        self._feed.clients += 1
        async with asyncio.TaskGroup() as workers:
            for _ in range(CONCURRENCY):
                workers.create_task(self._send_events(self.stage.add()))

    async def _send_events(self, work: Work) -> None:
        while True:
            deliveries = await self._feed.deliveries()
            if changes := await deliveries.take(self._batch):
                with work.busy():
                    await self._send_changes(deliveries, changes)

    async def _send_changes(self, deliveries: Deliveries, changes: Sequence[LoggedChange]) -> None:
        """Acknowledge the changes if their events were accepted; otherwise deliver them again later, each alone."""
        try:
            events = await deliveries.events(changes)
        except DatabaseError:
            deliveries.give_back_after(DATABASE_RETRY_SECONDS, [change.seq for change in changes])
            return
        if not events:
            return
        body = events[0].message if self._batch == 1 else b"[%b]" % b",".join(event.message for event in events)
        try:
            status = await self._client.post(self._url, body, headers=self._headers, timeout=REQUEST_TIMEOUT)
            accepted, failure = HTTPStatus.OK <= status < HTTPStatus.MULTIPLE_CHOICES, f"status {status}"
        except UnavailableError as error:
            if error.reason in {FetchFailure.HOST_PAUSED, FetchFailure.THROTTLED}:  # not because of these events
                seconds = min(error.retry_after or self.max_retry, self.max_retry)
                deliveries.give_back_after(seconds, [event.seq for event in events])
                return
            accepted, failure = False, str(error.reason)  # without the URL, which may contain a token
        self._metrics.feed_events["webhook"].inc(len(events))
        if not accepted:
            self._postpone(deliveries, events, failure)
            return
        for event in events:
            deliveries.acknowledge(event.seq)

    def _postpone(self, deliveries: Deliveries, events: Sequence[Event], failure: str) -> None:
        attempts = max(deliveries.count_failure(event.seq, failure) for event in events)
        changes = [change for event in events if (change := deliveries.window.get(event.seq)) is not None]
        if not changes:
            return  # they were set aside
        first, others = changes[0], f" and {len(changes) - 1} others" if len(changes) > 1 else ""
        message = (
            f"the webhook at {host_of(self._url)} did not accept event {first.seq} of {first.did}{others}: {failure}; "
            "each is sent again, and later events of its repo wait"
        )
        self._conditions.report(WEBHOOK_FAILING, message=message)
        seconds = backoff_seconds(attempts, first.did, first=self.first_retry, maximum=self.max_retry)
        deliveries.give_back_after(seconds, [change.seq for change in changes])
