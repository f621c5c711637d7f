"""The published frames of the public relay, with the DID documents of their accounts."""

import json
from functools import cache

from indexer.atproto.cid import cid_of
from indexer.atproto.crypto import PublicKey
from indexer.atproto.did_document import parse_did_document
from indexer.atproto.limits import DEFAULT_LIMITS
from indexer.sync.events import CommitEvent, decode_frame
from indexer.sync.policy import PlanContext, Policy
from indexer.sync.repo import Head, Repo, SyncStatus
from indexer.sync.scope import Scope
from indexer.sync.stream import Origin
from tests.vectors import vectors

NOW = 1_795_000_000.0  # later than every rev in the vectors
CONTEXT = PlanContext(Policy(Scope(), DEFAULT_LIMITS), NOW, Origin("wss://bsky.network"))


@cache
def recorded() -> list[bytes]:
    data = vectors("jetstream-frames/frames.bin").read_bytes()
    frames, offset = [], 0
    while offset < len(data):
        size = int.from_bytes(data[offset : offset + 4], "little")
        frames.append(data[offset + 4 : offset + 4 + size])
        offset += 4 + size
    return frames


@cache
def commits() -> list[tuple[bytes, CommitEvent]]:
    """Return the frames of commits, with their events."""
    decoded = [(frame, decode_frame(frame, DEFAULT_LIMITS)) for frame in recorded()]
    return [(frame, event) for frame, event in decoded if isinstance(event, CommitEvent)]


@cache
def keys() -> dict[str, PublicKey]:
    documents = json.loads(vectors("jetstream-frames/did_docs.json").read_text())
    parsed = {did: parse_did_document(raw, did, allow_http=False) for did, raw in documents.items()}
    return {did: document.signing_key for did, document in parsed.items() if document.signing_key}


def row_before(event: CommitEvent) -> Repo:
    """Return a row at the state that the commit names as its predecessor."""
    assert event.since is not None
    assert event.prev_data is not None
    head = Head(event.since, event.prev_data, cid_of(b""))
    return Repo(event.did, version=1, sync_status=SyncStatus.SYNCHRONIZED, sync_reason=None, head=head)
