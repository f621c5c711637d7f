"""HTTP responses of the PDSes and the PLC directory, with and without faults."""

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest

from indexer.atproto import cid
from indexer.localnet.http_server import Fault
from indexer.localnet.local_account import LocalAccount
from indexer.localnet.local_network import LocalNetwork
from indexer.localnet.local_repo import Write
from tests.localnet.http_clients import http_client
from tests.localnet.independent_decoder import decode_car, decode_records

GET_REPO = "/xrpc/com.atproto.sync.getRepo"


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with http_client() as http:
        yield http


@pytest.fixture
def account(net: LocalNetwork) -> LocalAccount:
    account = net.create_account("ada.test", pds=0)
    account.apply_writes([Write.create(f"com.example.note/{n}", {"text": "x" * 100, "n": n}) for n in range(40)])
    return account


async def get(client: httpx.AsyncClient, account: LocalAccount, method: str, **headers: str) -> httpx.Response:
    url = f"{account.pds.url}/xrpc/com.atproto.sync.{method}?did={account.did}"
    return await client.get(url, headers=headers)


@pytest.mark.parametrize("encoding", ["gzip", "identity"])
async def test_export_is_chunked_and_compressed_on_request(
    account: LocalAccount, client: httpx.AsyncClient, encoding: str
) -> None:
    answer = await get(client, account, "getRepo", **{"accept-encoding": encoding})
    assert answer.headers.get("content-encoding", "identity") == encoding
    assert answer.headers["content-type"] == "application/vnd.ipld.car"
    assert "content-length" not in answer.headers
    root, blocks = decode_car(answer.content)
    assert root == account.repo.head.cid
    assert decode_records(blocks, account.repo.head.data) == {
        path: cid.cid_of(block) for path, block in account.records.items()
    }


@pytest.mark.parametrize(
    ("action", "error", "status"),
    [
        ("deactivate", "RepoDeactivated", "deactivated"),
        ("takedown", "RepoTakendown", "takendown"),
        ("suspend", "RepoSuspended", "suspended"),
    ],
)
async def test_inactive_repo_is_refused_with_its_error_name(
    account: LocalAccount, client: httpx.AsyncClient, action: str, error: str, status: str
) -> None:
    getattr(account, action)()
    for method in ("getRepo", "getLatestCommit"):
        answer = await get(client, account, method)
        assert (answer.status_code, answer.json()["error"]) == (400, error)
    state = await get(client, account, "getRepoStatus")
    assert state.json() == {"did": account.did, "active": False, "status": status}
    (row,) = (await get(client, account, "listRepos")).json()["repos"]
    assert (row["active"], row["status"]) == (False, status)


async def test_pds_returns_head_of_active_repo(account: LocalAccount, client: httpx.AsyncClient) -> None:
    head = account.repo.head
    latest = (await get(client, account, "getLatestCommit")).json()
    assert latest == {"cid": cid.cid_text(head.cid), "rev": head.rev}
    status = (await get(client, account, "getRepoStatus")).json()
    assert status == {"did": account.did, "active": True, "rev": head.rev}


async def test_deleted_or_unknown_repo_is_not_found(account: LocalAccount, client: httpx.AsyncClient) -> None:
    account.delete_account()
    for did in (account.did, "did:plc:unknown"):
        for method in ("getRepo", "getLatestCommit", "getRepoStatus"):
            answer = await client.get(f"{account.pds.url}/xrpc/com.atproto.sync.{method}?did={did}")
            assert (answer.status_code, answer.json()["error"]) == (400, "RepoNotFound")
    assert (await get(client, account, "listRepos")).json() == {"repos": [], "cursor": "1"}


async def test_pds_lists_all_repos_and_ends_with_empty_page(net: LocalNetwork, client: httpx.AsyncClient) -> None:
    accounts = [net.create_account(pds=1) for _ in range(5)]
    pages, query = [], "limit=2"
    while True:
        page = (await client.get(f"{net.pdses[1].url}/xrpc/com.atproto.sync.listRepos?{query}")).json()
        pages.append([row["did"] for row in page["repos"]])
        if "cursor" not in page:
            break
        query = f"limit=2&cursor={page['cursor']}"
    assert [len(page) for page in pages] == [2, 2, 1, 0]
    assert [did for page in pages for did in page] == [account.did for account in accounts]


@pytest.mark.parametrize("query", ["limit=0", "limit=1001", "limit=x", "cursor=x", "cursor=-1"])
async def test_invalid_cursor_or_limit_is_refused(net: LocalNetwork, client: httpx.AsyncClient, query: str) -> None:
    answer = await client.get(f"{net.pdses[0].url}/xrpc/com.atproto.sync.listRepos?{query}")
    assert (answer.status_code, answer.json()["error"]) == (400, "InvalidRequest")


