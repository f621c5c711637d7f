from indexer.service.resync.admission import UNKNOWN_HOST, Admission, Postponed, Slot


def admitted(result: Slot | Postponed) -> Slot:
    assert isinstance(result, Slot)
    return result


def test_one_host_gets_three_quarters_of_the_workers() -> None:
    admission = Admission(workers=8)
    for number in range(6):
        admitted(admission.admit(f"did{number}", "slow", 100.0))
    postponed = admission.admit("did6", "slow", 100.0)
    assert isinstance(postponed, Postponed)
    assert postponed.until is not None
    assert postponed.until > 100.0
    admitted(admission.admit("did7", "other", 100.0))
    assert admission.free_workers == 1


def test_repo_without_a_free_worker_may_be_claimed_again_immediately() -> None:
    admission = Admission(workers=1)
    admitted(admission.admit("one", "a", 0.0))
    assert admission.admit("two", "b", 0.0) == Postponed()


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


def test_slot_moves_to_the_host_that_the_lookup_finds() -> None:
    admission = Admission(workers=4)
    slots = [admitted(admission.admit(f"did{number}", UNKNOWN_HOST, 0.0)) for number in range(3)]
    for slot in slots:
        assert admission.change_host(slot, "one.example", 1.0) is None
    late = admitted(admission.admit("late", UNKNOWN_HOST, 1.0))
    postponed = admission.change_host(late, "one.example", 1.0)
    assert postponed is not None
    assert late.host == UNKNOWN_HOST, "it keeps its slot until it is released"
    for slot in (*slots, late):
        admission.release(slot, 2.0)
    assert admission.free_workers == 4
    assert admission.occupied == []


def test_paused_host_admits_nothing_until_its_end() -> None:
    admission = Admission(workers=4)
    admission.pause_host("one.example", 60.0)
    postponed = admission.admit("did", "one.example", 10.0)
    assert isinstance(postponed, Postponed)
    assert postponed.until is not None
    assert postponed.until >= 60.0
    admitted(admission.admit("did", "one.example", 61.0))
