"""Plan the deletion of stored records that the scope no longer selects."""

from collections.abc import Mapping, Sequence

from indexer.sync.changes import RecordKey
from indexer.sync.plans import RecordChange, RepoWrite
from indexer.sync.repo_state import Repo, SyncStatus
from indexer.sync.repo_transitions import amend


def plan_narrowing(repos: Mapping[str, Repo], keys: Sequence[RecordKey]) -> tuple[RepoWrite, ...]:
    """Return one write per repo that deletes these records.

    A repo in progress is left out: its resync compares all stored records. So is one without a head: its erasure or its
    next resync does.

    Args:
        repos: The rows of the repos.
        keys: The records, which the scope does not select.
    """
    deletes: dict[str, list[RecordChange]] = {}
    for did, collection, rkey in keys:
        repo = repos.get(did)
        if repo is not None and repo.head is not None and repo.sync_status is not SyncStatus.IN_PROGRESS:
            deletes.setdefault(did, []).append(RecordChange("delete", collection, rkey, None))
    return tuple([RepoWrite(repos[did].version, amend(repos[did]), tuple(gone)) for did, gone in deletes.items()])
