"""The row of a repo."""

from typing import Any

from indexer.reasons import Desync, FetchFailure
from indexer.sync.repo import Head, Repo, SyncStatus

BEFORE = Repo(
    "did:plc:aaaaaaaaaaaaaaaaaaaaaaaa",
    version=3,
    sync_status=SyncStatus.SYNCHRONIZED,
    sync_reason=None,
    head=Head("3laaaaaaaaa22", b"data", b"commit"),
)
HEAD = Head("3lbbbbbbbbb22", b"other data", b"other commit")


def test_row_advances_if_only_the_head_changes() -> None:
    assert BEFORE._replace(version=7, head=HEAD).advances(BEFORE)


def test_row_with_another_change_does_not_advance() -> None:
    for name in {*Repo._fields} - {"version", "head"}:
        values: dict[str, Any] = {name: "changed"}
        assert not BEFORE._replace(version=4, head=HEAD, **values).advances(BEFORE), name


def test_only_synchronized_repos_with_a_row_advance() -> None:
    new = BEFORE._replace(version=0)
    assert not BEFORE._replace(version=1, head=HEAD).advances(new)
    waiting = BEFORE._replace(sync_status=SyncStatus.DESYNCHRONIZED)
    assert not waiting._replace(version=4, head=HEAD).advances(waiting)


def test_repo_of_the_stream_counts_as_new_until_it_is_fetched() -> None:
    new = Repo("did:plc:aaaaaaaaaaaaaaaaaaaaaaaa", from_stream=True)
    assert new.counts_as_new
    assert new._replace(sync_reason=Desync.IDENTITY).counts_as_new
    for other in (
        new._replace(from_stream=False),
        new._replace(head=HEAD),
        new._replace(last_failure=FetchFailure.TIMEOUT, last_error="timeout: 30 s"),
        new._replace(sync_reason=Desync.REQUESTED),
    ):
        assert not other.counts_as_new
