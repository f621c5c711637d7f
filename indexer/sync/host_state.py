"""The state of a host for outbound requests, as it is stored."""

from dataclasses import dataclass

from indexer.reasons import FetchFailure

MAX_HOSTS = 16_384


@dataclass(frozen=True, slots=True)
class HostState:
    """The state of a host that is stored across restarts. Times are Unix seconds.

    Attributes:
        requests: Requests in total in the table; in memory, requests since the state was last saved.
        failures: Failed requests, counted like `requests`.
        consecutive_failures: Failures since the last response.
        paused_until: End of the last pause; it may be over.
    """

    host: str
    requests: int
    failures: int
    consecutive_failures: int
    paused_until: float | None
    pause_reason: FetchFailure | None
    last_error: str | None
    last_success: float | None
