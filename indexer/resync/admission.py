"""Decide whether a claimed repo starts its resync now: slots of workers, of its host, and of large repos.

A slow resync is set aside: it continues, but no longer occupies a worker. If too many are set aside, the slowest ones
end. A small new repo that waits for a shared transaction may free its slots, too: it needs the database only.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from indexer.concurrency.bounded_dict import BoundedDict
from indexer.errors import UnavailableError
from indexer.net.http import registered_domain
from indexer.net.pds import ExportDownload
from indexer.resync.host_slots import MAX_WAIT_SECONDS, HostSlots
from indexer.resync.large_repo_slots import LargeRepoSlots, large_repo_slot_count
from indexer.resync.phase import Phase
from indexer.resync.usual_rate import UsualRate

UNKNOWN_HOST = ""
MAX_UNKNOWN_HOST_SECONDS = 120.0
"""The longest wait of a repo whose host is unknown, because its identity was not looked up yet: anyone can invent DIDs,
and a real account must not wait behind all of them."""
PAUSE_PER_SECOND = 10.0
"""Seconds that a repo waits after it was ended because it is slow, for each second that its resync ran."""
_LARGE = "large"
"""Stands for the slots of large repos among limit keys."""
MAX_SERVERS = 10_000
"""Hosts whose network address is remembered."""
MAX_WAITING = 10_000
"""Postponed repos that are remembered, to start them early. The others start when their time has come."""
MAX_EXAMINED = 256
"""Postponed repos that one search for repos to start early looks at."""


@dataclass(frozen=True, slots=True)
class Postponed:
    """The resync does not begin or does not continue now. This does not count as an attempt of the repo.

    Attributes:
        until: Unix seconds from which it may be claimed again; None: immediately.
        large: True if its host is within its share of the slots for large repos, and none of these slots is free.
        failure: Why, if there is another reason than a lack of free slots.
    """

    until: float | None = None
    large: bool = False
    failure: UnavailableError | None = None

    @property
    def result(self) -> str:
        """The result for the metrics."""
        return "postponed" if self.failure is None else self.failure.reason


@dataclass(slots=True, eq=False)
class Slot:
    """The slots that one resync occupies: those of its host, and one for a worker or for large repos.

    It occupies neither a worker nor a slot for large repos if it is `aside` or `writing`.

    Attributes:
        started_at: When the resync began, in Unix seconds.
        limit_keys: When it began to occupy a slot of each of its limit keys: host, registered domain, network address.
        aside: True if it was set aside because it is slow, and no longer occupies a worker.
        writing: True if it only waits for a shared transaction, and occupies no slot of a worker or of its host.
        ended: True if it was ended because it is slow. It occupies its slots until its attempt is cleaned up.
        download: The export while it is being fetched.
        phase: The present step of the attempt.
        phase_since: When it began, in Unix seconds; 0: with the resync.
    """

    did: str
    started_at: float
    host: str
    limit_keys: dict[str, float] = field(default_factory=dict)
    large: bool = False
    aside: bool = False
    writing: bool = False
    ended: bool = False
    download: ExportDownload | None = None
    phase: Phase = Phase.IDENTITY
    phase_since: float = 0.0

    @property
    def on_worker(self) -> bool:
        """True if it occupies a worker."""
        return not (self.large or self.aside or self.writing)

    @property
    def rate(self) -> float:
        """The rate of its export in bytes per second: zero before the response, infinity if the export is complete."""
        if self.download is None:
            return 0.0
        return math.inf if self.download.complete else self.download.rate


class Admission:
    """Hands out the slots of one process. A host, registered domain or network address gets a share of the workers.

    Attributes:
        occupied: The slots in use.
    """

    def __init__(self, workers: int, share: float = 0.5, max_writing: int = 0) -> None:
        """Hand out the slots of `workers` workers. At most `max_writing` more repos wait for shared transactions."""
        self._workers = workers
        self._max_writing = max_writing
        # Repos whose host is not known yet count as one host, with more slots: their lookups may have different hosts.
        unknown = {UNKNOWN_HOST: max(1, workers - max(1, workers // 4))}
        self._hosts = HostSlots(max(1, int(workers * share)), unknown)
        large_slots = large_repo_slot_count(workers)
        self._large = LargeRepoSlots(large_slots)
        self._large_per_key = max(1, int(large_slots * share))
        self._servers = BoundedDict[str, str](MAX_SERVERS)
        self._usual_rate = UsualRate()
        self._waiting = BoundedDict[str, tuple[str, float]](MAX_WAITING)
        self.occupied: list[Slot] = []

    @property
    def free_workers(self) -> int:
        """The number of workers without a resync.

        Large repos, slow exports and repos that wait for a shared transaction do not occupy a worker.
        """
        return self._workers - sum(slot.on_worker for slot in self.occupied)

    def admit(self, did: str, host: str, now: float) -> Slot | Postponed:
        """Occupy slots for a repo that was claimed at `now`. `host` may be `UNKNOWN_HOST`."""
        slot, limit_keys = Slot(did, now, host), self._limit_keys_of(host)
        self._waiting.pop(did, None)
        if postponed := self._unless_free(did, host, limit_keys, now):
            return postponed
        if self._large.knows(did):
            if postponed := self._acquire_large(slot, limit_keys, now):
                return postponed
        elif self.free_workers <= 0:
            return Postponed()
        self._exchange(slot, limit_keys, now)
        self.occupied.append(slot)
        return slot

    def change_host(self, slot: Slot, host: str, now: float) -> Postponed | None:
        """Exchange the host's slots once the identity is known, or because the account moved."""
        if host == slot.host:
            return None
        limit_keys = self._limit_keys_of(host)
        if postponed := self._unless_free(slot.did, host, limit_keys - slot.limit_keys.keys(), now):
            return postponed
        self._exchange(slot, limit_keys, now)
        slot.host = host
        return None

    def open_export(self, slot: Slot, download: ExportDownload, now: float) -> Postponed | None:
        """Occupy a slot of the network address that sends the export, and observe how much arrives."""
        if download.server is not None:
            self._servers[slot.host] = download.server
            limit_keys = self._limit_keys_of(slot.host)
            if postponed := self._unless_free(slot.did, slot.host, limit_keys - slot.limit_keys.keys(), now):
                return postponed
            self._exchange(slot, limit_keys, now)
        slot.download = download
        return None

    def enlarge(self, slot: Slot, now: float) -> Postponed | None:
        """Exchange the worker's slot for one for large repos, because the export turned out to be large.

        A limit key gets the same share of these slots as of the workers.
        """
        return None if slot.large else self._acquire_large(slot, slot.limit_keys, now)

    def start_writing(self, slot: Slot, now: float) -> bool:
        """Free the slots of a resync that only waits for a shared transaction from now on.

        Return False if it keeps them, because too many wait already.
        """
        if slot.large or sum(other.writing for other in self.occupied) >= self._max_writing:
            return False
        slot.aside, slot.writing = False, True
        self._exchange(slot, frozenset(), now)
        return True

    def slow_large(self, fair_time: float, now: float) -> Slot | None:
        """Return the slowest large export that is slower than usual after `fair_time` seconds, or None."""
        large = [slot for slot in self.occupied if slot.large and slot.started_at + fair_time <= now]
        return _slowest(large, self._usual_rate.slow)

    def slowest_on_worker(self, fair_time: float, now: float) -> Slot | None:
        """Return the slowest resync that has occupied a worker for `fair_time` seconds without a complete export."""
        waiting = [slot for slot in self.occupied if slot.on_worker and slot.started_at + fair_time <= now]
        return _slowest(waiting, math.inf)

    def set_aside(self, slot: Slot) -> bool:
        """Set a resync aside; return False if as many resyncs as there are workers are set aside already."""
        if sum(other.aside for other in self.occupied) >= self._workers:
            return False
        slot.aside = True
        return True

    def slower_than_usual(self, slot: Slot) -> Slot | None:
        """Return the slowest of `slot` and the resyncs set aside; None if none of them is slower than usual."""
        aside = [other for other in self.occupied if other.aside]
        return _slowest([slot, *aside], self._usual_rate.slow)

    def postpone_slow(self, slot: Slot, now: float) -> Postponed:
        """Return when to claim the repo of a slow resync again. The resync is ended, and leaves its worker now."""
        slot.aside = slot.ended = True
        wait = min(PAUSE_PER_SECOND * (now - slot.started_at), MAX_WAIT_SECONDS)
        return Postponed(max(self._hosts.schedule_retry(slot.host, now), now + wait))

    def release(self, slot: Slot, now: float) -> None:
        """Free all slots of a resync that ended."""
        if slot.download is not None and slot.download.complete:
            self._usual_rate.add(slot.host, slot.download.rate)
        self._exchange(slot, frozenset(), now)
        if slot.large:
            self._large.release(slot.started_at, now)
        self.occupied.remove(slot)

    def pause_host(self, host: str, until: float, now: float) -> None:
        """Start no resync at the host before `until` (Unix seconds)."""
        self._hosts.pause(host, until, now)

    @property
    def has_waiting(self) -> bool:
        """True if repos are remembered that found no free slot."""
        return bool(self._waiting)

    def startable(self, count: int, now: float) -> dict[str, float]:
        """Forget and return at most `count` repos that found no free slot, and would find one now, with their times.

        The time until which a repo was postponed is an estimate from the durations of earlier resyncs. Slots may become
        free much sooner.
        """
        startable, taken = dict[str, float](), Counter[str]()
        for did, (host, until) in list(islice(self._waiting.items(), MAX_EXAMINED)):
            if len(startable) >= count:
                break
            limit_keys = self._limit_keys_of(host) | ({_LARGE} if self._large.knows(did) else frozenset())
            if until <= now:  # it is due, and any process may claim it
                del self._waiting[did]
            elif all(self._free(key, now) > taken[key] for key in limit_keys):
                del self._waiting[did]
                startable[did] = until
                taken.update(limit_keys)
            else:
                self._waiting.move_to_end(did)
        return startable

    def _free(self, limit_key: str, now: float) -> int:
        return self._large.free(now) if limit_key == _LARGE else self._hosts.free(limit_key, now)

    def _acquire_large(self, slot: Slot, limit_keys: Iterable[str], now: float) -> Postponed | None:
        self._large.remember(slot.did)
        counts = Counter(key for other in self.occupied if other.large for key in other.limit_keys)
        within_share = all(counts[key] < self._large_per_key for key in limit_keys)
        if not (within_share and self._large.try_acquire(slot.started_at, now)):
            until = self._large.schedule_retry(now)
            if within_share:
                self._waiting[slot.did] = slot.host, until
            return Postponed(until, large=within_share)
        slot.large, slot.aside = True, False
        return None

    def _limit_keys_of(self, host: str) -> frozenset[str]:
        """Return the limit keys of the host: the names under which its resyncs are counted."""
        if host == UNKNOWN_HOST:
            return frozenset({UNKNOWN_HOST})
        server = self._servers.get(host)
        limit_keys = {host, f"domain {registered_domain(host)}"}
        return frozenset(limit_keys | {f"address {server}"} if server else limit_keys)

    def _unless_free(self, did: str, host: str, limit_keys: Iterable[str], now: float) -> Postponed | None:
        """Postpone the repo if one of the limit keys has no free slot."""
        busy = [key for key in sorted(limit_keys) if not self._hosts.is_free(key, now)]
        if not busy:
            return None
        until = max(self._hosts.schedule_retry(key, now) for key in busy)
        if host == UNKNOWN_HOST:
            until = min(until, now + MAX_UNKNOWN_HOST_SECONDS)
        self._waiting[did] = host, until
        return Postponed(until)

    def _exchange(self, slot: Slot, limit_keys: frozenset[str], now: float) -> None:
        for key in slot.limit_keys.keys() - limit_keys:
            self._hosts.release(key, slot.limit_keys.pop(key), now)
        for key in limit_keys - slot.limit_keys.keys():
            self._hosts.acquire(key, now)
            slot.limit_keys[key] = now


def _slowest(slots: Sequence[Slot], below: float) -> Slot | None:
    """Return the slot with the lowest rate, the longest running one of several; None if no rate is below `below`.

    Also return None if one of them was ended and is not released yet: it makes room soon.
    """
    if any(slot.ended for slot in slots):
        return None
    slow = [slot for slot in slots if slot.rate < below]
    return min(slow, key=lambda slot: (slot.rate, slot.started_at), default=None)
