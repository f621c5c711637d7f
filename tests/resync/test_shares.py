from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.net.pds.pds_client import LARGE_BYTES
from indexer.resync.shares import MAX_HOSTS, MAX_WAIT_SECONDS, UNKNOWN_HOST, PostponedError, Resync, Shares
from indexer.sync.repo import Repo


class Deadline:
    """The time limit of an attempt that runs."""

    def expired(self) -> bool:
        return False

    def reschedule(self, _when: float) -> None: ...


@dataclass
class Download:
    """An export that is being fetched from `server`."""

    server: str | None
    rate: float = 1_500.0
    complete: bool = False


def started(shares: Shares, did: str, host: str, now: float, download: Download) -> Resync:
    """Admit a repo and open its export."""
    resync = shares.admit(Repo(did), host, now)
    export: Any = download
    deadline: Any = Deadline()
    resync.deadline = deadline
    try:
        shares.opened(resync, export, now)
    except PostponedError:
        shares.release(resync, now)
        raise
    return resync


def wait_of(shares: Shares, did: str, host: str, now: float) -> float:
    """Return how long a repo waits that finds no free slot."""
    with pytest.raises(PostponedError) as postponed:
        shares.admit(Repo(did), host, now)
    return (postponed.value.until or now) - now


def resynced(shares: Shares, host: str, seconds: float, now: float = 0.0) -> None:
    """Let 50 resyncs of a host take so long, one after the other."""
    for _ in range(50):
        shares.release(shares.admit(Repo("did"), host, now - seconds), now)


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
    shares = Shares(workers=8)
    running = [started(shares, f"did{n}", hosts[n % len(hosts)], 100.0, Download(server)) for n in range(4)]
    for number in range(4, 12):
        with pytest.raises(PostponedError) as postponed:
            started(shares, f"did{number}", hosts[number % len(hosts)], 100.0, Download(server))
        assert postponed.value.until is not None
        assert postponed.value.until > 100.0
    for number in range(4):
        host, export = f"{number}.other{number}.example", Download(f"192.0.2.{number + 9}:443")
        running.append(started(shares, f"other{number}", host, 100.0, export))
    assert shares.free_workers == 0
    for resync in running:
        shares.release(resync, 101.0)
    shares.admit(Repo("did0"), hosts[0], 102.0)


def test_network_address_is_remembered_for_the_next_repo_of_the_host() -> None:
    shares = Shares(workers=4)
    for number in range(2):
        started(shares, f"did{number}", f"pds.name{number}.example", 0.0, Download("192.0.2.1:443"))
    with pytest.raises(PostponedError):
        started(shares, "did2", "pds.name2.example", 0.0, Download("192.0.2.1:443"))
    assert wait_of(shares, "did3", "pds.name2.example", 1.0) > 0, "without a request"


def test_repos_that_wait_return_at_the_rate_of_their_host() -> None:
    shares = Shares(workers=6)
    resynced(shares, "slow", 30.0, now=100.0)
    for number in range(3):
        shares.admit(Repo(f"did{number}"), "slow", 100.0)
    waits = [wait_of(shares, f"waiting{number}", "slow", 100.0) for number in range(10)]
    steps = [later - earlier for earlier, later in pairwise(waits)]
    assert all(9.0 < step < 10.1 for step in steps), "30 seconds each, three at a time"


def test_longest_wait_is_bounded_also_after_the_clock_was_set_back() -> None:
    shares = Shares(workers=6)
    resynced(shares, "huge", 1_000.0, now=86_400.0)
    for number in range(3):
        shares.admit(Repo(f"did{number}"), "huge", 86_400.0)
    assert max(wait_of(shares, f"waiting{n}", "huge", 86_400.0) for n in range(100)) == MAX_WAIT_SECONDS
    assert wait_of(shares, "waiting", "huge", 0.0) < 1_000.0


def test_running_resyncs_count_before_any_has_ended() -> None:
    shares = Shares(workers=6)
    for number in range(3):
        shares.admit(Repo(f"did{number}"), "hangs", 100.0)
    assert wait_of(shares, "first", "hangs", 100.1) < 0.1
    assert [round(wait_of(shares, f"waiting{n}", "hangs", 160.0)) for n in range(3)] == [20, 40, 60]


def test_one_slow_resync_delays_only_its_share_of_the_others() -> None:
    shares = Shares(workers=8)
    resynced(shares, "host", 0.1)
    shares.admit(Repo("slow"), "host", 0.0)
    for number in range(3):
        shares.admit(Repo(f"did{number}"), "host", 500.0)
    assert max(wait_of(shares, f"waiting{number}", "host", 500.0) for number in range(100)) < 100 * 0.1 / 3 + 0.1


def test_slow_resync_that_ended_delays_the_others_little() -> None:
    shares = Shares(workers=8)
    resynced(shares, "host", 0.1)
    shares.release(shares.admit(Repo("slow"), "host", 0.0), 500.0)
    for number in range(4):
        shares.admit(Repo(f"did{number}"), "host", 500.0)
    assert max(wait_of(shares, f"waiting{number}", "host", 500.0) for number in range(100)) < 2 * 100 * 0.1 / 4


def test_repo_of_an_unknown_host_waits_at_most_two_minutes() -> None:
    """Two thousand DIDs that somebody made up do not delay the next attempt of a real one by an hour."""
    shares = Shares(workers=8)
    resyncs = [shares.admit(Repo(f"did{number}"), UNKNOWN_HOST, 100.0) for number in range(6)]
    shares.release(resyncs[0], 115.0)
    shares.admit(Repo("slow"), UNKNOWN_HOST, 115.0)
    for number in range(2_000):
        assert 0.0 < wait_of(shares, f"made up {number}", UNKNOWN_HOST, 115.0) <= 120.0


