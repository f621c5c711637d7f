"""The local network as a client of other libraries sees it: frames, exports and records."""

from typing import Any

import httpx
from websockets.asyncio.client import connect

from indexer.atproto.did_document import DidDocument
from indexer.atproto.plc import verify_log
from indexer.demo.local_network import LocalNetwork
from indexer.demo.local_plc import did_of
from indexer.demo.local_relay import SUBSCRIBE_REPOS
from tests.demo.independent_decoder import decode_all, decode_car, decode_frame, decode_records

NOTE = "com.example.note"
HEADERS = [  # the map {t, op}, in canonical order
    bytes.fromhex(f"a2 61 74 {len(kind) + 0x60:x} {kind.encode().hex()} 62 6f 70 01")
    for kind in ("#identity", "#account", "#commit", "#sync", "#commit")
]


async def test_frames_and_exports_have_the_form_of_the_reference_pds() -> None:
    async with LocalNetwork() as net:
        account = net.create_account("ada.test")
        first, before = account.repo.first, account.repo.head
        path = account.create(NOTE, {"text": "one"}, "note:1")
        async with connect(f"{net.relay_url}{SUBSCRIBE_REPOS}?cursor=0", max_size=None) as socket:
            frames = [await socket.recv() for _ in range(5)]
        async with httpx.AsyncClient(follow_redirects=True) as client:  # the relay redirects to the PDS
            answer = await client.get(f"{net.relay.url}/xrpc/com.atproto.sync.getRepo?did={account.did}")
    assert all(isinstance(frame, bytes) for frame in frames)
    assert [frame[: len(header)] for frame, header in zip(frames, HEADERS, strict=True)] == HEADERS
    identity, hosting, created, sync, commit = (decode_frame(frame)[1] for frame in frames)
    assert all(payload.pop("time") for payload in (identity, hosting, created, sync, commit))
    assert identity == {"seq": 1, "did": account.did, "handle": "ada.test"}
    assert hosting == {"seq": 2, "did": account.did, "active": True}
    usual: dict[str, Any] = {"repo": account.did, "blobs": [], "rebase": False, "tooBig": False}
    rev, cid = first.commit.rev, first.commit.cid
    assert created == usual | {"seq": 3, "commit": cid, "rev": rev, "since": None, "ops": [], "blocks": first.blocks}
    assert decode_car(sync.pop("blocks")) == (cid, {cid: first.commit.block})
    assert sync == {"seq": 4, "did": account.did, "rev": rev}
    root, blocks = decode_car(commit.pop("blocks"))
    [op] = commit["ops"]
    assert blocks[op["cid"]] == account.records[path]
    assert commit == usual | {
        "seq": 5, "commit": root, "rev": account.rev, "since": rev, "prevData": before.data,
        "ops": [{"action": "create", "path": path, "cid": op["cid"]}],
    }  # fmt: skip
    root, blocks = decode_car(answer.content)
    assert root == account.repo.head.cid
    assert decode_records(blocks, decode_all(blocks[root])[0]["data"]) == {path: op["cid"]}


async def test_directory_has_a_verifiable_log_of_each_did() -> None:
    """A new key, a tombstone, and a later operation that undoes it."""
    async with LocalNetwork() as net, httpx.AsyncClient() as client:

        async def log_of(did: str) -> httpx.Response:
            return await client.get(f"{net.plc_url}/{did}/log/audit")

        account, other = net.create_account("ada.test"), net.create_account("bob.test")
        assert account.did == did_of("ada.test")
        account.rotate_key()
        identity = net.plc.identities[account.did]
        assert identity is not None
        for number in (1, 2):
            net.plc.end(account.did)
            assert verify_log(account.did, (await log_of(account.did)).json(), allow_http=True) is None
            net.plc.publish(account.did, identity)
            log = (await log_of(account.did)).json()
            assert sum(entry["nullified"] for entry in log) == number
            found = verify_log(account.did, log, allow_http=True)
            assert found == DidDocument(account.did, "ada.test", account.pds.url, account.key.public)
        assert [one.seq for one in net.plc.operations] == list(range(1, 10))
        net.plc.forget(other.did)
        assert {one.did for one in net.plc.operations} == {account.did}
        denial = await log_of(other.did)
        assert (denial.status_code, denial.json()) == (404, {"message": f"DID not registered: {other.did}"})
