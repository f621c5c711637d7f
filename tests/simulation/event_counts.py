"""The counts of messages in the metrics of a daemon."""

import re
from collections import Counter

import httpx

from tests.daemon_forks import DaemonFork
from tests.waiting import until

_RECEIVED = re.compile(r'^indexer_events_received_total\{kind="([^"]*)"\} ([0-9.e+]+)$', re.MULTILINE)
_OUTCOMES = re.compile(r'^indexer_events_total\{kind="([^"]*)",outcome="[a-z]+"\} ([0-9.e+]+)$', re.MULTILINE)


async def event_counts(daemon: DaemonFork) -> tuple[Counter[str], Counter[str]]:
    """Return how many messages of each kind the present process has received, and how many have an outcome."""
    async with httpx.AsyncClient() as client:
        text = (await client.get(f"{daemon.health_url()}/metrics")).text
    return _sums(_RECEIVED, text), _sums(_OUTCOMES, text)


async def wait_until_settled(daemon: DaemonFork) -> None:
    """Wait until the present process of the daemon has counted one outcome for each received message, of each kind."""
    received, outcomes = Counter[str](), Counter[str]()

    async def settled() -> bool:
        nonlocal received, outcomes
        received, outcomes = await event_counts(daemon)
        return received.total() > 0 and +received == +outcomes

    await until(settled, lambda: (received, outcomes))


def _sums(pattern: re.Pattern[str], text: str) -> Counter[str]:
    sums = Counter[str]()
    for kind, value in pattern.findall(text):
        sums[kind] += int(float(value))
    return sums