async def test_pds_resolves_handles_of_active_accounts(account: LocalAccount, client: httpx.AsyncClient) -> None:
    url = f"{account.pds.url}/.well-known/atproto-did"
    assert (await client.get(url, headers={"host": "ada.test"})).text == account.did
    account.set_handle("countess.test")
    assert (await client.get(url, headers={"host": "countess.test"})).text == account.did
    assert (await client.get(url, headers={"host": "ada.test"})).status_code == 404
    account.deactivate()
    assert (await client.get(url, headers={"host": "countess.test"})).status_code == 404


async def test_directory_serves_did_document(
    net: LocalNetwork, account: LocalAccount, client: httpx.AsyncClient
) -> None:
    answer = await client.get(f"{net.plc_url}/{account.did}")
    assert answer.headers["content-type"] == "application/did+ld+json"
    document = answer.json()
    assert document["id"] == account.did
    assert document["alsoKnownAs"] == ["at://ada.test"]
    (method,) = document["verificationMethod"]
    assert method == {
        "id": f"{account.did}#atproto",
        "type": "Multikey",
        "controller": account.did,
        "publicKeyMultibase": account.key.public.did_key().removeprefix("did:key:"),
    }
    (service,) = document["service"]
    assert service["serviceEndpoint"] == account.pds.url
    account.rotate_key("p256")
    (rotated,) = (await client.get(f"{net.plc_url}/{account.did}")).json()["verificationMethod"]
    assert method["publicKeyMultibase"] != rotated["publicKeyMultibase"]
    assert rotated["publicKeyMultibase"].startswith("zDna")


async def test_unknown_and_tombstoned_dids_are_not_found(
    net: LocalNetwork, account: LocalAccount, client: httpx.AsyncClient
) -> None:
    net.plc.identities[account.did] = None
    for did, status, message in (
        (account.did, 410, "DID not available"),
        ("did:plc:unknown", 404, "DID not registered"),
    ):
        answer = await client.get(f"{net.plc_url}/{did}")
        assert (answer.status_code, answer.json()) == (status, {"message": f"{message}: {did}"})


async def test_fault_applies_given_number_of_times(account: LocalAccount, client: httpx.AsyncClient) -> None:
    fault = Fault(GET_REPO, times=2, status=429, headers={"retry-after": "7"}, body=b"<html>busy</html>")
    account.pds.faults.append(fault)
    answers = [await get(client, account, "getRepo") for _ in range(3)]
    assert [answer.status_code for answer in answers] == [429, 429, 200]
    assert (answers[0].headers["retry-after"], answers[0].content) == ("7", fault.body)
    assert (fault.fired, account.pds.requests[GET_REPO]) == (2, 3)


async def test_fault_applies_only_to_its_path_and_did(
    net: LocalNetwork, account: LocalAccount, client: httpx.AsyncClient
) -> None:
    other = net.create_account(pds=0)
    fault = Fault(GET_REPO, did=other.did, times=None, status=500)
    account.pds.faults.append(fault)
    assert (await get(client, account, "getRepo")).status_code == 200
    assert (await get(client, other, "getLatestCommit")).status_code == 200
    assert [(await get(client, other, "getRepo")).status_code for _ in range(3)] == [500] * 3
    assert fault.fired == 3


async def test_hang_never_responds(account: LocalAccount, client: httpx.AsyncClient) -> None:
    fault = Fault(GET_REPO, hang=True)
    account.pds.faults.append(fault)
    request = asyncio.create_task(get(client, account, "getRepo"))
    assert (await get(client, account, "getLatestCommit")).status_code == 200
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(request, 0.1)
    assert fault.fired == 1


@pytest.mark.parametrize("encoding", ["gzip", "identity"])
async def test_cut_breaks_the_body(account: LocalAccount, client: httpx.AsyncClient, encoding: str) -> None:
    account.pds.faults.append(Fault(GET_REPO, cut=500))
    with pytest.raises(httpx.RemoteProtocolError):
        await get(client, account, "getRepo", **{"accept-encoding": encoding})
    assert (await get(client, account, "getRepo")).status_code == 200


async def test_export_can_end_cleanly_after_some_sections(account: LocalAccount, client: httpx.AsyncClient) -> None:
    account.pds.faults.append(Fault(GET_REPO, sections=11))
    short = await get(client, account, "getRepo")
    whole = await get(client, account, "getRepo")
    root, blocks = decode_car(short.content)
    assert (short.status_code, root, len(blocks)) == (200, account.repo.head.cid, 10)
    assert whole.content.startswith(short.content)


@pytest.mark.slow
async def test_rate_slows_the_body_down(account: LocalAccount, client: httpx.AsyncClient) -> None:
    whole = (await get(client, account, "getRepo")).content
    account.pds.faults.append(Fault(GET_REPO, rate=len(whole) * 5))
    clock = asyncio.get_running_loop().time
    began = clock()
    async with client.stream("GET", f"{account.pds.url}{GET_REPO}?did={account.did}") as response:
        pieces = [piece async for piece in response.aiter_bytes()]
    assert b"".join(pieces) == whole
    assert len(pieces) >= 4, "the body was buffered until the end"
    assert clock() - began > 0.15
