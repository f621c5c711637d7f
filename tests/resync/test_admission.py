from dataclasses import dataclass
from typing import Any

import pytest

from indexer.resync.admission import UNKNOWN_HOST, Admission, Postponed, Slot


def admitted(result: Slot | Postponed) -> Slot:
    assert isinstance(result, Slot)
    return result


@dataclass
class Download:
    """An export that is being fetched from `server`."""

    server: str | None
    rate: float = 1_500.0
    complete: bool = False


def started(admission: Admission, did: str, host: str, now: float, download: Download) -> Slot | Postponed:
    """Admit a repo and open its export."""
    slot = admission.admit(did, host, now)
    export: Any = download
    if isinstance(slot, Slot) and (postponed := admission.open_export(slot, export, now)):
        admission.release(slot, now)
        return postponed
    return slot


@pytest.mark.parametrize(
    ("hosts", "server"),
    [
        (["slow.example"], None),
        ([f"x{number}.victim.example" for number in range(12)], None),
        ([f"pds{number}.name{number % 3}.example" for number in range(12)], "192.0.2.1:443"),
    ],
)
def test_one_limit_key_gets_half_of_the_workers(hosts: list[str], server: str | None) -> None:
    """A host, the hosts of a registered domain, or the names of one machine."""
    admission = Admission(workers=8)
    slots = [started(admission, f"did{n}", hosts[n % len(hosts)], 100.0, Download(server)) for n in range(12)]
    assert [isinstance(slot, Slot) for slot in slots] == [True] * 4 + [False] * 8
    for postponed in slots[4:]:
        assert isinstance(postponed, Postponed)
        assert postponed.until is not None
        assert postponed.until > 100.0
    others = [
        started(admission, f"other{n}", f"{n}.other{n}.example", 100.0, Download(f"192.0.2.{n + 9}:443"))
        for n in range(4)
    ]
    assert all(isinstance(slot, Slot) for slot in others)
    assert admission.free_workers == 0
    for slot in [*slots[:4], *others]:
        admission.release(admitted(slot), 101.0)
    assert isinstance(admission.admit("did0", hosts[0], 102.0), Slot)


def test_network_address_is_remembered_for_the_next_repo_of_the_host() -> None:
    admission = Admission(workers=4)
    for number in range(2):
        admitted(started(admission, f"did{number}", f"pds.name{number}.example", 0.0, Download("192.0.2.1:443")))
    assert isinstance(started(admission, "did2", "pds.name2.example", 0.0, Download("192.0.2.1:443")), Postponed)
    assert isinstance(admission.admit("did3", "pds.name2.example", 1.0), Postponed), "without a request"


def fill(admission: Admission, names: str, rate: float, now: float = 0.0) -> dict[str, Slot]:
    """Occupy a worker for each name, with an export of its own host at this rate."""
    return {
        name: admitted(started(admission, name, f"{name}.{name}.example", now, Download(f"{name}:443", rate)))
        for name in names
    }


def test_slowest_resync_leaves_its_worker_after_the_fair_time_and_continues() -> None:
    admission = Admission(workers=3)
    slots = fill(admission, "a", 9_000.0) | fill(admission, "b", 1_500.0) | fill(admission, "c", 9_000.0)
    assert admission.slowest_on_worker(10.0, 9.0) is None
    slow = admission.slowest_on_worker(10.0, 10.0)
    assert slow is slots["b"]
    assert admission.set_aside(slow)
    assert admission.free_workers == 1
    assert slow in admission.occupied
    admission.release(slow, 11.0)
    assert len(admission.occupied) == 2


def test_only_exports_slower_than_usual_end_for_others() -> None:
    admission = Admission(workers=2)
    finished = fill(admission, "u", 100_000.0)["u"]
    assert finished.download is not None
    finished.download.complete = True  # type: ignore[misc]
    admission.release(finished, 1.0)
    for name, rate in [("a", 90_000.0), ("b", 1_500.0)]:
        assert admission.set_aside(fill(admission, name, rate)[name])
    slots = fill(admission, "c", 60_000.0) | fill(admission, "d", 70_000.0)
    assert not admission.set_aside(slots["c"]), "as many are set aside as there are workers"
    slowest = admission.slower_than_usual(slots["c"])
    assert slowest is not None
    assert slowest.did == "b"
    postponed = admission.postpone_slow(slowest, 20.0)
    assert postponed.until is not None
    assert postponed.until > 20.0
    admission.release(slowest, 20.0)
    assert admission.slower_than_usual(slots["c"]) is None, "all others are as fast as usual"


def test_repo_of_an_unknown_host_waits_at_most_two_minutes() -> None:
    """Twenty thousand DIDs that somebody made up do not delay the next attempt of a real one by an hour."""
    admission = Admission(workers=8)
    slots = [admitted(admission.admit(f"did{number}", UNKNOWN_HOST, 100.0)) for number in range(6)]
    admission.release(slots[0], 115.0)
    admitted(admission.admit("slow", UNKNOWN_HOST, 115.0))
    for number in range(20_000):
        postponed = admission.admit(f"made up {number}", UNKNOWN_HOST, 115.0)
        assert isinstance(postponed, Postponed)
        assert postponed.until is not None
        assert 115.0 < postponed.until <= 115.0 + 120.0


