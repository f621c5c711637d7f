"""The indexer's decoders and proofs, applied to every message and export of the local network."""

import pytest

from indexer.atproto.car import CarReader
from indexer.atproto.crypto import PublicKey, parse_did_key
from indexer.atproto.limits import DEFAULT_LIMITS
from indexer.localnet.local_account import LocalAccount
from indexer.localnet.local_network import LocalNetwork
from indexer.localnet.local_relay import SentMessage
from indexer.localnet.scenario import Scenario
from indexer.sync.events import AccountEvent, CommitEvent, IdentityEvent, SyncEvent
from indexer.sync.frames import decode_frame
from indexer.sync.verify import verify_commit, verify_snapshot, verify_sync
from tests.localnet.http_clients import http_client

STEPS = 200


@pytest.mark.slow
async def test_every_message_and_export_is_valid(net: LocalNetwork) -> None:
    scenario = Scenario(net, seed=11)
    checked = 0
    for step in range(STEPS):
        scenario.perform(step, STEPS)
        for sent in net.relay.log[checked:]:
            check(sent, net)
        checked = len(net.relay.log)
    async with http_client(base_url=net.relay.url, follow_redirects=True) as client:
        expected = net.expected_records()
        for did in expected:
            answer = await client.get(f"/xrpc/com.atproto.sync.getRepo?did={did}")
            assert export_records(answer.content, net.accounts[did]) == expected[did]


def check(sent: SentMessage, net: LocalNetwork) -> None:
    assert isinstance(sent.frame, bytes)
    event = decode_frame(sent.frame, DEFAULT_LIMITS)
    assert isinstance(event, CommitEvent | SyncEvent | IdentityEvent | AccountEvent)
    assert (event.seq, event.did, f"#{event.kind}") == (sent.seq, sent.did, sent.kind)
    match event:
        case CommitEvent():
            verified = verify_commit(event, directory_key(net, event.did), DEFAULT_LIMITS)
            assert (verified.flaw, verified.head.rev) == (None, event.rev), verified.detail
        case SyncEvent():
            assert verify_sync(event, directory_key(net, event.did), DEFAULT_LIMITS).head.rev == event.rev


def directory_key(net: LocalNetwork, did: str) -> PublicKey:
    identity = net.plc.identities[did]
    assert identity is not None
    return parse_did_key(identity.key)


def export_records(export: bytes, account: LocalAccount) -> dict[str, bytes]:
    """Verify an export that contains every record block, and return its records."""
    reader = CarReader(DEFAULT_LIMITS)
    blocks = {found: block for found, block, _ in reader.feed(export)}
    reader.close()
    snapshot = verify_snapshot(account.did, reader.roots[0], blocks.get, account.key.public, DEFAULT_LIMITS)
    records = {path.decode(): found for path, found in snapshot.records()}
    assert {path: blocks[found] for path, found in records.items()} == account.records
    return records
