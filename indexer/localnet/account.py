"""An account: what its owner, and its host, can do with it. Every doing tells the host's listeners of it."""

from collections.abc import Sequence
from typing import Any

from indexer.atproto.crypto import Curve, PrivateKey
from indexer.localnet.clock import Clock
from indexer.localnet.pds import Hosted, Pds
from indexer.localnet.plc import Identity, Plc
from indexer.localnet.repo import Change, Record, Repo, Write


class Account:
    """An account at `pds`, listed in `plc`. `key` signs its commits; all its keys follow from its DID."""

    def __init__(self, did: str, handle: str, *, curve: Curve, pds: Pds, plc: Plc, clock: Clock) -> None:
        self.did = did
        self.handle = handle
        self.pds = pds
        self._plc = plc
        self._clock = clock
        self._keys = 0
        self.key = self._next_key(curve)
        self.repo = Repo(did, self.key, clock.tid())
        self._publish_identity()
        pds.hosted[did] = Hosted(self.repo, handle)
        self._emit_identity(handle=handle)
        self._emit_account()
        self._emit_commit(self.repo.first)
        self._emit_sync()

    @property
    def status(self) -> str | None:
        """The hosting status at the present host; None is active."""
        return self.pds.hosted[self.did].status

    @property
    def rev(self) -> str:
        return self.repo.head.rev

    @property
    def records(self) -> dict[str, bytes]:
        """Path to record block."""
        return self.repo.records

    def create(self, collection: str, record: Record, rkey: str | None = None) -> str:
        """Creates a record and gives its path; without `rkey` the record key is a TID."""
        path = f"{collection}/{rkey or self._clock.tid()}"
        self.apply_writes([Write.create(path, record)])
        return path

    def update(self, path: str, record: Record) -> None:
        self.apply_writes([Write.update(path, record)])

    def delete(self, path: str) -> None:
        self.apply_writes([Write.delete(path)])

    def apply_writes(self, writes: Sequence[Write], *, lost: bool = False) -> Change:
        """One commit of all `writes`, or an empty one; `lost`: no listener is told of it."""
        change = self.repo.write(writes, self.key, self._clock.tid())
        if not lost:
            self._emit_commit(change)
        return change

    def set_handle(self, handle: str) -> None:
        self.handle = self.pds.hosted[self.did].handle = handle
        self._publish_identity()
        self._emit_identity(handle=handle)

    def swap_key(self, curve: Curve | None = None) -> None:
        """Signs with a new key from now on. The directory doesn't know: the first half of a rotation."""
        self.key = self._next_key(curve or self.key.curve)

    def publish_key(self) -> None:
        """Puts the present key into the directory and says so: the other half."""
        self._publish_identity()
        self._emit_identity()

    def rotate_key(self, curve: Curve | None = None) -> None:
        """A whole rotation. As at a reference host, its commit shows only in the `#sync` that follows."""
        self.swap_key(curve)
        self.apply_writes([], lost=True)
        self.publish_key()
        self._emit_sync()

    def deactivate(self) -> None:
        self._set_status("deactivated")

    def activate(self) -> None:
        self._set_status(None)
        self._emit_identity(handle=self.handle)
        self._emit_sync()

    def takedown(self) -> None:
        self._set_status("takendown")

    def suspend(self) -> None:
        self._set_status("suspended")

    def reinstate(self) -> None:
        """Ends a takedown or a suspension."""
        self._set_status(None)

    def delete_account(self) -> None:
        """Deletes the account at its host; its identity stays."""
        self._set_status("deleted")

    def migrate(self, to: Pds, *, resign: bool = True) -> None:
        """Moves to another host, with a new key.

        The new host signs the repository anew; or doesn't (`resign` false), as reference hosts do: then its
        `#sync` and exports hold the old host's commit, by the old key, until the next write.
        """
        old, self.pds = self.pds, to
        to.hosted[self.did] = Hosted(self.repo, self.handle)
        self.swap_key()
        if resign:
            self.apply_writes([], lost=True)
        self.publish_key()
        self._emit_account()
        self._emit_identity(handle=self.handle)
        self._emit_sync(rev=self.rev if resign else self._clock.tid())
        old.hosted[self.did].status = "deactivated"
        old.emit(self.did, "#account", self._event(active=False, status="deactivated"))

    def announce(self) -> None:
        """Emits a `#sync` of the present commit."""
        self._emit_sync()

    def _next_key(self, curve: Curve) -> PrivateKey:
        self._keys += 1
        return PrivateKey.from_seed(curve, f"{self.did} key {self._keys}".encode())

    def _set_status(self, status: str | None) -> None:
        self.pds.hosted[self.did].status = status
        self._emit_account()

    def _publish_identity(self) -> None:
        self._plc.identities[self.did] = Identity(self.handle, self.key.public.did_key(), self.pds.url)

    def _event(self, **fields: Any) -> dict[str, Any]:
        return {"did": self.did, "time": self._clock.now(), **fields}

    def _emit_identity(self, **handle: str) -> None:
        self.pds.emit(self.did, "#identity", self._event(**handle))

    def _emit_account(self) -> None:
        state = {"active": False, "status": self.status} if self.status else {"active": True}
        self.pds.emit(self.did, "#account", self._event(**state))

    def _emit_sync(self, rev: str | None = None) -> None:
        self.pds.emit(self.did, "#sync", self._event(rev=rev or self.rev, blocks=self.repo.sync()))

    def _emit_commit(self, change: Change) -> None:
        payload: dict[str, Any] = {
            "repo": self.did,
            "commit": change.commit.cid,
            "rev": change.commit.rev,
            "since": change.since,
            "ops": change.ops,
            "blocks": change.blocks,
            "time": self._clock.now(),
            "blobs": [],
            "rebase": False,
            "tooBig": False,
        }
        if change.prev_data is not None:
            payload["prevData"] = change.prev_data
        self.pds.emit(self.did, "#commit", payload)
