"""Slots for large repos, beside those of the workers, so that large exports do not delay small ones."""

from indexer.concurrency.bounded_dict import BoundedDict
from indexer.resync.host_slots import HostSlots

MAX_SLOTS = 8
"""Maximum number of slots: one thread verifies all large exports, and each write occupies a connection throughout."""
MAX_KNOWN = 50_000
"""Large repos that are remembered: about one repo in a thousand is large, and there are about forty million repos."""

_ALL_HOSTS = ""  # large repos of all hosts share one queue


def large_repo_slot_count(workers: int) -> int:
    """Return the number of concurrent resyncs of large repos, beside `workers` small ones."""
    return max(1, min(workers // 4, MAX_SLOTS))


class LargeRepoSlots:
    """Remembers which repos turned out to be large, and limits how many are resynced at a time. Times are Unix seconds.

    A repo that is known to be large gets a slot before its export is fetched, or is postponed. Only a repo
    that is not known yet may have the beginning of its export discarded. A new process knows no large repos.
    """

    def __init__(self, slots: int) -> None:
        self._slots = HostSlots(slots)
        self._known = BoundedDict[str, None](MAX_KNOWN)

    def knows(self, did: str) -> bool:
        """Return True if the repo was large before."""
        return did in self._known

    def remember(self, did: str) -> None:
        """Count the repo as large from now on."""
        self._known[did] = None

    def try_acquire(self, since: float, now: float) -> bool:
        """Occupy a slot if one is free, for a resync that began at `since`."""
        if free := self._slots.is_free(_ALL_HOSTS, now):
            self._slots.acquire(_ALL_HOSTS, since)
        return free

    def free(self, now: float) -> int:
        """Return the number of free slots."""
        return self._slots.free(_ALL_HOSTS, now)

    def release(self, since: float, now: float) -> None:
        """Free the slot of the resync that began at `since`."""
        self._slots.release(_ALL_HOSTS, since, now)

    def schedule_retry(self, now: float) -> float:
        """Return when to claim the next large repo that found no free slot; each call schedules one repo."""
        return self._slots.schedule_retry(_ALL_HOSTS, now)
