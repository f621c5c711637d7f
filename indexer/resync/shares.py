"""Which claimed repos may be resynced now: workers for most, bytes for large ones, and a share of both for each host.

A resync occupies a worker until more than 32 MiB of its export have arrived. From then on it occupies only what it has
reserved of the bytes for large exports. Nobody gets more than a share: no host, registered domain or network address.
If workers or bytes run out, exports that are slower than usual make room.
"""

import asyncio
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from time import time

from indexer.concurrency.bounded_dict import BoundedDict
from indexer.errors import UnavailableError
from indexer.net.http.host_limits import registered_domain
from indexer.net.pds.pds_client import LARGE_BYTES, ExportDownload
from indexer.resync.sparse import SparseDownload
from indexer.sync.repo import Repo

UNKNOWN_HOST = ""
HOST_SHARE = 0.5
"""Share of the workers, and of the bytes of large exports, that a host, registered domain or address may occupy."""
LARGE_EXPORTS_BYTES = 4 << 30
"""Bytes of large exports that are being resynced, together. A single larger one may exceed it."""
SLOW_SHARE = 0.25
"""An export below this share of the usual rate is slow."""
PAUSE_PER_SECOND = 10.0
"""Seconds that a repo waits after it made room for others, for each second that its resync ran."""
MAX_PAUSE_SECONDS = 3_600.0
"""No repo that made room for others waits for longer."""
MAX_WAIT_SECONDS = 600.0
"""No repo waits for longer for its share, however long the resyncs of its host take now."""
MAX_UNKNOWN_HOST_SECONDS = 120.0
"""The same for a repo whose host is unknown, because its identity was not looked up yet: anyone can invent DIDs, and a
real account must not wait behind all of them."""
MAX_HOSTS = 10_000
"""Hosts, registered domains and network addresses of which durations and rates are remembered."""

_NEWEST_WEIGHT = 0.2  # of the newest duration, in the moving average of a limit key
_MAX_GROWTH = 4.0  # a duration counts for at most this multiple of the mean before it


class Phase(StrEnum):
    """The present step of a resync, as the status page shows it."""

    IDENTITY = "look up the identity"
    LATEST_COMMIT = "ask the host for the latest commit"
    DOWNLOAD = "download the export"
    QUEUE = "wait for its turn to be written"
    VERIFY = "verify the export"
    WRITE = "write the differences"


class PostponedError(Exception):
    """The resync does not begin or does not go on now. This does not count as an attempt of the repo.

    Attributes:
        until: Unix seconds from which the repo may be claimed again; None: immediately.
        failure: Why, if there is another reason than a lack of free slots.
    """

    def __init__(self, until: float | None = None, failure: UnavailableError | None = None) -> None:
        super().__init__(until, failure)
        self.until = until
        self.failure = failure

    @property
    def result(self) -> str:
        """The result for the metrics."""
        return "postponed" if self.failure is None else self.failure.reason


@dataclass(slots=True, eq=False)
class Resync:
    """A claimed repo whose resync runs, and what it occupies."""

    claimed: Repo
    started_at: float  # when the resync began, in Unix seconds
    host: str = UNKNOWN_HOST
    limit_keys: frozenset[str] = frozenset()  # its host, registered domain and network address
    reserved: int = 0  # the bytes that its export may have; 0 as long as it occupies a worker
    download: ExportDownload | SparseDownload | None = None  # the export while it is being fetched, and after that
    phase: Phase = Phase.IDENTITY
    phase_since: float = 0.0  # when the phase began, in Unix seconds
    preloaded: bool = False  # True if its identity was loaded into memory, unless none is stored
    deadline: asyncio.Timeout | None = None  # when the attempt ends at the latest; None if it does not run
    subscribed: int | None = None  # its host was subscribed before the request, if a relay withholds the account
    ended: PostponedError | None = None  # it is slow; it occupies what it has until its attempt is cleaned up

    @property
    def large(self) -> bool:
        """True if its export is large, so that it occupies no worker."""
        return self.reserved > 0

    @property
    def rate(self) -> float:
        """The rate of its export in bytes per second: zero before the response, infinity if the export is complete."""
        if self.download is None:
            return 0.0
        return math.inf if self.download.complete else self.download.rate

    def enter(self, phase: Phase) -> None:
        """Begin a step."""
        self.phase, self.phase_since = phase, time()

    def end(self, now: float) -> bool:
        """End it because it is slow; return False if it ends already, for example because its time is over."""
        if self.deadline is None or self.deadline.expired() or self.ended:
            return False
        self.ended = self.postponed(now)
        self.deadline.reschedule(asyncio.get_running_loop().time())
        return True

    def postponed(self, now: float) -> PostponedError:
        """Return until when its repo waits, because it makes room for others: longer than it has run."""
        return PostponedError(now + min(PAUSE_PER_SECOND * (now - self.started_at), MAX_PAUSE_SECONDS))


