"""Repo lists and statuses, from the local network and from hosts with invalid responses."""

from typing import Any

import orjson
import pytest

from indexer.errors import UnavailableError
from indexer.net.http.http_client import OutboundClient
from indexer.net.pds.xrpc import ListedAccount, ListedHost, RepoStatus, fetch_repo_status, list_hosts, list_repos
from indexer.reasons import FetchFailure
from tests.faulty_network import FaultyNetwork
from tests.net.http.scripted_host import ScriptedHost, http_response

ALL = "/xrpc/com.atproto.sync.listRepos?limit=1000"
DID = "did:plc:" + "a" * 24
REV = "3jzfcijpj2z2a"


async def test_list_of_all_accounts_of_a_relay_and_of_a_pds(net: FaultyNetwork, outbound: OutboundClient) -> None:
    ada, bob = net.create_account("ada.test", pds=0), net.create_account("bob.test", pds=0)
    bob.deactivate()
    page = await list_repos(outbound, net.relay.url, "", None)
    assert page.entries == (ListedAccount(ada.did, ada.rev),)
    assert (len(page.invalid), page.cursor) == (0, None)
    page = await list_repos(outbound, ada.pds.url, "", None)
    assert set(page.entries) == {
        ListedAccount(ada.did, ada.rev),
        ListedAccount(bob.did, bob.rev, active=False, status="deactivated"),
    }
    assert page.cursor is not None
    assert await list_repos(outbound, ada.pds.url, "", page.cursor) == type(page)((), (), None)


async def test_list_of_the_accounts_of_a_collection(net: FaultyNetwork, outbound: OutboundClient) -> None:
    ada, bob = net.create_account("ada.test"), net.create_account("bob.test")
    ada.create("com.example.note", {"text": "hello"})
    bob.create("com.example.other", {"text": "hello"})
    page = await list_repos(outbound, net.relay.url, "com.example.note", None)
    assert page.entries == (ListedAccount(ada.did),)


async def test_list_of_the_hosts_of_a_relay(net: FaultyNetwork, outbound: OutboundClient) -> None:
    net.create_account("ada.test", pds=0)
    page = await list_hosts(outbound, net.relay.url, None)
    assert [(host.url, host.accounts, host.status) for host in page.entries] == [
        (net.pdses[0].url, 1, "active"),
        (net.pdses[1].url, 0, "active"),
    ]
    assert (page.invalid, page.cursor) == ((), None)


async def test_entries_without_a_public_host_name_are_skipped(host: ScriptedHost, outbound: OutboundClient) -> None:
    entries: list[object] = [
        *(
            {"hostname": name}
            for name in ("", "a b.example.com", "10.0.0.1", "[::1]", "localhost", "a.example.com:1", 7)
        ),
        *({"hostname": name} for name in ("https://a.example.com", "a.example.com/x", "a" * 300 + ".example.com")),
        *(None, [], {"host": "a.example.com"}),
        {"hostname": "A.Example.com", "accountCount": -1, "status": 7},
        {"hostname": "b.example.com", "accountCount": True, "seq": "x", "status": "of tomorrow"},
        {"hostname": "c.example.com", "accountCount": 1 << 60},
    ]
    host.pages["/xrpc/com.atproto.sync.listHosts?limit=1000"] = http_response(orjson.dumps({"hosts": entries}))
    page = await list_hosts(outbound, host.url, None)
    assert page.entries == (
        ListedHost("a.example.com", None, "invalid: 7"),
        ListedHost("b.example.com", None, "of tomorrow"),
        ListedHost("c.example.com"),
    )
    assert len(page.invalid) == len(entries) - 3
    assert page.entries[0].url == "https://a.example.com"


async def test_hosting_status_of_an_account(net: FaultyNetwork, outbound: OutboundClient) -> None:
    account = net.create_account("ada.test")
    assert await fetch_repo_status(outbound, account.pds.url, account.did) == RepoStatus(True, None, account.rev)
    account.set_status("takendown")
    for host in (account.pds.url, net.relay.url):
        assert await fetch_repo_status(outbound, host, account.did) == RepoStatus(False, "takendown")


@pytest.mark.parametrize(
    "body",
    [
        b"{}",
        b'{"active": 1}',
        b'{"active": null, "rev": "3jzfcijpj2z2a"}',
        b'{"active": ' + b"[" * 1_015 + b"]" * 1_015 + b"}",  # nearly as deep as orjson decodes
    ],
)
async def test_invalid_status_is_refused(host: ScriptedHost, outbound: OutboundClient, body: bytes) -> None:
    host.pages[f"/xrpc/com.atproto.sync.getRepoStatus?did={DID}"] = http_response(body)
    with pytest.raises(UnavailableError) as failure:
        await fetch_repo_status(outbound, host.url, DID)
    assert failure.value.reason is FetchFailure.BAD_ANSWER


async def test_long_status_is_cut(host: ScriptedHost, outbound: OutboundClient) -> None:
    for characters in (128, 129, 60_000):
        body = orjson.dumps({"active": False, "status": "x" * characters})
        host.pages[f"/xrpc/com.atproto.sync.getRepoStatus?did={DID}"] = http_response(body)
        assert await fetch_repo_status(outbound, host.url, DID) == RepoStatus(False, "x" * 128)


async def test_odd_field_of_a_status_hides_nothing_beside_it(host: ScriptedHost, outbound: OutboundClient) -> None:
    for fields, found in (
        ({"active": True, "rev": 3, "status": None}, RepoStatus(True)),
        ({"active": True, "rev": "now", "more": [1]}, RepoStatus(True)),
        ({"active": False, "status": ["gone"]}, RepoStatus(False, "invalid: ['gone']")),
        ({"active": False, "status": "a\0b", "rev": REV}, RepoStatus(False, "a\ufffdb", REV)),
    ):
        host.pages[f"/xrpc/com.atproto.sync.getRepoStatus?did={DID}"] = http_response(orjson.dumps(fields))
        assert await fetch_repo_status(outbound, host.url, DID) == found


