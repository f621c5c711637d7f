"""An account of the local network, with the actions of its owner and its PDS. Each action emits its events."""

from collections.abc import Sequence
from typing import Any

from indexer.atproto.crypto import Curve, PrivateKey
from indexer.demo.local_pds import HostedRepo, LocalPds
from indexer.demo.local_plc import LocalIdentity, LocalPlc, did_of
from indexer.demo.local_repo import LocalChange, LocalRepo, Record, TidClock, Write


class LocalAccount:
    """An account. Its DID is derived from its first handle, and all its keys from its DID.

    Attributes:
        key: The key that signs commits. It differs from the key in the directory between `swap_key` and `publish_key`.
    """

    def __init__(self, handle: str, *, curve: Curve, pds: LocalPds, plc: LocalPlc, clock: TidClock) -> None:
        self.did = did_of(handle)
        self.handle = handle
        self.pds = pds
        self._plc = plc
        self._clock = clock
        self._keys = 0
        self.key = self._next_key(curve)
        self.repo = LocalRepo(self.did, self.key, clock.tid())
        self._publish_identity()
        pds.hosted[self.did] = HostedRepo(self.repo, self.apply_writes)
        self._emit_identity(handle=handle)
        self._emit_account()
        self._emit_commit(self.repo.first)
        self.emit_sync()

    @property
    def status(self) -> str | None:
        """The hosting status at the current PDS; None: active."""
        return self.pds.hosted[self.did].status

    @property
    def rev(self) -> str:
        """The rev of the latest commit."""
        return self.repo.head.rev

    @property
    def records(self) -> dict[str, bytes]:
        """The record blocks by path."""
        return self.repo.records

    def create(self, collection: str, record: Record, rkey: str | None = None) -> str:
        """Create a record and return its path. Without `rkey` the record key is a TID."""
        path = f"{collection}/{rkey or self._clock.tid()}"
        self.apply_writes([Write.create(path, record)])
        return path

    def update(self, path: str, record: Record) -> None:
        """Update a record."""
        self.apply_writes([Write.update(path, record)])

    def delete(self, path: str) -> None:
        """Delete a record."""
        self.apply_writes([Write.delete(path)])

    def apply_writes(self, writes: Sequence[Write], *, lost: bool = False) -> LocalChange:
        """Make one commit of all writes, which may be none. If `lost`, emit no event for it."""
        change = self.repo.write(writes, self.key, self._clock.tid())
        if not lost:
            self._emit_commit(change)
        return change

    def set_handle(self, handle: str) -> None:
        """Change the handle."""
        self.handle = handle
        self._publish_identity()
        self._emit_identity(handle=handle)

    def swap_key(self, curve: Curve | None = None) -> None:
        """Sign with a new key from now on, without publishing it: the first half of a key rotation."""
        self.key = self._next_key(curve or self.key.curve)

    def publish_key(self) -> None:
        """Publish the current key in the directory and emit `#identity`: the second half of a key rotation."""
        self._publish_identity()
        self._emit_identity()

    def rotate_key(self, curve: Curve | None = None) -> None:
        """Rotate the key. As on a reference PDS, the new commit appears only in the `#sync` that follows."""
        self.swap_key(curve)
        self.apply_writes([], lost=True)
        self.publish_key()
        self.emit_sync()

    def activate(self) -> None:
        """Activate the account again."""
        self.set_status(None)
        self._emit_identity(handle=self.handle)
        self.emit_sync()

    def _next_key(self, curve: Curve) -> PrivateKey:
        self._keys += 1
        return PrivateKey.from_seed(curve, f"{self.did} key {self._keys}".encode())

    def set_status(self, status: str | None) -> None:
        """Set the hosting status; None ends a takedown or suspension."""
        self.pds.hosted[self.did].status = status
        self._emit_account()

    def _publish_identity(self) -> None:
        self._plc.publish(self.did, LocalIdentity(self.handle, self.key.public.did_key(), self.pds.url))

    def _event(self, **fields: Any) -> dict[str, Any]:
        return {"did": self.did, "time": self._clock.now(), **fields}

    def _emit_identity(self, **handle: str) -> None:
        self.pds.emit(self.did, "#identity", self._event(**handle))

    def _emit_account(self) -> None:
        state = {"active": False, "status": self.status} if self.status else {"active": True}
        self.pds.emit(self.did, "#account", self._event(**state))

    def emit_sync(self, rev: str | None = None) -> None:
        """Emit a `#sync` of the current commit, or of a later rev."""
        self.pds.emit(self.did, "#sync", self._event(rev=rev or self.rev, blocks=self.repo.sync()))

    def _emit_commit(self, change: LocalChange) -> None:
        self.pds.emit(self.did, "#commit", commit_payload(self.did, change, self._clock.now()))


def commit_payload(did: str, change: LocalChange, time: str) -> dict[str, Any]:
    """Return the payload of a `#commit` event, without `seq`."""
    payload: dict[str, Any] = {
        "repo": did,
        "commit": change.commit.cid,
        "rev": change.commit.rev,
        "since": change.since,
        "ops": change.ops,
        "blocks": change.blocks,
        "time": time,
        "blobs": [],
        "rebase": False,
        "tooBig": False,
    }
    return payload if change.prev_data is None else payload | {"prevData": change.prev_data}
