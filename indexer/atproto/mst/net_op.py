"""The net effect of a commit on one key of the tree."""

from typing import Literal, NamedTuple


class NetOp(NamedTuple):
    """The net operation of a commit on one key.

    Attributes:
        key: The path of the record.
        old: The CID of the record before the commit; None for a create.
        new: The CID of the record after the commit; None for a delete.
    """

    key: bytes
    old: bytes | None
    new: bytes | None

    @property
    def action(self) -> Literal["create", "update", "delete"]:
        """The action that leads from `old` to `new`."""
        if self.old is None:
            return "create"
        return "delete" if self.new is None else "update"
