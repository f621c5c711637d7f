"""An account that signs its own messages, for tests without a network. The local network builds its repo."""

from typing import Any

from indexer.atproto.crypto import Curve, PrivateKey
from indexer.atproto.limits import DEFAULT_LIMITS
from indexer.atproto.syntax import tid_of
from indexer.demo import dag_cbor
from indexer.demo.local_plc import did_of
from indexer.demo.local_repo import LocalChange, LocalRepo, Write
from indexer.reasons import Desync
from indexer.sync.batch import ReceivedMessage
from indexer.sync.changes import Plan
from indexer.sync.events import decode_frame
from indexer.sync.plan import plan_event
from indexer.sync.policy import KeyState, PlanContext, Policy
from indexer.sync.repo import Head, Repo, SyncStatus
from indexer.sync.scope import Scope
from indexer.sync.stream import Origin
from tests.sync.hidden_deletion import hide_deletion

NOW = 1_790_000_000.0
TIME = "2026-09-21T00:00:00Z"
RELAY = "wss://relay.test"
POST = "app.bsky.feed.post"
STORE_ALL = Policy(Scope(), DEFAULT_LIMITS)
CONTEXT = PlanContext(STORE_ALL, NOW, Origin(RELAY))
IN_PROGRESS, SYNCHRONIZED, DESYNCHRONIZED = SyncStatus.IN_PROGRESS, SyncStatus.SYNCHRONIZED, SyncStatus.DESYNCHRONIZED


class SigningAccount:
    """An account with its repo and key.

    The methods named after events return payloads. Revs and sequence numbers increase by one with each message.
    """

    def __init__(self, name: str = "alice", curve: Curve = "k256") -> None:
        self.did = did_of(f"{name}.test")
        self.key = PrivateKey.from_seed(curve, name.encode())
        self.ticks = 0
        self.repo = LocalRepo(self.did, self.key, self.next_rev())

    @property
    def key_state(self) -> KeyState:
        return KeyState(self.key.public)

    @property
    def head(self) -> Head:
        return Head(self.repo.head.rev, self.repo.head.data, self.repo.head.cid)

    def row(self, status: SyncStatus = SyncStatus.SYNCHRONIZED, **fields: Any) -> Repo:
        """Return the row of the repo, with its present head."""
        reason = None if status is SyncStatus.SYNCHRONIZED else Desync.CHAIN_BREAK
        return Repo(self.did, version=5, sync_status=status, sync_reason=reason, head=self.head, **fields)

    def first_commit(self) -> dict[str, Any]:
        """Return the commit that created the repo."""
        return self.commit_payload(self.repo.first)

    def commit(self, *writes: Write) -> dict[str, Any]:
        return self.commit_payload(self.repo.write(writes, self.key, self.next_rev()))

    def commit_post(self, rkey: str, text: str = "hello") -> dict[str, Any]:
        """Return a commit that creates one post."""
        return self.commit(Write.create(f"{POST}/{rkey}", {"$type": POST, "text": text}))

    def commit_with_hidden_deletion(self, create: str, delete: str) -> dict[str, Any]:
        """Return an undecidable commit of two writes, without the operation that deletes a record."""
        change = self.repo.write([Write.create(create, {}), Write.delete(delete)], self.key, self.next_rev())
        return self.commit_payload(hide_deletion(change, delete))

    def sync_event(self) -> dict[str, Any]:
        self.ticks += 1
        return {"seq": self.ticks, "did": self.did, "rev": self.repo.head.rev, "blocks": self.repo.sync(), "time": TIME}

    def account_event(self, *, active: bool, status: str | None = None) -> dict[str, Any]:
        self.ticks += 1
        payload = {"seq": self.ticks, "did": self.did, "active": active, "time": TIME}
        return payload if status is None else payload | {"status": status}

    def identity_event(self) -> dict[str, Any]:
        self.ticks += 1
        return {"seq": self.ticks, "did": self.did, "time": TIME}

    def commit_payload(self, change: LocalChange) -> dict[str, Any]:
        payload: dict[str, Any] = {
            "seq": self.ticks,
            "repo": self.did,
            "commit": change.commit.cid,
            "rev": change.commit.rev,
            "since": change.since,
            "ops": change.ops,
            "blocks": change.blocks,
            "blobs": [],
            "rebase": False,
            "tooBig": False,
            "time": TIME,
        }
        return payload if change.prev_data is None else payload | {"prevData": change.prev_data}

    def next_rev(self) -> str:
        self.ticks += 1
        return tid_of(int(NOW * 1_000_000) - 3_600_000_000 + self.ticks)


def encoded_frame(kind: str, payload: dict[str, Any]) -> bytes:
    """Return the frame of a message of type `#kind`."""
    return dag_cbor.encode({"op": 1, "t": f"#{kind}"}) + dag_cbor.encode(payload)


def decoded_event(kind: str, payload: dict[str, Any]) -> Any:
    """Return the event of a payload; typed Any, so that tests may read its fields."""
    return decode_frame(encoded_frame(kind, payload), DEFAULT_LIMITS)


def received_message(kind: str, payload: dict[str, Any]) -> ReceivedMessage:
    """Return the message as the batch writer receives it."""
    frame = encoded_frame(kind, payload)
    event: Any = decode_frame(frame, DEFAULT_LIMITS)
    return ReceivedMessage(Origin(RELAY), event.seq, frame, event)


def plan(
    repo: Repo, kind: str, payload: dict[str, Any], key_state: KeyState | None, context: PlanContext = CONTEXT
) -> Plan:
    """Return the plan of one event, which needs no key lookup."""
    planned = plan_event(repo, decoded_event(kind, payload), 1_000, key_state, context)
    assert isinstance(planned, Plan), planned
    return planned
