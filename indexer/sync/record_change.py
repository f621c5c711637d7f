"""Turn a verified change of a repo's tree into the change of a stored record."""

from indexer.atproto.record import Problem, decode_record
from indexer.atproto.syntax import split_path
from indexer.errors import UpstreamError
from indexer.sync.plans import Action, RecordChange
from indexer.sync.policy import Policy
from indexer.sync.verify import VerifiedChange


def selected_path(path: bytes, policy: Policy) -> tuple[str, str] | None:
    """Return collection and record key; None if the path is outside the selected collections or breaks the syntax.

    A path with bad syntax in a signed tree still takes part in every proof. It only names no record
    (docs/protocol.md#merkle-search-tree).
    """
    try:
        collection, rkey = split_path(path.decode())
    except (UpstreamError, UnicodeDecodeError):
        return None
    return (collection, rkey) if policy.collections.matches(collection) else None


def record_change(change: VerifiedChange, rev: str, policy: Policy) -> RecordChange | None:
    """Return the change to store; None if the path is not selected."""
    names = selected_path(change.path, policy)
    if names is None:
        return None
    collection, rkey = names
    if change.new is None:
        return RecordChange("delete", collection, rkey, rev)
    action: Action = "create" if change.old is None else "update"
    if not policy.store_values:
        return RecordChange(action, collection, rkey, rev, change.new)
    if change.block is None:
        return RecordChange(action, collection, rkey, rev, change.new, problem=Problem.MISSING)
    value = decode_record(change.block, collection, policy.limits)
    return RecordChange(action, collection, rkey, rev, change.new, value.json, value.problem, value.original)
