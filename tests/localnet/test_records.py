"""Clients list and write records at the PDSes of the local network, and resolve its handles."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from indexer.errors import UnavailableError
from indexer.identity.handle_verifier import HandleVerifier
from indexer.localnet.local_account import LocalAccount
from indexer.localnet.local_dns import LocalDns
from indexer.localnet.local_network import LocalNetwork
from indexer.localnet.status_activity import STATUS, StatusActivity
from indexer.reasons import FetchFailure
from tests.free_ports import free_ports
from tests.localnet.http_clients import http_client
from tests.localnet.independent_decoder import decode_all

NOTE = "com.example.note"


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with http_client() as http:
        yield http


async def post(client: httpx.AsyncClient, account: LocalAccount, method: str, **fields: Any) -> httpx.Response:
    url = f"{account.pds.url}/xrpc/com.atproto.repo.{method}"
    return await client.post(url, json={"repo": account.did, "collection": NOTE, **fields})


async def listed(client: httpx.AsyncClient, account: LocalAccount, **parameters: Any) -> dict[str, Any]:
    url = f"{account.pds.url}/xrpc/com.atproto.repo.listRecords"
    answer = await client.get(url, params={"repo": account.did, "collection": NOTE, **parameters})
    assert answer.status_code == 200, answer.text
    result: dict[str, Any] = answer.json()
    return result


async def test_pds_writes_records_of_clients_and_emits_commits(net: LocalNetwork, client: httpx.AsyncClient) -> None:
    account = net.create_account("ada.test")
    created = (await post(client, account, "createRecord", record={"text": "one"})).json()
    assert created["commit"]["rev"] == account.rev
    await post(client, account, "putRecord", rkey="self", record={"text": "two"})
    await post(client, account, "putRecord", rkey="self", record={"text": "three"})
    path = created["uri"].removeprefix(f"at://{account.did}/")
    texts = {path: decode_all(block)[0] for path, block in account.records.items()}
    assert texts == {path: {"$type": NOTE, "text": "one"}, f"{NOTE}/self": {"$type": NOTE, "text": "three"}}
    rkey = path.rpartition("/")[2]
    assert "commit" in (await post(client, account, "deleteRecord", rkey=rkey)).json()
    assert (await post(client, account, "deleteRecord", rkey=rkey)).json() == {}
    assert list(account.records) == [f"{NOTE}/self"]
    actions = [op["action"] for sent in net.relay.log if sent.payload for op in sent.payload.get("ops", ())]
    assert actions == ["create", "create", "update", "delete"]


@pytest.mark.parametrize(
    ("method", "fields", "message"),
    [
        ("createRecord", {"rkey": "self", "record": {}}, "already exists"),
        ("createRecord", {"record": "text"}, "record must be an object"),
        ("createRecord", {"record": {"number": 0.5}}, "without a DAG-CBOR form"),
        ("putRecord", {"collection": 7}, "must be an object with"),
        ("putRecord", {"repo": "did:plc:unknown", "record": {}}, "Could not find repo"),
    ],
)
async def test_pds_refuses_writes_that_are_not_possible(
    net: LocalNetwork, client: httpx.AsyncClient, method: str, fields: dict[str, Any], message: str
) -> None:
    account = net.create_account("ada.test")
    account.create(NOTE, {}, "self")
    rev = account.rev
    answer = await post(client, account, method, **fields)
    assert answer.status_code == 400
    assert message in answer.json()["message"]
    assert account.rev == rev


async def test_pds_lists_records_in_pages_from_the_last_key_to_the_first(
    net: LocalNetwork, client: httpx.AsyncClient
) -> None:
    account = net.create_account("ada.test")
    for number in range(5):
        account.create(NOTE, {"number": number}, f"r{number}")
    account.create("com.example.notebook", {}, "other")
    page = await listed(client, account, limit=2)
    values = [record["value"]["number"] for record in page["records"]]
    while "cursor" in page:
        page = await listed(client, account, limit=2, cursor=page["cursor"])
        values += [record["value"]["number"] for record in page["records"]]
    assert values == [4, 3, 2, 1, 0]
    account.deactivate()
    answer = await client.get(f"{account.pds.url}/xrpc/com.atproto.repo.listRecords?repo={account.did}")
    assert (answer.status_code, answer.json()["error"]) == (400, "RepoDeactivated")


async def test_handles_resolve_by_dns_to_their_accounts(net: LocalNetwork) -> None:
    class NoHttp:
        async def get(self, url: str, **_: Any) -> Any:
            raise UnavailableError(FetchFailure.NO_SUCH_HOST, url)

    port = free_ports(1)
    account, other = net.create_account("ada.test"), net.create_account("bob.test")
    async with LocalDns(net.plc, "127.0.0.1", port):
        verifier = HandleVerifier(NoHttp(), [("127.0.0.1", port)], allow_private_hosts=True)
        assert await verifier.verify_handle(account.did, "ada.test") == "ada.test"
        assert await verifier.verify_handle(other.did, "ada.test") == "handle.invalid"
        account.set_handle("eve.test")
        assert await verifier.verify_handle(account.did, "eve.test") == "eve.test"


def test_statuses_are_created_changed_deleted_hidden_and_sometimes_unusual() -> None:
    network = LocalNetwork(first_port=1)  # not started
    activity = StatusActivity(network)
    for _ in range(400):
        activity.perform()
    payloads = [sent.payload for sent in network.relay.log if sent.payload]
    ops = [op for payload in payloads for op in payload.get("ops", ())]
    assert {op["action"] for op in ops} == {"create", "update", "delete"}
    assert {f"{STATUS}/self"} < {op["path"] for op in ops}
    assert {payload.get("active") for payload in payloads} >= {True, False}
    assert any(payload.get("handle", "").removesuffix(".test")[-1:].isdigit() for payload in payloads)
    values = [decode_all(block)[0] for account in network.accounts.values() for block in account.records.values()]
    assert [value for value in values if not isinstance(value["status"], str) or value["createdAt"] is None]
