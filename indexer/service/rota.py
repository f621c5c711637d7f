"""Whose turn it is among hosts: none of them has all places, however slow it is or however many repos it has."""

FIRST_SECONDS = 0.05  # a resync's time, before any of its host has ended, or one has taken longer
MOST_SECONDS = 3_600.0  # no repo is put off for longer
MOST_HOSTS = 10_000
WEIGHT = 0.2  # of the newest time in a host's mean


class Rota:
    """Counts the resyncs of each host, and tells those that can't begin now when they may. Times are Unix seconds.

    A host has `most` places. Repos beyond that are put off one behind the other, at the pace at which the host has
    answered so far, so that they don't come up again and again in front of all others.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._running: dict[str, list[float]] = {}
        self._seconds: dict[str, float] = {}
        self._next: dict[str, float] = {}
        self._paused: dict[str, float] = {}

    def admits(self, host: str, now: float) -> bool:
        return len(self._running.get(host, ())) < self._most and self._paused.get(host, 0.0) <= now

    def begin(self, host: str, now: float) -> None:
        self._running.setdefault(host, []).append(now)

    def end(self, host: str, began: float, now: float) -> None:
        """One that began then is over."""
        self._running[host].remove(began)
        if not self._running[host]:
            del self._running[host]
        mean = self._seconds.pop(host, FIRST_SECONDS)
        self._seconds[host] = mean + WEIGHT * (now - began - mean)
        _forget_oldest(self._seconds)

    def pause(self, host: str, until: float) -> None:
        """The host wants to be left alone."""
        self._paused[host] = max(self._paused.pop(host, 0.0), until)
        _forget_oldest(self._paused)

    def later(self, host: str, now: float) -> float:
        """When the next repo of this host, which it doesn't admit now, is to come up again."""
        longest = now - min(self._running.get(host, ()), default=now)
        pace = max(self._seconds.get(host, FIRST_SECONDS), longest) / self._most
        earliest = max(now, self._paused.get(host, 0.0), self._next.pop(host, 0.0))
        self._next[host] = min(earliest + pace, now + MOST_SECONDS)
        _forget_oldest(self._next)
        return self._next[host]


def _forget_oldest(by_host: dict[str, float]) -> None:
    if len(by_host) > MOST_HOSTS:
        del by_host[next(iter(by_host))]
