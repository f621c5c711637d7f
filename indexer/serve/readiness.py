"""The reasons why the indexer is not ready, as the health check and `indexer status` give them."""

from dataclasses import dataclass
from datetime import UTC, datetime

from indexer.sync.stream import OpenGap

MAX_LISTED_GAPS = 5
MAX_READY_LAG_SECONDS = 60.0
"""Maximum lag of a daemon that is ready."""


@dataclass(frozen=True, slots=True)
class ReadinessReason:
    """One reason why the indexer is not ready.

    Attributes:
        code: The kind of reason, for programs. docs/runbook.md lists them.
        message: What is wrong, for people.
        value: How bad it is: a time in seconds, a share or a number; see
            docs/operations.md#reasons-why-the-daemon-is-not-ready.
    """

    code: str
    message: str
    value: float


def describe_gap(opened: OpenGap) -> str:
    """Return the gap as a phrase for people."""
    gap = opened.gap
    at = datetime.fromtimestamp(opened.opened_at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    span = "" if gap.first_seq is None else f", seq {gap.first_seq} to {gap.last_seq or 'unknown'}"
    return f"gap {gap.reason} in the stream of {gap.relay}{span}, opened {at}"
