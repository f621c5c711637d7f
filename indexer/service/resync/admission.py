"""Decide whether a claimed repo starts its resync now: slots of workers, of its host, and of large repos."""

from dataclasses import dataclass

from indexer.service.resync.host_slots import HostSlots
from indexer.service.resync.large_repo_slots import LargeRepoSlots, large_repo_slot_count

UNKNOWN_HOST = ""


@dataclass(frozen=True, slots=True)
class Postponed:
    """The repo finds no free slot. This does not count as an attempt of the repo.

    Attributes:
        until: Unix seconds from which it may be claimed again; None: immediately.
    """

    until: float | None = None


@dataclass(slots=True, eq=False)
class Slot:
    """The slots that one resync occupies: one of its host, and one of a worker or of the large repos.

    Attributes:
        started_at: When the resync began, in Unix seconds.
        host_since: When the slot at `host` was acquired.
    """

    did: str
    started_at: float
    host: str
    host_since: float
    large: bool = False


class Admission:
    """Hands out the slots of one process. One host gets at most three quarters of the workers.

    Attributes:
        occupied: The slots in use.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._hosts = HostSlots(max(1, workers - max(1, workers // 4)))
        self._large = LargeRepoSlots(large_repo_slot_count(workers))
        self.occupied: list[Slot] = []

    @property
    def free_workers(self) -> int:
        """The number of workers without a resync. Large repos do not occupy a worker."""
        return self._workers - sum(not slot.large for slot in self.occupied)

    def admit(self, did: str, host: str, now: float) -> Slot | Postponed:
        """Occupy slots for a repo that was claimed at `now`. `host` may be `UNKNOWN_HOST`."""
        if not self._hosts.is_free(host, now):
            return Postponed(self._hosts.schedule_retry(host, now))
        slot = Slot(did, now, host, now)
        if self._large.knows(did):
            if postponed := self.enlarge(slot, now):
                return postponed
        elif self.free_workers <= 0:
            return Postponed()
        self._hosts.acquire(host, now)
        self.occupied.append(slot)
        return slot

    def change_host(self, slot: Slot, host: str, now: float) -> Postponed | None:
        """Exchange the host's slot once the identity is known, or because the account moved."""
        if host == slot.host:
            return None
        if not self._hosts.is_free(host, now):
            return Postponed(self._hosts.schedule_retry(host, now))
        self._hosts.release(slot.host, slot.host_since, now)
        self._hosts.acquire(host, now)
        slot.host, slot.host_since = host, now
        return None

    def enlarge(self, slot: Slot, now: float) -> Postponed | None:
        """Exchange the worker's slot for one of the large repos, because the export turned out to be large."""
        if slot.large:
            return None
        if not self._large.try_acquire(slot.did, slot.started_at, now):
            return Postponed(self._large.schedule_retry(now))
        slot.large = True
        return None

    def release(self, slot: Slot, now: float) -> None:
        """Free all slots of a resync that ended."""
        self._hosts.release(slot.host, slot.host_since, now)
        if slot.large:
            self._large.release(slot.started_at, now)
        self.occupied.remove(slot)

    def pause_host(self, host: str, until: float) -> None:
        """Start no resync at the host before `until` (Unix seconds)."""
        self._hosts.pause(host, until)
