"""People who write: signed messages for tests of the rules, without a network. Trees are the local network's own."""

from collections.abc import Sequence
from typing import Any

from indexer.atproto.crypto import Curve, PrivateKey
from indexer.atproto.limits import DEFAULT_LIMITS
from indexer.atproto.syntax import CollectionFilter, tid_of
from indexer.localnet import dag_cbor
from indexer.localnet.network import did_of
from indexer.localnet.repo import Change, Repo, Write
from indexer.sync.batch import Received
from indexer.sync.events import Event
from indexer.sync.frames import decode_frame
from indexer.sync.planning import Ground, Policy, Signer

NOW = 1_790_000_000.0
POST = "app.bsky.feed.post"
EVERYTHING = Policy(CollectionFilter(), DEFAULT_LIMITS)
GROUND = Ground(EVERYTHING, "wss://relay.test", NOW)


class Person:
    """An account with its repo and key. Revisions and sequence numbers rise by one a message."""

    def __init__(self, name: str = "alice", curve: Curve = "k256") -> None:
        self.did = did_of(f"{name}.test")
        self.key = PrivateKey.from_seed(curve, name.encode())
        self._ticks = 0
        self.repo = Repo(self.did, self.key, self._rev())

    @property
    def signer(self) -> Signer:
        return Signer(self.key.public)

    def first(self) -> dict[str, Any]:
        """The payload of the commit that made the repo."""
        return self.payload(self.repo.first)

    def write(self, *writes: Write) -> dict[str, Any]:
        return self.payload(self.repo.write(writes, self.key, self._rev()))

    def post(self, rkey: str, text: str = "hello") -> dict[str, Any]:
        return self.write(Write.create(f"{POST}/{rkey}", {"$type": POST, "text": text}))

    def sync(self) -> dict[str, Any]:
        self._ticks += 1
        return {
            "seq": self._ticks,
            "did": self.did,
            "rev": self.repo.head.rev,
            "blocks": self.repo.sync(),
            "time": "2026-09-21T00:00:00Z",
        }

    def account(self, *, active: bool, status: str | None = None) -> dict[str, Any]:
        self._ticks += 1
        payload = {"seq": self._ticks, "did": self.did, "active": active, "time": "2026-09-21T00:00:00Z"}
        return payload if status is None else payload | {"status": status}

    def identity(self) -> dict[str, Any]:
        self._ticks += 1
        return {"seq": self._ticks, "did": self.did, "time": "2026-09-21T00:00:00Z"}

    def payload(self, change: Change) -> dict[str, Any]:
        payload: dict[str, Any] = {
            "seq": self._ticks,
            "repo": self.did,
            "commit": change.commit.cid,
            "rev": change.commit.rev,
            "since": change.since,
            "ops": change.ops,
            "blocks": change.blocks,
            "blobs": [],
            "rebase": False,
            "tooBig": False,
            "time": "2026-09-21T00:00:00Z",
        }
        return payload if change.prev_data is None else payload | {"prevData": change.prev_data}

    def _rev(self) -> str:
        self._ticks += 1
        return tid_of(int(NOW * 1_000_000) - 3_600_000_000 + self._ticks)


def frame(kind: str, payload: dict[str, Any]) -> bytes:
    return dag_cbor.encode({"op": 1, "t": f"#{kind}"}) + dag_cbor.encode(payload)


def event(kind: str, payload: dict[str, Any]) -> Any:
    """The event of a payload; Any, so that tests may name its fields."""
    return decode_frame(frame(kind, payload), DEFAULT_LIMITS)


def received(kind: str, payload: dict[str, Any]) -> Received:
    encoded = frame(kind, payload)
    decoded: Any = decode_frame(encoded, DEFAULT_LIMITS)
    return Received(decoded.seq, encoded, decoded)


def commits(person: Person, batches: Sequence[Sequence[Write]]) -> list[Event]:
    return [event("commit", person.write(*batch)) for batch in batches]
