"""Limit concurrent resyncs per host, so that one slow host or one host with many repos never occupies all workers."""

from collections.abc import Mapping

from indexer.concurrency.bounded_dict import BoundedDict

MAX_HOSTS = 10_000
"""Hosts whose durations, retry times and pauses are remembered."""
MAX_WAIT_SECONDS = 3_600.0
"""No repo is postponed for longer."""
LONGEST_PAUSE_SECONDS = 2 * MAX_WAIT_SECONDS
"""A longer pause is over: it began before the clock was set back."""

_FIRST_ESTIMATE_SECONDS = 0.05  # duration of a resync, before any resync of the host has ended
_NEWEST_WEIGHT = 0.2  # of the newest duration, in the moving average of a host
_MAX_GROWTH = 4.0
"""A duration counts for at most this multiple of the mean before it: one large repo says little about the others."""
_MIN_SECONDS = 0.001


class HostSlots:
    """Counts the running resyncs of each host, and schedules repos that find no free slot. Times are Unix seconds.

    Repos beyond the limit of a host are postponed one behind the other, at the rate at which the host has answered so
    far. So they do not return to the front of the queue again and again, ahead of repos of other hosts.
    """

    def __init__(self, slots_per_host: int, exceptions: Mapping[str, int] | None = None) -> None:
        """Give each host `slots_per_host` slots, except those in `exceptions`.

        Besides hosts, the names may be other limit keys: registered domains and network addresses.
        """
        self._slots_per_host = slots_per_host
        self._exceptions = exceptions or {}
        self._started: dict[str, list[float]] = {}
        self._mean_seconds = BoundedDict[str, float](MAX_HOSTS)
        self._next_retry = BoundedDict[str, float](MAX_HOSTS)
        self._paused_until = BoundedDict[str, float](MAX_HOSTS)

    def is_free(self, host: str, now: float) -> bool:
        """Return True if the host has a free slot and no pause."""
        return self.free(host, now) > 0

    def free(self, host: str, now: float) -> int:
        """Return the number of free slots of the host; 0 during a pause."""
        return 0 if self._pause_end(host, now) > now else self._limit(host) - len(self._started.get(host, ()))

    def acquire(self, host: str, now: float) -> None:
        """Occupy a slot of the host from `now` on."""
        self._started.setdefault(host, []).append(now)

    def release(self, host: str, since: float, now: float) -> None:
        """Free the slot that was acquired at `since`, and count its duration."""
        self._started[host].remove(since)
        if not self._started[host]:
            del self._started[host]
        mean = self._mean_seconds.get(host, _FIRST_ESTIMATE_SECONDS)
        seconds = min(now - since, _MAX_GROWTH * mean)
        self._mean_seconds[host] = max(_MIN_SECONDS, mean + _NEWEST_WEIGHT * (seconds - mean))

    def pause(self, host: str, until: float, now: float) -> None:
        """Start no resync of the host before `until`, because the host asked for it."""
        self._paused_until[host] = max(self._pause_end(host, now), until)

    def schedule_retry(self, host: str, now: float) -> float:
        """Return when to claim the next repo that found no free slot; each call schedules one repo."""
        last_retry = _drop_if_later(self._next_retry, host, now + MAX_WAIT_SECONDS)
        earliest = max(now, self._pause_end(host, now), last_retry)
        self._next_retry[host] = min(earliest + 1 / self._rate(host, now), now + MAX_WAIT_SECONDS)
        return self._next_retry[host]

    def _pause_end(self, host: str, now: float) -> float:
        return _drop_if_later(self._paused_until, host, now + LONGEST_PAUSE_SECONDS)

    def _rate(self, host: str, now: float) -> float:
        """Return how many resyncs of the host end per second while all its slots are occupied.

        A slot whose resync runs for longer than usual is expected to take as long again, and does not slow the others.
        """
        mean, started = self._mean_seconds.get(host, _FIRST_ESTIMATE_SECONDS), self._started.get(host, ())
        free = max(0, self._limit(host) - len(started))
        return sum(1 / max(mean, now - since) for since in started) + free / mean

    def _limit(self, host: str) -> int:
        return self._exceptions.get(host, self._slots_per_host)


def _drop_if_later(by_host: dict[str, float], host: str, latest: float) -> float:
    """Return the time of the host; 0 if it has none.

    A time after `latest` is from before the clock was set back. It is dropped.
    """
    if by_host.get(host, 0.0) > latest:
        del by_host[host]
    return by_host.get(host, 0.0)