async def test_cursor_is_sent_unchanged(host: ScriptedHost, outbound: OutboundClient) -> None:
    host.pages[ALL] = http_response(orjson.dumps({"repos": [], "cursor": "a&b=c d"}))
    host.pages[f"{ALL}&cursor=a%26b%3Dc+d"] = http_response(orjson.dumps({"repos": [], "cursor": ""}))
    first = await list_repos(outbound, host.url, "", None)
    assert first.cursor == "a&b=c d"
    assert (await list_repos(outbound, host.url, "", first.cursor)).cursor is None


async def test_odd_entries_are_counted_and_what_is_valid_of_them_is_used(
    host: ScriptedHost, outbound: OutboundClient
) -> None:
    """The relay of Bluesky lists accounts of which it has never received a commit with an empty rev."""
    skipped: list[Any] = [None, "did:plc:x", {}, {"did": 1}, {"did": "ada.test", "rev": REV}]
    odd: list[tuple[Any, ListedAccount]] = [
        ({"did": DID, "rev": "now"}, ListedAccount(DID)),
        ({"did": DID, "rev": 1, "active": False}, ListedAccount(DID, active=False)),
        ({"did": DID, "rev": REV, "active": "yes"}, ListedAccount(DID, REV)),
        ({"did": DID, "rev": REV, "active": None}, ListedAccount(DID, REV)),
    ]
    valid = [{"did": DID, "rev": REV, "status": "new", "more": 1}, {"did": DID, "head": "", "rev": "", "active": True}]
    host.pages[ALL] = http_response(orjson.dumps({"repos": [*(entry for entry, _ in odd), *skipped, *valid]}))
    page = await list_repos(outbound, host.url, "", None)
    assert page.entries == (*(account for _, account in odd), ListedAccount(DID, REV), ListedAccount(DID, None))
    assert len(page.invalid) == len(odd) + len(skipped)
    assert page.invalid[0] == f"{DID}: rev is 'now'"


async def test_bytes_that_are_not_utf8_hide_no_account(host: ScriptedHost, outbound: OutboundClient) -> None:
    body = b'\xef\xbb\xbf{"repos": [{"did": "%b", "status": "\xff"}]}' % DID.encode()
    host.pages[ALL] = http_response(body)
    assert (await list_repos(outbound, host.url, "", None)).entries == (ListedAccount(DID),)


async def test_cursor_that_is_a_number_is_sent(host: ScriptedHost, outbound: OutboundClient) -> None:
    host.pages[ALL] = http_response(b'{"repos": [], "cursor": 7}')
    assert (await list_repos(outbound, host.url, "", None)).cursor == "7"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"<html>",
        b"{}",
        b'{"repos": {}}',
        b'{"repos": [], "cursor": [7]}',
        orjson.dumps({"repos": [], "cursor": "x" * 3_000}),
        b'{"repos": [], "cursor": "here"}',
        b'{"repos": [], "cursor": "a\\u0000"}',  # Postgres cannot store it
    ],
)
async def test_invalid_page_is_refused(host: ScriptedHost, outbound: OutboundClient, body: bytes) -> None:
    host.pages[f"{ALL}&cursor=here"] = http_response(body)
    with pytest.raises(UnavailableError) as failure:
        await list_repos(outbound, host.url, "", "here")
    assert failure.value.reason is FetchFailure.BAD_ANSWER


async def test_size_of_a_page_is_limited(host: ScriptedHost, outbound: OutboundClient) -> None:
    host.pages[ALL] = http_response(orjson.dumps({"repos": ["x" * 1_000] * 5_000}))
    with pytest.raises(UnavailableError) as failure:
        await list_repos(outbound, host.url, "", None)
    assert failure.value.reason is FetchFailure.TOO_LARGE


@pytest.mark.parametrize("item", [b"[]", b"{}", b"1", b'{"did":"did:plc:a"}'])
async def test_page_with_too_many_items_is_refused_before_it_is_decoded(
    host: ScriptedHost, outbound: OutboundClient, monkeypatch: pytest.MonkeyPatch, item: bytes
) -> None:
    """Decoding 4 MiB of empty lists takes 0.7 seconds."""
    monkeypatch.setattr("indexer.net.pds.xrpc.orjson.loads", lambda _: pytest.fail("decoded"))
    items = b",".join([item] * (1_000_000 // (len(item) + 1)))
    host.pages[ALL] = http_response(b'{"repos":[' + items + b"]}")
    with pytest.raises(UnavailableError, match="over 16384 items") as failure:
        await list_repos(outbound, host.url, "", None)
    assert failure.value.reason is FetchFailure.BAD_ANSWER


async def test_longest_pages_of_hosts_are_accepted(host: ScriptedHost, outbound: OutboundClient) -> None:
    entry = {"did": DID, "head": "bafy" + "a" * 55, "rev": REV, "active": False, "status": "deactivated"}
    host.pages[ALL] = http_response(orjson.dumps({"cursor": "x", "repos": [entry] * 1_000}))
    assert len((await list_repos(outbound, host.url, "", None)).entries) == 1_000
    of_collection = ALL.replace("listRepos?", "listReposByCollection?").replace("1000", "2000") + "&collection=a.b.c"
    host.pages[of_collection] = http_response(orjson.dumps({"cursor": "x", "repos": [{"did": DID}] * 2_000}))
    assert len((await list_repos(outbound, host.url, "a.b.c", None)).entries) == 2_000
