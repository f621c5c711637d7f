"""The relay over a real websocket, with a client from a different library."""

from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, ConnectionClosedError

from indexer.localnet.http_server import Fault
from indexer.localnet.local_network import LocalNetwork
from indexer.localnet.local_pds import LIST_REPOS
from indexer.localnet.local_relay import SUBSCRIBE_REPOS, LocalRelay, error_frame
from indexer.localnet.local_repo import Write
from tests.localnet.http_clients import http_client
from tests.localnet.independent_decoder import cid_from_text, decode_car, decode_frame


def stream(net: LocalNetwork, cursor: object = None, *, relay: int = 0) -> connect:
    query = "" if cursor is None else f"?cursor={cursor}"
    return connect(f"{net.relay_urls[relay]}{SUBSCRIBE_REPOS}{query}", max_size=None)


async def receive(socket: ClientConnection) -> tuple[dict[str, Any], dict[str, Any]]:
    frame = await socket.recv()
    return decode_frame(frame)


async def seqs(socket: ClientConnection, count: int) -> list[int]:
    return [(await receive(socket))[1]["seq"] for _ in range(count)]


def sent(net: LocalNetwork) -> list[tuple[str, dict[str, Any]]]:
    return payloads(net.relay)


def payloads(relay: LocalRelay) -> list[tuple[str, dict[str, Any]]]:
    return [(entry.kind, decode_frame(entry.frame)[1]) for entry in relay.log]


async def test_new_account_emits_events_in_order_of_reference_pds(net: LocalNetwork) -> None:
    account = net.create_account("ada.test")
    async with stream(net, 0) as socket:
        frames = [await receive(socket) for _ in range(4)]
    assert [header for header, _ in frames] == [
        {"op": 1, "t": kind} for kind in ("#identity", "#account", "#commit", "#sync")
    ]
    identity, hosting, commit, sync = (payload for _, payload in frames)
    for payload in (identity, hosting, commit, sync):
        assert payload.pop("time")
    assert identity == {"seq": 1, "did": account.did, "handle": "ada.test"}
    assert hosting == {"seq": 2, "did": account.did, "active": True}
    assert commit.pop("blocks") == account.repo.first.blocks
    assert commit == {
        "seq": 3, "repo": account.did, "commit": account.repo.head.cid, "rev": account.rev, "since": None,
        "ops": [], "blobs": [], "rebase": False, "tooBig": False,
    }  # fmt: skip
    assert decode_car(sync.pop("blocks")) == (account.repo.head.cid, {account.repo.head.cid: account.repo.head.block})
    assert sync == {"seq": 4, "did": account.did, "rev": account.rev}


HEADERS = [
    "a2 61 74 69 23 69 64 65 6e 74 69 74 79 62 6f 70 01",
    "a2 61 74 68 23 61 63 63 6f 75 6e 74 62 6f 70 01",
    "a2 61 74 67 23 63 6f 6d 6d 69 74 62 6f 70 01",
    "a2 61 74 65 23 73 79 6e 63 62 6f 70 01",
]


async def test_frames_are_canonical(net: LocalNetwork) -> None:
    net.create_account()
    for entry, header in zip(net.relay.log, map(bytes.fromhex, HEADERS), strict=True):
        assert isinstance(entry.frame, bytes)
        assert entry.frame.startswith(header)
        keys = list(decode_frame(entry.frame)[1])
        assert keys == sorted(keys, key=lambda key: (len(key), key))
    assert error_frame("FutureCursor", "").startswith(bytes.fromhex("a1 62 6f 70 20"))


async def test_commit_event_lists_operations(net: LocalNetwork) -> None:
    account = net.create_account()
    path = account.create("com.example.note", {"text": "one"}, "note:1")
    old, since, prev_data = account.records[path], account.rev, account.repo.head.data
    account.update(path, {"text": "two"})
    kind, payload = sent(net)[-1]
    assert (kind, payload["since"], payload["prevData"]) == ("#commit", since, prev_data)
    (op,) = payload["ops"]
    _, blocks = decode_car(payload["blocks"])
    assert op == {"action": "update", "path": "com.example.note/note:1", "cid": op["cid"], "prev": op["prev"]}
    assert blocks[op["cid"]] == account.records[path] != old
    account.delete(path)
    assert sent(net)[-1][1]["ops"] == [{"action": "delete", "path": path, "cid": None, "prev": op["cid"]}]