@dataclass(slots=True)
class _LimitKey:
    """The state of a host, registered domain or network address. Times are Unix seconds."""

    mean_seconds: float = 0.05  # of its resyncs; an estimate until one has ended
    next_retry: float = 0.0
    latest_rate: float | None = None  # bytes per second of the latest complete export
    server: str | None = None  # the network address from which a host sends exports


class Shares:
    """Counts what the resyncs of one process occupy, and schedules those that find nothing free.

    Repos beyond a share are postponed one behind the other, at the rate at which the host has answered so far. So they
    do not return to the front of the queue again and again, ahead of repos of other hosts. Times are Unix seconds.
    """

    def __init__(self, workers: int, fair_time: float = 10.0, large_bytes: int = LARGE_EXPORTS_BYTES) -> None:
        """Create the shares. An export may be slow when its resync has run for `fair_time` seconds."""
        self._workers = workers
        self._bytes = large_bytes
        self._fair_time = fair_time
        self._keys = BoundedDict[str, _LimitKey](MAX_HOSTS)
        self.running: list[Resync] = []

    @property
    def free_workers(self) -> int:
        """The number of workers without a resync."""
        return self._workers - sum(not resync.large for resync in self.running)

    def admit(self, claimed: Repo, host: str, now: float) -> Resync:
        """Occupy a worker for a repo that was claimed at `now`. `host` may be `UNKNOWN_HOST`.

        Raises:
            PostponedError: No worker is free, or a limit key has its share. The next three methods raise it, too.
        """
        resync = Resync(claimed, now, phase_since=now)
        self.count_for(resync, host, now)
        if self.free_workers <= 0:
            raise PostponedError
        self.running.append(resync)
        return resync

    def opened(self, resync: Resync, download: ExportDownload | SparseDownload, now: float) -> None:
        """Let the resync also count for the network address that sends its export, and observe how much arrives."""
        if download.server is not None:
            self._key(resync.host).server = download.server
            self.count_for(resync, resync.host, now)
        resync.download = download

    def reserve(self, resync: Resync, now: float) -> None:
        """Let the export have `LARGE_BYTES` more. It is large, and occupies no worker any more.

        If there are too many, or too few bytes are left, the slowest of the large exports ends.
        """
        wanted = max(resync.reserved, LARGE_BYTES) + LARGE_BYTES
        others = [other for other in self.running if other.large and other is not resync and not other.ended]
        shares = [[other for other in others if key in other.limit_keys] for key in resync.limit_keys]
        if any(_exceed(same, wanted, int(self._bytes * HOST_SHARE)) for same in shares):
            raise resync.postponed(now)
        if len(others) >= self._workers or _exceed(others, wanted, self._bytes):
            slowest = self._slowest([resync, *others], now)
            if slowest is None or slowest is resync or not slowest.end(now):
                raise resync.postponed(now)
        resync.reserved = wanted

    def make_room(self, now: float) -> None:
        """End the slowest export if all workers are occupied, more than half of them by slow ones."""
        small = [resync for resync in self.running if not resync.large]
        if self.free_workers <= 0 and not any(resync.ended for resync in small):
            slowest = self._slowest(small, now, unless=self._workers // 2)
            if slowest is not None:
                slowest.end(now)

    def release(self, resync: Resync, now: float) -> None:
        """Free all that a resync has occupied, because it has ended."""
        if resync.download is not None and resync.download.complete:
            self._key(f"domain {registered_domain(resync.host)}").latest_rate = resync.download.rate
        self._leave(resync, resync.limit_keys, now)
        self.running.remove(resync)

    def _key(self, name: str) -> _LimitKey:
        key = self._keys.get(name) or _LimitKey()
        self._keys[name] = key  # so that the least recently used one is forgotten
        return key

    def count_for(self, resync: Resync, host: str, now: float) -> None:
        """Let the resync count for this host and what is known of it."""
        known, keys = self._keys.get(host), frozenset({host})
        if host != UNKNOWN_HOST:
            keys |= {f"domain {registered_domain(host)}"}
        if known and known.server:
            keys |= {f"address {known.server}"}
        if busy := [key for key in keys - resync.limit_keys if len(self._on_workers(key)) >= self._limit(key)]:
            raise PostponedError(max(self._schedule_retry(key, now) for key in busy))
        self._leave(resync, resync.limit_keys - keys, now)
        resync.host, resync.limit_keys = host, keys

    def _leave(self, resync: Resync, names: Iterable[str], now: float) -> None:
        """Count the duration of the resync for the keys that it leaves. A large one says little about the others."""
        for key in [self._key(name) for name in names if not resync.large]:
            seconds = min(now - resync.started_at, _MAX_GROWTH * key.mean_seconds)
            key.mean_seconds += _NEWEST_WEIGHT * (seconds - key.mean_seconds)

    def _limit(self, name: str) -> int:
        """Return how many workers the key may have. `UNKNOWN_HOST` has more: the lookups may have different hosts."""
        if name == UNKNOWN_HOST:
            return max(1, self._workers - max(1, self._workers // 4))
        return max(1, int(self._workers * HOST_SHARE))

    def _on_workers(self, name: str) -> list[Resync]:
        return [resync for resync in self.running if name in resync.limit_keys and not resync.large]

    def _schedule_retry(self, name: str, now: float) -> float:
        """Return when to claim the next repo that found no free slot; each call schedules one repo.

        The slots become free at the mean duration, or more slowly if all of them are occupied for longer than that.
        """
        key, youngest = self._key(name), now - max(resync.started_at for resync in self._on_workers(name))
        longest = now + (MAX_UNKNOWN_HOST_SECONDS if name == UNKNOWN_HOST else MAX_WAIT_SECONDS)
        last = key.next_retry if key.next_retry <= longest else 0.0  # later: the clock was set back
        key.next_retry = min(max(now, last) + max(key.mean_seconds, youngest) / self._limit(name), longest)
        return key.next_retry

    def _slowest(self, resyncs: Sequence[Resync], now: float, unless: int = 0) -> Resync | None:
        """Return the slowest incomplete export after the fair time; None if at most `unless` are slow.

        The usual rate is the mean of the latest rates of registered domains, so that an owner of many names or exports
        counts once, and a slow network of this machine makes no export slow. Without any, each export is slow.
        """
        candidates = [resync for resync in resyncs if resync.started_at + self._fair_time <= now]
        if len(candidates) <= unless:
            return None
        rates = [key.latest_rate for key in self._keys.values() if key.latest_rate is not None]
        below = SLOW_SHARE * sum(rates) / len(rates) if rates else math.inf
        slow = [resync for resync in candidates if resync.rate < below]
        return min(slow, key=lambda resync: (resync.rate, resync.started_at)) if len(slow) > unless else None


def _exceed(others: Sequence[Resync], wanted: int, limit: int) -> bool:
    """Return True if the reservation would exceed the limit. A single one never does, so that each export fits."""
    return bool(others) and sum(other.reserved for other in others) + wanted > limit
