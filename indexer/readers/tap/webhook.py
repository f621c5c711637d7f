"""Send events to a webhook until it answers with a 2xx status, one at a time per repo."""

import asyncio
from base64 import b64encode
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
    """The stage that sends the events of the feed. An event that fails delays only later events of its repo.

    Attributes:
        first_retry: Seconds after which an event is sent again for the first time.
        max_retry: The longest pause until an event is sent again, in seconds.
        stage: Its progress. A request is work.
    """

    _feed: TapFeed
    _client: OutboundClient
    _url: str
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
            for change in await deliveries.take(1):
                with work.busy():
                    await self._send_change(deliveries, change)

    async def _send_change(self, deliveries: Deliveries, change: LoggedChange) -> None:
        """Acknowledge the change if its event was accepted; otherwise deliver it again later."""
        try:
            events = await deliveries.events([change])
        except DatabaseError:
            deliveries.give_back_after(DATABASE_RETRY_SECONDS, change.seq)
            return
        for event in events:
            try:
                failure = await self._failure(event)
            except UnavailableError as paused:
                deliveries.give_back_after(min(paused.retry_after or self.max_retry, self.max_retry), change.seq)
                continue
            self._metrics.feed_events["webhook"].inc()
            if failure is None:
                deliveries.acknowledge(event.seq)
            else:
                self._postpone(deliveries, change, failure)

    async def _failure(self, event: Event) -> str | None:
        """Send one event; return why it was not accepted, without the URL, which may contain a token.

        Raises:
            UnavailableError: Requests to the webhook are paused. That is not because of this event.
        """
        try:
            status = await self._client.post(self._url, event.message, headers=self._headers, timeout=REQUEST_TIMEOUT)
        except UnavailableError as error:
            if error.reason in {FetchFailure.HOST_PAUSED, FetchFailure.THROTTLED}:
                raise
            return str(error.reason)
        return None if HTTPStatus.OK <= status < HTTPStatus.MULTIPLE_CHOICES else f"status {status}"

    def _postpone(self, deliveries: Deliveries, change: LoggedChange, failure: str) -> None:
        attempts = deliveries.count_failure(change.seq, failure)
        if change.seq not in deliveries.window:
            return  # it was set aside
        message = (
            f"the webhook at {host_of(self._url)} did not accept event {change.seq} of {change.did}: {failure}; it is "
            "sent again, and later events of this repo wait"
        )
        self._conditions.report(WEBHOOK_FAILING, message=message)
        seconds = backoff_seconds(attempts, change.did, first=self.first_retry, maximum=self.max_retry)
        deliveries.give_back_after(seconds, change.seq)