@pytest.mark.parametrize(("inclusive", "expected"), [(True, [5, 6, 7, 8]), (False, [6, 7, 8])])
async def test_cursor_replays_and_continues_live(net: LocalNetwork, inclusive: bool, expected: list[int]) -> None:
    net.relay.inclusive = inclusive
    account = net.create_account()
    for number in range(3):
        account.create("com.example.note", {"n": number})
    async with stream(net, 5) as socket:
        assert await seqs(socket, len(expected) - 1) == expected[:-1]
        account.create("com.example.note", {"n": 3})
        assert await seqs(socket, 1) == expected[-1:]


async def test_stream_without_cursor_is_live(net: LocalNetwork) -> None:
    account = net.create_account()
    async with stream(net) as socket:
        account.create("com.example.note", {})
        assert await seqs(socket, 1) == [5]


@pytest.mark.parametrize(("cursor", "error"), [(99, "FutureCursor"), ("soon", "InvalidRequest")])
async def test_invalid_cursor_ends_stream_with_error_frame(net: LocalNetwork, cursor: object, error: str) -> None:
    net.create_account()
    async with stream(net, cursor) as socket:
        header, payload = await receive(socket)
        assert (header, payload["error"]) == ({"op": -1}, error)
        with pytest.raises(ConnectionClosed) as closed:
            await socket.recv()
    assert closed.value.rcvd is not None
    assert (closed.value.rcvd.code, closed.value.rcvd.reason) == (1008, error)


async def test_cursor_before_window_is_outdated(net: LocalNetwork) -> None:
    account = net.create_account()
    for number in range(6):
        account.create("com.example.note", {"n": number})
    net.relay.window = 4
    async with stream(net, 5) as socket:
        header, payload = await receive(socket)
        assert (header, payload["name"]) == ({"op": 1, "t": "#info"}, "OutdatedCursor")
        assert "seq" not in payload
        assert await seqs(socket, 4) == [7, 8, 9, 10]


@pytest.mark.parametrize(("cursor", "first"), [(0, 7), (6, 7), (7, 7), (10, 10)])
async def test_cursor_without_lost_events_is_not_outdated(net: LocalNetwork, cursor: int, first: int) -> None:
    account = net.create_account()
    for number in range(6):
        account.create("com.example.note", {"n": number})
    net.relay.window = 4
    async with stream(net, cursor) as socket:
        assert await seqs(socket, 1) == [first]


async def test_lagging_live_subscriber_is_disconnected(net: LocalNetwork) -> None:
    net.relay.max_lag = 3
    account = net.create_account()
    async with stream(net) as socket:
        for number in range(4):
            account.create("com.example.note", {"n": number})
        header, payload = await receive(socket)
        assert (header, payload["error"]) == ({"op": -1}, "ConsumerTooSlow")


async def test_forgotten_messages_are_not_replayed_and_open_streams_continue(net: LocalNetwork) -> None:
    account = net.create_account()
    for number in range(6):
        account.create("com.example.note", {"n": number})
    async with stream(net, 0) as live:
        assert await seqs(live, 10) == list(range(1, 11))
        net.relay.forget_messages(keep=4)
        account.create("com.example.note", {"n": 6})
        assert await seqs(live, 1) == [11]
    async with stream(net, 5) as socket:
        header, payload = await receive(socket)
        assert (header["t"], payload["name"]) == ("#info", "OutdatedCursor")
        assert await seqs(socket, 5) == [7, 8, 9, 10, 11]
    assert len(net.relay.log) == 5


async def test_forgotten_account_is_not_listed(net: LocalNetwork) -> None:
    account, other = net.create_account(), net.create_account()
    net.relay.forget_account(account.did)
    async with http_client() as client:
        response = await client.get(f"{net.relay.url}{LIST_REPOS}")
    assert [repo["did"] for repo in response.json()["repos"]] == [other.did]


async def test_dropped_commit_leaves_its_seq_unused_and_breaks_chain(net: LocalNetwork) -> None:
    account, other = net.create_account(), net.create_account()
    net.relay.drop(account.did)
    for owner in (account, other, account):
        owner.create("com.example.note", {})
    assert net.relay.dropped == {account.did: 1}
    (_, others), (_, next_commit) = sent(net)[-2:]
    assert (others["seq"], others["repo"], next_commit["seq"]) == (10, other.did, 11)
    assert next_commit["since"] not in {payload.get("rev") for _, payload in sent(net)[:-1]}


