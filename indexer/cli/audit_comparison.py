"""Compare the verified snapshot of a repo with its stored records."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from indexer.atproto.cid import CID_BYTES, cid_text
from indexer.atproto.record import Problem, decode_record
from indexer.db.exports import RecordRow
from indexer.reasons import FetchFailure
from indexer.sync.changes import selected_path
from indexer.sync.policy import Policy
from indexer.sync.resync import Difference, SnapshotDiff, without_value
from indexer.sync.scope import filter_of
from indexer.sync.verify import Snapshot

MAX_LISTED_DIFFERENCES = 100
"""Differences of one repo that are listed; the rest is only counted."""
BEING_FETCHED = "records of added collections are still being fetched"
"""Reason why a repo is not compared completely that lacks records of a collection that the scope added."""
BEING_DELETED = "records of removed collections are still being deleted"
"""Reason why a repo is not compared completely that has records of a collection that the scope removed."""
_NO_VALUE = (None, None, None)


@dataclass(frozen=True, slots=True)
class AuditDifference:
    """A difference between the database and the network.

    Attributes:
        subject: The AT-URI of the record, or the DID of the repo.
        description: What differs.
    """

    subject: str
    description: str


@dataclass(slots=True)
class RepoAudit:
    """The result of one repo.

    Attributes:
        records: Number of records compared.
        differences: Number of differences.
        listed: The first differences.
        reason_skipped: Why the repo, or a part of it, was not compared: the kind of reason, then a colon and details.
    """

    did: str
    records: int = 0
    differences: int = 0
    listed: list[AuditDifference] = field(default_factory=list)
    reason_skipped: str | None = None

    def add_difference(self, subject: str, description: str) -> None:
        """Count a difference, and list it if it is one of the first."""
        self.differences += 1
        if len(self.listed) < MAX_LISTED_DIFFERENCES:
            self.listed.append(AuditDifference(subject, description))


class RepoComparison:
    """Compares a snapshot with stored records that come in chunks, in path order. Holds one chunk at a time.

    Call `compare_chunk` for each chunk, then `finish`.

    Attributes:
        result: The result so far.
    """

    def __init__(self, snapshot: Snapshot, policy: Policy, scope_version: int) -> None:
        """Begin the comparison. `scope_version` is that of the stored repo (`Repo.scope_version`)."""
        self.result = RepoAudit(snapshot.did)
        self._snapshot = snapshot
        self._policy = policy
        self._diff = SnapshotDiff(entry for entry in snapshot.records() if selected_path(entry[0], policy))
        self._values_not_compared = 0
        self._complete = filter_of(policy.scope.added_until(scope_version))
        self._pending = Counter[str]()

    def compare_chunk(self, chunk: Sequence[RecordRow]) -> None:
        """Compare the next stored records.

        Raises:
            BrokenInvariantError: The stored records are out of path order.
        """
        self.result.records += len(chunk)
        matches = {record.path: self._value_matches(record) for record in chunk}
        # A wrong value is marked like a missing one, so that the merge reports it.
        entries = [(path, without_value(cid) if matches[path] is False else cid) for path, cid, *_ in chunk]
        for difference in self._diff.compare(entries):
            matches.pop(difference.path, None)
            self._add_difference(difference)
        self._values_not_compared += sum(match is None for match in matches.values())

    def finish(self) -> None:
        """Compare the rest of the snapshot, and complete the result."""
        for difference in self._diff.remaining():
            self._add_difference(difference)
        if self._values_not_compared:
            self._pending[FetchFailure.EXPORT_LACKS_RECORDS] = self._values_not_compared
        for reason, records in self._pending.most_common(1):
            self.result.reason_skipped = f"{reason}: {records} records"

    def _value_matches(self, record: RecordRow) -> bool | None:
        """Return True if the stored value is the value of the record's block; None if the export lacks the block.

        If values are not to be stored, only values from before that setting are compared.
        """
        stored = (record.value, record.problem, record.original)
        if stored == _NO_VALUE and not self._policy.store_values:
            return True
        block = self._snapshot.block_of(record.cid)
        if block is None:
            return True if record.problem == Problem.MISSING else None
        if record.problem == Problem.OMITTED:
            return True
        if record.problem == Problem.TOO_MANY_ITEMS:  # it also depends on the other records of its commit
            return record.original == block
        value = decode_record(block, _collection(record.path), self._policy.limits)
        return stored[1:] == value[1:] and equal_json(record.value, value.json)

    def _add_difference(self, difference: Difference) -> None:
        if (pending := self._pending_change(difference)) is not None:
            self._pending[pending] += 1
            return
        if difference.old is None:
            self.result.records += 1
        uri = f"at://{self.result.did}/{difference.path.decode()}"
        self.result.add_difference(uri, self._describe(difference))

    def _pending_change(self, difference: Difference) -> str | None:
        """Return why the daemon is still going to store or delete this record; None if it is not."""
        collection = _collection(difference.path)
        if difference.old is None:
            is_complete = self._complete is not None and self._complete.matches(collection)
            return None if is_complete else BEING_FETCHED
        is_selected = self._policy.scope.collections.matches(collection)
        return BEING_DELETED if difference.new is None and not is_selected else None

    def _describe(self, difference: Difference) -> str:
        stored, exported = difference.old, difference.new
        if stored is None:
            return "missing in the database"
        if exported is None:
            return "not in the repo"
        if stored == without_value(exported):
            return "different value"
        return f"different CID: database {cid_text(stored[:CID_BYTES])}, host {cid_text(exported)}"


def equal_json(one: str | None, other: str | None) -> bool:
    """Return True if both texts are equal as `jsonb`: numbers by value, objects in any order. None equals only None."""
    if one is None or other is None:
        return one is other
    try:
        return bool(_parse(one) == _parse(other))
    except RecursionError:  # the indexer never stores values that are nested so deeply
        return False


def _parse(text: str) -> Any:
    return json.loads(text, parse_int=_number, parse_float=_number)


def _number(text: str) -> tuple[Decimal]:
    """Return the exact number, in a tuple: in Python the number 1 equals True."""
    return (Decimal(text),)


def _collection(path: bytes) -> str:
    return path.partition(b"/")[0].decode()