def test_large_repo_leaves_its_worker_to_others() -> None:
    admission = Admission(workers=1)
    slot = admitted(admission.admit("large", "a", 0.0))
    assert admission.enlarge(slot, 1.0) is None
    assert slot.large
    assert admission.enlarge(slot, 2.0) is None, "a second call changes nothing"
    assert admission.free_workers == 1


def test_second_large_repo_is_postponed_then_and_before_its_next_fetch() -> None:
    admission = Admission(workers=4)
    first, second = (admitted(admission.admit(did, did, 0.0)) for did in ("first", "second"))
    assert admission.enlarge(first, 1.0) is None
    postponed = admission.enlarge(second, 1.0)
    assert postponed is not None
    assert postponed.until is not None
    assert not second.large
    admission.release(second, 2.0)
    assert isinstance(admission.admit("second", "second", 2.0), Postponed)
    admission.release(first, 3.0)
    assert admitted(admission.admit("second", "second", 4.0)).large


def test_one_limit_key_gets_half_of_the_slots_of_large_repos() -> None:
    admission = Admission(workers=16)
    slots = [admitted(admission.admit(f"did{n}", f"pds{n}.victim.example", 0.0)) for n in range(3)]
    results = [admission.enlarge(slot, 1.0) for slot in slots]
    assert results[:2] == [None, None]
    assert results[2] is not None
    assert not results[2].large, "the limit key has its share, so no other resync ends for it"
    admission.release(slots[2], 2.0)
    assert isinstance(admission.admit("did2", "pds2.victim.example", 3.0), Postponed), "it is known to be large"
    other = admitted(admission.admit("other", "honest.example", 4.0))
    assert admission.enlarge(other, 4.0) is None


def test_slow_large_export_ends_for_another_large_repo() -> None:
    admission = Admission(workers=4)
    usual = fill(admission, "u", 100_000.0)["u"]
    assert usual.download is not None
    usual.download.complete = True  # type: ignore[misc]
    admission.release(usual, 1.0)
    slow = fill(admission, "s", 1_500.0)["s"]
    assert admission.enlarge(slow, 1.0) is None
    postponed = admission.enlarge(fill(admission, "b", 100_000.0)["b"], 2.0)
    assert postponed is not None
    assert postponed.large
    assert admission.slow_large(60.0, 59.0) is None
    assert admission.slow_large(60.0, 60.0) is slow
    admission.postpone_slow(slow, 60.0)
    assert admission.slow_large(60.0, 60.0) is None, "it leaves its slot soon"


def test_slot_moves_to_the_host_that_the_lookup_finds() -> None:
    admission = Admission(workers=4)
    *slots, late = [admitted(admission.admit(f"did{number}", UNKNOWN_HOST, 0.0)) for number in range(3)]
    for slot in slots:
        assert admission.change_host(slot, "one.example", 1.0) is None
    postponed = admission.change_host(late, "one.example", 1.0)
    assert postponed is not None
    assert late.host == UNKNOWN_HOST, "it keeps its slot until it is released"
    for slot in (*slots, late):
        admission.release(slot, 2.0)
    assert admission.free_workers == 4
    assert admission.occupied == []


def test_resync_that_waits_for_a_shared_transaction_occupies_neither_worker_nor_host() -> None:
    admission = Admission(workers=2, max_writing=2)
    first = admitted(admission.admit("did0", "one.example", 0.0))
    second = admitted(admission.admit("did1", "two.example", 0.0))
    assert (admission.free_workers, isinstance(admission.admit("did2", "one.example", 0.0), Postponed)) == (0, True)
    assert admission.start_writing(first, 1.0)
    assert (admission.free_workers, first.limit_keys) == (1, {})
    third = admitted(admission.admit("did2", "one.example", 1.0))
    for slot in (first, second, third):
        admission.release(slot, 2.0)
    assert (admission.free_workers, admission.occupied) == (2, [])


@pytest.mark.parametrize("max_writing", [0, 2])
def test_only_so_many_resyncs_wait_for_shared_transactions_without_a_worker(max_writing: int) -> None:
    admission = Admission(workers=3, max_writing=max_writing)
    slots = [admitted(admission.admit(f"did{n}", f"h{n}.example", 0.0)) for n in range(3)]
    assert [admission.start_writing(slot, 1.0) for slot in slots] == [n < max_writing for n in range(3)]
    assert admission.free_workers == max_writing
    assert slots[2].limit_keys, "it keeps the slots of its host, too"
    for slot in slots:
        admission.release(slot, 2.0)
    later = admitted(admission.admit("later", "h0.example", 3.0))
    assert admission.start_writing(later, 3.0) == (max_writing > 0), "an ended resync still counts"


def test_large_repo_keeps_its_slot_while_it_is_written() -> None:
    admission = Admission(workers=4, max_writing=4)
    large = fill(admission, "a", 1_500.0)["a"]
    assert admission.enlarge(large, 0.0) is None
    assert not admission.start_writing(large, 1.0)
    assert large.limit_keys