async def test_lost_commit_does_not_reach_relay(net: LocalNetwork) -> None:
    account = net.create_account()
    account.apply_writes([Write.create("com.example.note/a", {})], lost=True)
    assert (net.relay.seq, net.relay.dropped) == (4, {})
    assert list(net.expected_records()[account.did]) == ["com.example.note/a"]


async def test_aborted_connection_ends_without_close_frame(net: LocalNetwork) -> None:
    net.create_account()
    async with stream(net, 0) as socket:
        await seqs(socket, 4)
        assert net.relay.abort_connections() == 1
        with pytest.raises(ConnectionClosedError) as closed:
            await socket.recv()
    assert closed.value.rcvd is None
    async with stream(net, 4) as socket:
        assert await seqs(socket, 1) == [4]


async def test_repeated_and_injected_frames_are_sent_unchanged(net: LocalNetwork) -> None:
    net.create_account()
    net.relay.repeat(2)
    net.relay.inject(b"\xff")
    net.relay.inject("text")
    net.create_account()
    async with stream(net, 0) as socket:
        assert await seqs(socket, 6) == [1, 2, 3, 4, 3, 4]
        assert [await socket.recv(), await socket.recv()] == [b"\xff", "text"]
        assert await seqs(socket, 1) == [7]


async def test_event_from_wrong_pds_is_ignored(net: LocalNetwork) -> None:
    account = net.create_account(pds=0)
    seq = net.relay.seq
    net.pdses[1].emit(account.did, "#account", {"did": account.did, "active": False, "status": "deleted", "time": ""})
    assert (net.relay.seq, net.relay.wrong_host) == (seq, {account.did: 1})


async def test_relay_redirects_export_to_pds(net: LocalNetwork) -> None:
    account = net.create_account(pds=1)
    async with http_client(base_url=net.relay.url) as client:
        query = f"?did={account.did}"
        answer = await client.get(f"/xrpc/com.atproto.sync.getRepo{query}")
        assert answer.status_code == 302
        assert answer.headers["location"] == f"{net.pdses[1].url}/xrpc/com.atproto.sync.getRepo{query}"
        unknown = await client.get("/xrpc/com.atproto.sync.getRepo?did=did:plc:unknown")
        assert (unknown.status_code, unknown.json()["error"]) == (404, "RepoNotFound")
        followed = await client.get(f"/xrpc/com.atproto.sync.getRepo{query}", follow_redirects=True)
        assert decode_car(followed.content)[0] == account.repo.head.cid


async def test_relay_lists_active_repos_at_received_revs(net: LocalNetwork) -> None:
    accounts = [net.create_account() for _ in range(5)]
    accounts[1].deactivate()
    accounts[0].rotate_key()
    received = accounts[2].rev
    accounts[2].apply_writes([], lost=True)
    async with http_client(base_url=net.relay.url) as client:
        rows, query = [], "limit=2"
        while True:
            page = (await client.get(f"/xrpc/com.atproto.sync.listRepos?{query}")).json()
            rows += page["repos"]
            if "cursor" not in page:
                break
            query = f"limit=2&cursor={page['cursor']}"
        assert [row["did"] for row in rows] == [accounts[number].did for number in (0, 2, 3, 4)]
        assert (rows[1]["rev"], rows[1]["active"]) == (received, True)
        assert (cid_from_text(rows[0]["head"]), rows[0]["rev"]) == (accounts[0].repo.head.cid, accounts[0].rev)
        latest = await client.get(f"/xrpc/com.atproto.sync.getLatestCommit?did={accounts[1].did}")
        assert (latest.status_code, latest.json()["error"]) == (403, "RepoDeactivated")
        status = await client.get(f"/xrpc/com.atproto.sync.getRepoStatus?did={accounts[1].did}")
        assert status.json() == {"did": accounts[1].did, "active": False, "status": "deactivated"}


