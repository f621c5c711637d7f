"""Lists of accounts, of the local network's hosts and of worse ones."""

from typing import Any

import orjson
import pytest

from indexer.errors import UnavailableError
from indexer.localnet.network import LocalNetwork
from indexer.outbound import Outbound
from indexer.pds.accounts import Account, RepoStatus, list_repos, repo_status
from indexer.reasons import FetchFailure
from tests.outbound.host import Host, answer

ALL = "/xrpc/com.atproto.sync.listRepos?limit=1000"
DID = "did:plc:" + "a" * 24
REV = "3jzfcijpj2z2a"


async def test_all_accounts_of_a_relay_and_of_a_pds(net: LocalNetwork, outbound: Outbound) -> None:
    ada, bob = net.create_account("ada.test", pds=0), net.create_account("bob.test", pds=0)
    bob.deactivate()
    page = await list_repos(outbound, net.relay.url, "", None)
    assert page.accounts == (Account(ada.did, ada.rev),)
    assert (page.refused, page.cursor) == (0, None)
    page = await list_repos(outbound, ada.pds.url, "", None)
    assert set(page.accounts) == {Account(ada.did, ada.rev), Account(bob.did, bob.rev, active=False)}
    assert page.cursor is not None
    assert await list_repos(outbound, ada.pds.url, "", page.cursor) == type(page)((), 0, None)


async def test_the_accounts_of_a_collection(net: LocalNetwork, outbound: Outbound) -> None:
    ada, bob = net.create_account("ada.test"), net.create_account("bob.test")
    ada.create("com.example.note", {"text": "hello"})
    bob.create("com.example.other", {"text": "hello"})
    page = await list_repos(outbound, net.relay.url, "com.example.note", None)
    assert page.accounts == (Account(ada.did),)


async def test_the_hosting_status(net: LocalNetwork, outbound: Outbound) -> None:
    account = net.create_account("ada.test")
    assert await repo_status(outbound, account.pds.url, account.did) == RepoStatus(True, None, account.rev)
    account.takedown()
    for host in (account.pds.url, net.relay.url):
        assert await repo_status(outbound, host, account.did) == RepoStatus(False, "takendown", None)


@pytest.mark.parametrize(
    "body", [b"{}", b'{"active": 1}', b'{"active": true, "rev": 3}', b'{"active": true, "status": 3}']
)
async def test_what_is_no_status(host: Host, outbound: Outbound, body: bytes) -> None:
    host.pages[f"/xrpc/com.atproto.sync.getRepoStatus?did={DID}"] = answer(body)
    with pytest.raises(UnavailableError) as failure:
        await repo_status(outbound, host.url, DID)
    assert failure.value.reason is FetchFailure.BAD_ANSWER


async def test_a_cursor_is_sent_as_it_came(host: Host, outbound: Outbound) -> None:
    host.pages[ALL] = answer(orjson.dumps({"repos": [], "cursor": "a&b=c d"}))
    host.pages[f"{ALL}&cursor=a%26b%3Dc+d"] = answer(orjson.dumps({"repos": [], "cursor": ""}))
    first = await list_repos(outbound, host.url, "", None)
    assert first.cursor == "a&b=c d"
    assert (await list_repos(outbound, host.url, "", first.cursor)).cursor is None


@pytest.mark.parametrize(
    "entry",
    [
        None,
        "did:plc:x",
        {},
        {"did": 1},
        {"did": "ada.test", "rev": REV},
        {"did": DID, "rev": "now"},
        {"did": DID, "rev": 1},
        {"did": DID, "rev": REV, "active": "yes"},
    ],
)
async def test_an_entry_that_is_no_account_spoils_no_other(host: Host, outbound: Outbound, entry: Any) -> None:
    host.pages[ALL] = answer(orjson.dumps({"repos": [entry, {"did": DID, "rev": REV, "status": "new", "more": 1}]}))
    page = await list_repos(outbound, host.url, "", None)
    assert page.accounts == (Account(DID, REV),)
    assert page.refused == 1


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"<html>",
        b"{}",
        b'{"repos": {}}',
        b'{"repos": [], "cursor": 7}',
        orjson.dumps({"repos": [], "cursor": "x" * 3_000}),
        b'{"repos": [], "cursor": "here"}',
    ],
)
async def test_what_is_no_page(host: Host, outbound: Outbound, body: bytes) -> None:
    host.pages[f"{ALL}&cursor=here"] = answer(body)
    with pytest.raises(UnavailableError) as failure:
        await list_repos(outbound, host.url, "", "here")
    assert failure.value.reason is FetchFailure.BAD_ANSWER


async def test_a_page_is_bounded(host: Host, outbound: Outbound) -> None:
    host.pages[ALL] = answer(orjson.dumps({"repos": ["x" * 1_000] * 5_000}))
    with pytest.raises(UnavailableError) as failure:
        await list_repos(outbound, host.url, "", None)
    assert failure.value.reason is FetchFailure.TOO_LARGE