@given(st.lists(st.tuples(st.sampled_from(["a.a.example", "b.b.example"]), st.booleans()), max_size=60))
def test_shares_equal_a_plain_list_of_running_resyncs(steps: list[tuple[str, bool]]) -> None:
    shares, running = Shares(workers=6), list[Resync]()
    for host, starts in steps:
        of_host = [resync for resync in running if resync.host == host]
        if starts and len(of_host) < 3:
            running.append(shares.admit(Repo("did"), host, 1.0))
        elif starts:
            assert wait_of(shares, "did", host, 1.0) > 0
        elif of_host:
            running.remove(of_host[0])
            shares.release(of_host[0], 2.0)
        assert shares.running == running
        assert shares.free_workers == 6 - len(running)


def test_oldest_hosts_are_forgotten() -> None:
    shares = Shares(workers=6)
    resynced(shares, "host", 30.0)
    for number in range(MAX_HOSTS):
        shares.release(shares.admit(Repo("did"), f"host{number}.example", 0.0), 0.0)
    for number in range(3):
        shares.admit(Repo(f"did{number}"), "host", 0.0)
    assert wait_of(shares, "waiting", "host", 0.0) < 1.0


def fill(shares: Shares, names: str, rate: float, now: float = 0.0) -> list[Resync]:
    """Occupy a worker for each name, with an export of its own host at this rate."""
    return [started(shares, name, f"{name}.{name}.example", now, Download(f"{name}:443", rate)) for name in names]


def usual_rate(shares: Shares, rate: float) -> None:
    """Let a host send a complete export at this rate."""
    shares.release(started(shares, "usual", "usual.example", 0.0, Download(None, rate, complete=True)), 0.0)


async def test_slowest_export_ends_if_slow_ones_occupy_more_than_half_of_the_workers() -> None:
    shares = Shares(workers=4)
    usual_rate(shares, 100_000.0)
    slow, slowest, fast = fill(shares, "ab", 9_000.0), fill(shares, "c", 1_500.0), fill(shares, "d", 90_000.0)
    shares.make_room(9.0)
    assert not slowest[0].ended, "before the fair time"
    shares.make_room(10.0)
    assert slowest[0].ended is not None
    assert slowest[0].ended.until == 10.0 + 10 * 10.0
    shares.make_room(11.0)
    assert not any(resync.ended for resync in [*slow, *fast]), "one leaves its worker soon"
    shares.release(slowest[0], 12.0)
    fill(shares, "e", 90_000.0, now=12.0)
    shares.make_room(30.0)
    assert not any(resync.ended for resync in shares.running), "half of the workers have exports as fast as usual"


async def test_exports_as_fast_as_usual_and_complete_ones_never_end() -> None:
    shares = Shares(workers=2)
    usual_rate(shares, 5_000.0)
    resyncs = fill(shares, "a", 1_500.0) + fill(shares, "b", inf)
    shares.make_room(60.0)
    assert not any(resync.ended for resync in resyncs)


def enlarged(shares: Shares, resync: Resync, times: int, now: float) -> Resync:
    for _ in range(times):
        shares.reserve(resync, now)
    return resync


def test_large_export_leaves_its_worker_to_others() -> None:
    shares = Shares(workers=1)
    [resync] = fill(shares, "a", 1_500.0)
    assert shares.free_workers == 0
    shares.reserve(resync, 1.0)
    assert (resync.large, resync.reserved, shares.free_workers) == (True, 2 * LARGE_BYTES, 1)
    [other] = fill(shares, "b", 1_500.0, now=1.0)
    for ended in (other, resync):
        shares.release(ended, 2.0)
    assert (shares.free_workers, shares.running) == (1, [])


def test_bytes_of_large_exports_are_limited_unless_there_is_only_one() -> None:
    shares = Shares(workers=4, large_bytes=8 * LARGE_BYTES)
    [single, other] = fill(shares, "ab", 100_000.0)
    enlarged(shares, single, 20, 1.0)
    with pytest.raises(PostponedError) as postponed:
        shares.reserve(other, 2.0)
    assert postponed.value.until == 2.0 + 10 * 2.0
    assert not other.large
    shares.release(single, 3.0)
    shares.reserve(other, 3.0)
    assert other.large


def test_one_limit_key_gets_half_of_the_bytes_of_large_exports() -> None:
    shares = Shares(workers=16, large_bytes=8 * LARGE_BYTES)
    resyncs = [started(shares, f"did{n}", f"pds{n}.victim.example", 0.0, Download(None)) for n in range(3)]
    enlarged(shares, resyncs[0], 1, 1.0)
    enlarged(shares, resyncs[1], 1, 1.0)
    with pytest.raises(PostponedError):
        shares.reserve(resyncs[2], 20.0)
    assert not any(resync.ended for resync in resyncs), "no other export ends for a domain that has its share"
    enlarged(shares, started(shares, "other", "honest.example", 4.0, Download(None)), 1, 4.0)


async def test_slow_large_export_ends_for_another_large_one() -> None:
    shares = Shares(workers=4, large_bytes=4 * LARGE_BYTES)
    usual_rate(shares, 100_000.0)
    [slow], [other] = fill(shares, "s", 1_500.0), fill(shares, "b", 100_000.0)
    enlarged(shares, slow, 2, 1.0)
    with pytest.raises(PostponedError):
        shares.reserve(other, 9.0)
    shares.reserve(other, 10.0)
    assert slow.ended is not None
    with pytest.raises(PostponedError):
        enlarged(shares, fill(shares, "t", 1_000.0)[0], 3, 60.0)
    assert not other.ended, "the slowest one is the one that wants more"