async def test_relay_keeps_port_and_log_after_restart(net: LocalNetwork) -> None:
    net.create_account()
    url = net.relay_url
    await net.relay.stop()
    with pytest.raises(OSError, match="Connect call failed"):
        await connect(f"{url}{SUBSCRIBE_REPOS}")
    await net.relay.start()
    assert net.relay_url == url
    async with stream(net, 0) as socket:
        assert await seqs(socket, 4) == [1, 2, 3, 4]


async def test_events_sent_while_a_relay_is_stopped_are_replayed_after_its_start(net: LocalNetwork) -> None:
    account = net.create_account()
    await net.relay.stop()
    account.create("com.example.note", {})
    await net.relay.start()
    async with stream(net, 5) as socket:
        assert await seqs(socket, 1) == [5]


async def test_relays_send_the_same_events_with_sequences_of_their_own() -> None:
    async with LocalNetwork(relays=2) as net:
        assert net.relay is net.relays[0]
        assert net.relay_url == net.relay_urls[0] != net.relay_urls[1]
        account = net.create_account()
        account.create("com.example.note", {})
        for number, expected in enumerate([[1, 2, 3, 4, 5], [1001, 1002, 1003, 1004, 1005]]):
            async with stream(net, 0, relay=number) as socket:
                assert await seqs(socket, 5) == expected
        first, second = map(payloads, net.relays)
        assert [(kind, payload | {"seq": 0}) for kind, payload in first] == [
            (kind, payload | {"seq": 0}) for kind, payload in second
        ]


async def test_a_stopped_relay_does_not_stop_the_others() -> None:
    async with LocalNetwork(relays=2) as net:
        await net.relays[1].stop()
        net.create_account()
        async with stream(net, 0) as socket:
            assert await seqs(socket, 4) == [1, 2, 3, 4]
        await net.relays[1].start()
        async with stream(net, 0, relay=1) as socket:
            assert await seqs(socket, 4) == [1001, 1002, 1003, 1004]


async def test_a_restarted_sequence_begins_anew_and_breaks_connections(net: LocalNetwork) -> None:
    account = net.create_account()
    async with stream(net, 0) as socket:
        await seqs(socket, 4)
        net.relay.restart_sequence()
        with pytest.raises(ConnectionClosedError):
            await socket.recv()
    assert (net.relay.seq, net.relay.log) == (0, [])
    account.create("com.example.note", {})
    async with stream(net, 0) as socket:
        assert await seqs(socket, 1) == [1]
    async with http_client(base_url=net.relay.url) as client:
        assert len((await client.get(LIST_REPOS)).json()["repos"]) == 1


async def test_a_restarted_sequence_can_keep_the_newest_messages(net: LocalNetwork) -> None:
    account = net.create_account()
    account.create("com.example.note", {})
    newest = sent(net)[-2:]
    net.relay.inject("text")
    net.relay.restart_sequence(first_seq=500, keep=3)
    account.create("com.example.note", {})
    async with stream(net, 0) as socket:
        kept = [(await receive(socket))[1] for _ in range(2)]
        assert await socket.recv() == "text"
        assert await seqs(socket, 1) == [504]
    assert kept == [payload | {"seq": 501 + n} for n, (_, payload) in enumerate(newest)]
    async with stream(net, 3) as socket:
        assert (await receive(socket))[1]["name"] == "OutdatedCursor"


async def test_a_silent_relay_continues_live_after_a_future_cursor(net: LocalNetwork) -> None:
    net.relay.announces = False
    account = net.create_account()
    async with stream(net, 99) as socket:
        account.create("com.example.note", {})
        assert await seqs(socket, 1) == [5]


async def test_a_silent_relay_begins_at_its_oldest_event_after_an_outdated_cursor(net: LocalNetwork) -> None:
    net.relay.announces = False
    net.relay.window = 2
    net.create_account()
    async with stream(net, 1) as socket:
        assert await seqs(socket, 2) == [3, 4]


async def test_the_repo_list_can_fail_while_the_stream_works(net: LocalNetwork) -> None:
    fault = Fault(LIST_REPOS, times=None, status=503)
    net.relay.faults.append(fault)
    net.create_account()
    async with http_client(base_url=net.relay.url) as client:
        assert (await client.get(LIST_REPOS)).status_code == 503
        async with stream(net, 0) as socket:
            assert await seqs(socket, 4) == [1, 2, 3, 4]
        net.relay.faults.remove(fault)
        assert (await client.get(LIST_REPOS)).status_code == 200
