import pytest

from indexer.live.repo_row_cache import MAX_AGE_SECONDS, RepoRowCache
from indexer.sync.repo import Repo, SyncStatus
from tests.db.repo_rows import did, synchronized


class Clock:
    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


def test_row_is_returned_as_it_was_written_last_until_it_is_dropped() -> None:
    cache = RepoRowCache()
    cache.put([synchronized("ada"), synchronized("ben")])
    cache.put([synchronized("ada", version=2)])
    assert cache.rows([did("ada"), did("cleo")]) == {did("ada"): synchronized("ada", version=2)}
    cache.drop([did("ada"), did("never cached")])
    assert cache.rows([did("ada"), did("ben")]).keys() == {did("ben")}
    cache.clear()
    assert cache.rows([did("ben")]) == {}


@pytest.mark.parametrize(
    "repo",
    [
        synchronized("ada", sync_status=SyncStatus.DESYNCHRONIZED),
        synchronized("ada", sync_status=SyncStatus.IN_PROGRESS),
        synchronized("ada", active=False),
        synchronized("ada", tracked=False),
    ],
)
def test_other_repos_are_not_cached_and_replace_a_cached_row(repo: Repo) -> None:
    cache = RepoRowCache()
    cache.put([synchronized("ada")])
    cache.put([repo])
    assert (cache.rows([did("ada")]), len(cache)) == ({}, 0)


def test_oldest_rows_make_room() -> None:
    cache = RepoRowCache(max_rows=3)
    cache.put([synchronized(number) for number in range(3)])
    cache.put([synchronized(0, version=2)])
    cache.put([synchronized(3)])
    assert cache.rows([did(number) for number in range(4)]).keys() == {did(2), did(0), did(3)}


def test_row_is_not_used_long_after_it_was_written() -> None:
    clock = Clock()
    cache = RepoRowCache(clock=clock)
    cache.put([synchronized("ada")])
    clock.now += MAX_AGE_SECONDS - 1
    assert cache.rows([did("ada")]), "reading a row does not make it younger"
    clock.now += 2
    assert cache.rows([did("ada")]) == {}
