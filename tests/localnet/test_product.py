"""The product reads the network: two implementations of the protocol, each of which can show the other wrong."""

import httpx

from indexer.atproto.car import CarReader
from indexer.atproto.crypto import PublicKey, parse_did_key
from indexer.atproto.limits import DEFAULT_LIMITS
from indexer.localnet.account import Account
from indexer.localnet.load import Scenario
from indexer.localnet.network import LocalNetwork
from indexer.localnet.relay import Sent
from indexer.sync.events import AccountEvent, CommitEvent, IdentityEvent, SyncEvent
from indexer.sync.frames import decode_frame
from indexer.sync.verify import verify_commit, verify_snapshot, verify_sync

STEPS = 400


async def test_every_message_and_export_proves_itself(net: LocalNetwork) -> None:
    scenario = Scenario(net, seed=11)
    read = 0
    for step in range(STEPS):
        scenario.perform(step, STEPS)
        for sent in net.relay.log[read:]:
            prove(sent, net)
        read = len(net.relay.log)
    async with httpx.AsyncClient(base_url=net.relay.url, follow_redirects=True) as client:
        truth = net.truth()
        for did in truth:
            answer = await client.get(f"/xrpc/com.atproto.sync.getRepo?did={did}")
            assert export_records(answer.content, net.accounts[did]) == truth[did]


def prove(sent: Sent, net: LocalNetwork) -> None:
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


def export_records(export: bytes, account: Account) -> dict[str, bytes]:
    """The records of an export, proven, with every record's block in it."""
    reader = CarReader(DEFAULT_LIMITS)
    blocks = {found: block for found, block, _ in reader.feed(export)}
    reader.close()
    snapshot = verify_snapshot(account.did, reader.roots[0], blocks.get, account.key.public, DEFAULT_LIMITS)
    records = {path.decode(): found for path, found in snapshot.records()}
    assert {path: blocks[found] for path, found in records.items()} == account.records
    return records
