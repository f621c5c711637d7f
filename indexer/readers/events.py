"""The events of all feeds: what an entry of the change log says about a record or an account, before it gets its JSON.

An event has what is stored now. If a record was written again since, its value belongs to a later entry, whose event
follows. If it was deleted, or its repo is hidden, there is no event. An account is active only if it is now, and if the
entry does not hide it.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple

from indexer.db.change_log_reads import LoggedChange, StoredAccount, StoredRecord
from indexer.sync.repo import DELETED, OUT_OF_SCOPE

Kind = Literal["commit", "identity", "account", "sync"]
KINDS: Mapping[str, frozenset[Kind]] = {
    **dict.fromkeys(("create", "update", "delete"), frozenset[Kind]({"commit"})),
    **dict.fromkeys(("hidden", "visible", "deleted"), frozenset[Kind]({"account"})),
    "moved": frozenset({"identity"}),
    "identity": frozenset({"identity", "account"}),
    "snapshot": frozenset({"sync"}),
}
"""The kinds that the event of an entry may have, by its action. Other entries have no event."""
_UNKNOWN = StoredAccount(active=False, hosting_status=None, takedown=False, handle=None)


class FeedEvent(NamedTuple):
    """An event, whatever the client."""

    kind: Kind
    change: LoggedChange  # the entry of the change log
    time_us: int  # its time, in microseconds since the Unix epoch
    record: StoredRecord | None = None  # the record of a create or an update; its value may be None
    handle: str | None = None  # the verified handle of the account
    active: bool = True
    status: str | None = None  # why it is not active, as sent upstream, or `takendown`; None if that is not known

    @property
    def rev(self) -> str:
        """The rev with which the record was written or deleted; "" if it was erased without one."""
        return self.record.rev if self.record else self.change.rev or ""


def event_of(
    change: LoggedChange, record: StoredRecord | None, account: StoredAccount | None, time_us: int = 0
) -> FeedEvent | None:
    """Return the event of an entry, with the record and the account as a `FeedPage` has them; None if it has none."""
    state = account or _UNKNOWN
    match change.action:
        case "create" | "update":
            return FeedEvent("commit", change, time_us, record) if record is not None else None
        case "delete":
            return FeedEvent("commit", change, time_us)
        case "snapshot":
            return FeedEvent("sync", change, time_us) if state.visible else None
        case "visible" if account is None:
            return None  # only its row was removed: such an account is inactive upstream
        case "hidden" | "visible" | "deleted" | "identity" | "moved":
            active = state.visible and change.action not in {"hidden", "deleted"}
            # An entry `identity` of a hidden account says that it has another hosting status.
            is_identity = change.action == "moved" or (change.action == "identity" and active)
            status = None if active else _status(change, state)
            return FeedEvent(
                "identity" if is_identity else "account", change, time_us, None, state.handle, active, status
            )
    return None


def _status(change: LoggedChange, state: StoredAccount) -> str | None:
    if change.action == "deleted":
        return DELETED
    if not state.active and state.hosting_status not in {None, OUT_OF_SCOPE}:
        return state.hosting_status
    return "takendown" if state.takedown else None
