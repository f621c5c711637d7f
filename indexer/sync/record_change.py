"""Turn verified changes of a repo's tree into the changes of stored records."""

from indexer.atproto.record import ConvertedRecord, ItemBudget, Problem, Value, decode_record
from indexer.atproto.syntax import split_path
from indexer.errors import UpstreamError
from indexer.sync.plans import Action, RecordChange
from indexer.sync.policy import Policy
from indexer.sync.verify import VerifiedChange

MAX_EXPANSION = 16
"""Bytes of stored values per byte of their commit or export. The most that JSON takes is 14 bytes, for an empty byte
string, so only blocks that many paths name exceed this."""
MIN_VALUE_BYTES = 1 << 20
"""Bytes of values that even a small commit or export may have."""


def selected_path(path: bytes, policy: Policy) -> tuple[str, str] | None:
    """Return collection and record key; None if the path is outside the selected collections or breaks the syntax.

    A path with bad syntax in a signed tree still takes part in every proof. It only names no record
    (docs/protocol.md#merkle-search-tree).
    """
    try:
        collection, rkey = split_path(path.decode())
    except (UpstreamError, UnicodeDecodeError):
        return None
    return (collection, rkey) if policy.scope.collections.matches(collection) else None


class RecordConverter:
    """Converts the changes of one commit or of one export, within bounds that follow from its size.

    A block that many paths name is decoded once, and its value is in memory once. In the database, each path has a copy
    of the value, so that a small commit could fill the disk. Beyond `MAX_EXPANSION`, values are omitted.

    Attributes:
        bytes_converted: The sum of the sizes of the changes with values so far, in bytes (see `RecordChange.size`).
    """

    def __init__(self, policy: Policy, rev: str, source_bytes: int) -> None:
        self._policy = policy
        self._rev = rev
        self._max_bytes = MIN_VALUE_BYTES + MAX_EXPANSION * source_bytes
        self.bytes_converted = 0
        self._items = ItemBudget(source_bytes)
        self._decoded: dict[tuple[bytes, str], Value] = {}

    @property
    def items_left(self) -> int:
        """The number of items that the records may still have."""
        return self._items.left

    @property
    def bytes_left(self) -> int:
        """The bytes that may still be converted before values are omitted."""
        return max(0, self._max_bytes - self.bytes_converted)

    def count_converted(self, items: int, size: int) -> None:
        """Count records that were converted elsewhere, with so many items, and with changes of this size in bytes."""
        self._items.subtract(items)
        self.bytes_converted += size

    def forget_values(self) -> None:
        """Release the memory of the decoded values. A later path that names one of their blocks decodes it again."""
        self._decoded.clear()

    def convert(self, change: VerifiedChange) -> RecordChange | None:
        """Return the change to store; None if the path is not selected."""
        names = selected_path(change.path, self._policy)
        if names is None:
            return None
        collection, rkey = names
        if change.new is None:
            return RecordChange("delete", collection, rkey, self._rev)
        action: Action = "create" if change.old is None else "update"
        if not self._policy.store_values:
            return RecordChange(action, collection, rkey, self._rev, change.new)
        if change.block is None:
            return RecordChange(action, collection, rkey, self._rev, change.new, problem=Problem.MISSING)
        if self.bytes_converted > self._max_bytes:  # without a conversion, whose result would need memory
            return RecordChange(action, collection, rkey, self._rev, change.new, problem=Problem.OMITTED)
        value = self._value(change.new, change.block, collection, change.converted)
        converted = RecordChange(
            action, collection, rkey, self._rev, change.new, value.json, value.problem, value.original
        )
        self.bytes_converted += converted.size
        if self.bytes_converted > self._max_bytes:
            return converted._replace(value=None, problem=Problem.OMITTED, original=None)
        return converted

    def _value(self, cid: bytes, block: bytes, collection: str, converted: ConvertedRecord | None) -> Value:
        value = self._decoded.get((cid, collection))
        if value is None:
            value = decode_record(block, collection, self._policy.limits, self._items, converted)
            self._decoded[cid, collection] = value
        return value
