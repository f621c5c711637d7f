"""Samples of the lag and of the rates over the last hour, in memory, for the charts of the status page."""

from collections import deque
from dataclasses import dataclass

SAMPLE_SECONDS = 10.0
"""Interval between two samples."""
MAX_SAMPLES = 360
"""Samples that are retained: an hour."""


@dataclass(frozen=True, slots=True)
class StageTotals:
    """Totals of one process at one time.

    Attributes:
        lag_seconds: Time since the moment up to which all events are stored; None if it is not known.
        messages: Messages that were settled since the start.
        resyncs: Resyncs that ended since the start.
    """

    lag_seconds: float | None
    messages: int
    resyncs: int


@dataclass(frozen=True, slots=True)
class History:
    """The samples as columns of the same length, oldest first.

    Attributes:
        times: When each sample was taken, in Unix seconds.
        lag_seconds: None if the lag was not known.
        messages_per_second: The mean rate since the previous sample.
        resyncs_per_second: The mean rate since the previous sample.
    """

    times: list[float]
    lag_seconds: list[float | None]
    messages_per_second: list[float]
    resyncs_per_second: list[float]


@dataclass(frozen=True, slots=True)
class _Sample:
    at: float
    lag_seconds: float | None
    messages_per_second: float
    resyncs_per_second: float


class StatusSamples:
    """Retains the newest `MAX_SAMPLES` samples. All totals are zero at `began_at` (Unix seconds)."""

    def __init__(self, began_at: float) -> None:
        self._samples: deque[_Sample] = deque(maxlen=MAX_SAMPLES)
        self._last_at, self._last = began_at, StageTotals(None, 0, 0)

    def add(self, now: float, totals: StageTotals) -> None:
        """Add a sample. Nothing is added if the clock was set back."""
        seconds = now - self._last_at
        if seconds > 0:
            lag = None if totals.lag_seconds is None else round(totals.lag_seconds, 3)
            messages, resyncs = totals.messages - self._last.messages, totals.resyncs - self._last.resyncs
            self._samples.append(_Sample(round(now, 1), lag, round(messages / seconds, 2), round(resyncs / seconds, 2)))
        self._last_at, self._last = now, totals

    def history(self) -> History:
        """Return the samples."""
        return History(
            [sample.at for sample in self._samples],
            [sample.lag_seconds for sample in self._samples],
            [sample.messages_per_second for sample in self._samples],
            [sample.resyncs_per_second for sample in self._samples],
        )

    def latest_rates(self) -> tuple[float, float] | None:
        """Return messages and resyncs per second of the newest sample; None before the first one."""
        if not self._samples:
            return None
        newest = self._samples[-1]
        return newest.messages_per_second, newest.resyncs_per_second
