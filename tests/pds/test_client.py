"""Exports and answers from hosts and a relay, in good order and in bad."""

import re
from pathlib import Path
from typing import NoReturn

import pytest

from indexer.atproto.limits import DEFAULT_LIMITS, Limits
from indexer.errors import UnavailableError, UpstreamError
from indexer.localnet.account import Account
from indexer.localnet.network import LocalNetwork
from indexer.localnet.repo import Write
from indexer.localnet.server import Fault
from indexer.outbound import Outbound, Rates
from indexer.pds import PdsClient, client
from indexer.reasons import FetchFailure, Rejection
from indexer.sync.verify import verify_snapshot

GET_REPO = "com.atproto.sync.getRepo"
CAR = {"Content-Type": "application/vnd.ipld.car"}


@pytest.fixture
def account(net: LocalNetwork) -> Account:
    account = net.create_account("ada.test", pds=0)
    account.apply_writes([Write.create(f"com.example.note/{n}", {"text": "x" * 100, "n": n}) for n in range(40)])
    return account


@pytest.fixture
def pds(outbound: Outbound, tmp_path: Path) -> PdsClient:
    return PdsClient(outbound, DEFAULT_LIMITS, tmp_path / "spool")


async def failure_of(pds: PdsClient, account: Account) -> UnavailableError:
    with pytest.raises(UnavailableError) as failure:
        async with pds.fetch_repo(account.did, account.pds.url):
            pytest.fail("there is no export")
    return failure.value


@pytest.mark.parametrize("asked", ["pds", "relay"])
async def test_an_export_from_the_host_or_by_the_relays_redirect(
    net: LocalNetwork, account: Account, pds: PdsClient, asked: str
) -> None:
    host = account.pds.url if asked == "pds" else net.relay.url
    async with pds.fetch_repo(account.did, f"{host}/") as spool:
        key = account.key.public
        snapshot = verify_snapshot(account.did, spool.root, spool.block, key, DEFAULT_LIMITS)
        assert spool.root == account.repo.head.cid
        found = {path.decode(): spool.block(cid) for path, cid in snapshot.records()}
    assert found == account.records


async def test_the_connection_is_given_back_before_the_export_is_used(account: Account, tmp_path: Path) -> None:
    outbound = Outbound(user_agent="test", allow_private_hosts=True, rates=Rates(host_concurrency=1))
    pds = PdsClient(outbound, DEFAULT_LIMITS, tmp_path)
    async with pds.fetch_repo(account.did, account.pds.url):
        await pds.latest_commit(account.did, account.pds.url)
    await outbound.close()


async def test_the_newest_commit(net: LocalNetwork, account: Account, pds: PdsClient) -> None:
    for host in (account.pds.url, net.relay.url):
        assert await pds.latest_commit(account.did, host) == (account.repo.head.cid, account.rev)


@pytest.mark.parametrize(
    ("doing", "reason"),
    [
        ("deactivate", FetchFailure.REPO_DEACTIVATED),
        ("takedown", FetchFailure.REPO_TAKENDOWN),
        ("suspend", FetchFailure.REPO_SUSPENDED),
        ("delete_account", FetchFailure.REPO_NOT_FOUND),
    ],
)
async def test_repos_that_are_not_to_be_had(account: Account, pds: PdsClient, doing: str, reason: FetchFailure) -> None:
    getattr(account, doing)()
    assert (await failure_of(pds, account)).reason is reason
    with pytest.raises(UnavailableError) as failure:
        await pds.latest_commit(account.did, account.pds.url)
    assert failure.value.reason is reason
    assert reason.parks


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (Fault(GET_REPO, hang=True), FetchFailure.TIMEOUT),
        (Fault(GET_REPO, cut=1_000), FetchFailure.UNREACHABLE),
        (Fault(GET_REPO, status=200, headers=CAR), FetchFailure.EXPORT_INCOMPLETE),
        (Fault(GET_REPO, status=200, headers={"Content-Type": "text/html"}, body=b"<html>"), FetchFailure.BAD_ANSWER),
        (
            Fault(GET_REPO, status=200, headers={"Content-Type": "application/json"}, body=b"{}"),
            FetchFailure.BAD_ANSWER,
        ),
        (Fault(GET_REPO, status=404, body=b"<html>"), FetchFailure.HTTP_STATUS),
        (Fault(GET_REPO, status=500), FetchFailure.HTTP_STATUS),
        (Fault(GET_REPO, status=501), FetchFailure.HTTP_STATUS),
        (Fault(GET_REPO, status=429, body=b"<html>"), FetchFailure.THROTTLED),
        (Fault(GET_REPO, status=302, headers={"Location": "ftp://127.0.0.1/"}), FetchFailure.REFUSED_ADDRESS),
    ],
)
async def test_an_export_that_fails_and_the_next_that_does_not(
    account: Account, pds: PdsClient, tmp_path: Path, fault: Fault, reason: FetchFailure
) -> None:
    account.pds.faults.append(fault)
    assert (await failure_of(pds, account)).reason is reason
    assert list((tmp_path / "spool").iterdir()) == []
    if reason is not FetchFailure.THROTTLED:
        async with pds.fetch_repo(account.did, account.pds.url) as spool:
            assert spool.block(account.repo.head.cid)


@pytest.mark.parametrize(("smaller", "times"), [(0, 0), (1, 1), (6_000, 1)])
async def test_an_export_turns_out_to_be_large_once(
    account: Account, pds: PdsClient, monkeypatch: pytest.MonkeyPatch, smaller: int, times: int
) -> None:
    """By its first byte beyond the number, which is so much smaller than it; it comes in some pieces."""
    told: list[bool] = []
    size = sum(map(len, account.repo.export()))
    monkeypatch.setattr(client, "LARGE_BYTES", size - smaller)
    account.pds.faults.append(Fault(GET_REPO, rate=5 * size))
    async with pds.fetch_repo(account.did, account.pds.url, lambda: told.append(True)) as spool:
        assert spool.block(account.repo.head.cid)
    assert len(told) == times


async def test_an_export_may_be_too_large_for_now(
    account: Account, pds: PdsClient, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def later() -> NoReturn:
        raise InterruptedError

    monkeypatch.setattr(client, "LARGE_BYTES", 1_000)
    account.pds.faults.append(Fault(GET_REPO, rate=10_000))
    with pytest.raises(InterruptedError):
        async with pds.fetch_repo(account.did, account.pds.url, later):
            pytest.fail("it goes on")
    assert list((tmp_path / "spool").iterdir()) == []


@pytest.mark.parametrize(
    ("bounds", "why"),
    [
        ({}, None),
        ({"export_rate": 100_000}, r"\d+ bytes in \d+ s$"),
        ({"export_seconds": 0.3}, "TimeoutError$"),
    ],
)
async def test_an_export_that_comes_slowly(
    account: Account, outbound: Outbound, tmp_path: Path, bounds: dict[str, float], why: str | None
) -> None:
    """In some three quarters of a second."""
    account.pds.faults.append(Fault(GET_REPO, rate=sum(map(len, account.repo.export())) * 4 // 3))
    pds = PdsClient(outbound, DEFAULT_LIMITS, tmp_path / "spool", **bounds)
    if why is None:
        async with pds.fetch_repo(account.did, account.pds.url) as spool:
            assert spool.block(account.repo.head.cid)
    else:
        failure = await failure_of(pds, account)
        assert failure.reason is FetchFailure.TIMEOUT
        assert re.search(why, failure.detail), failure.detail
    assert list((tmp_path / "spool").iterdir()) == []


async def test_an_export_cut_between_two_blocks_looks_whole_until_it_is_walked(
    account: Account, pds: PdsClient
) -> None:
    account.pds.faults.append(Fault(GET_REPO, sections=3))
    async with pds.fetch_repo(account.did, account.pds.url) as spool:
        with pytest.raises(UnavailableError) as failure:
            verify_snapshot(account.did, spool.root, spool.block, account.key.public, DEFAULT_LIMITS)
    assert failure.value.reason is FetchFailure.EXPORT_INCOMPLETE


async def test_an_export_that_is_no_car_and_one_that_is_too_large(
    account: Account, pds: PdsClient, outbound: Outbound, tmp_path: Path
) -> None:
    account.pds.faults.append(Fault(GET_REPO, status=200, headers=CAR, body=b"<html></html>" * 100))
    with pytest.raises(UpstreamError) as rejection:
        async with pds.fetch_repo(account.did, account.pds.url):
            pytest.fail("there is no export")
    assert rejection.value.reason is Rejection.CAR_MALFORMED
    small = PdsClient(outbound, Limits(repo_bytes=1_000), tmp_path)
    assert (await failure_of(small, account)).reason is FetchFailure.TOO_LARGE


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>",
        b"[]",
        b"null",
        b"{}",
        b'{"cid": 1, "rev": 2}',
        b'{"cid": "bafy", "rev": "3l3qo2vuowo2b"}',
        b'{"cid": "bafyreie5cvv4h45feadgeuwhbcutmh6t2ceseocckahdoe6uat64zmz454", "rev": "now"}',
        b'{"cid": "bafkreie5cvv4h45feadgeuwhbcutmh6t2ceseocckahdoe6uat64zmz45!", "rev": "3l3qo2vuowo2b"}',
        b'{"active": "yes"}',
        b"[" * 60_000,
    ],
)
async def test_answers_that_are_none(account: Account, pds: PdsClient, body: bytes) -> None:
    account.pds.faults.append(Fault("", status=200, body=body, times=None))
    with pytest.raises(UnavailableError) as failure:
        await pds.latest_commit(account.did, account.pds.url)
    assert failure.value.reason is FetchFailure.BAD_ANSWER


@pytest.mark.parametrize("host", ["", "pds.example", "//", "https://[::1", "at://did:plc:x", "http://\x00/"])
async def test_hosts_that_are_none(account: Account, pds: PdsClient, host: str) -> None:
    with pytest.raises(UnavailableError) as failure:
        await pds.latest_commit(account.did, host)
    assert failure.value.reason is FetchFailure.REFUSED_ADDRESS


async def test_a_hosts_path_and_query_are_left_out(account: Account, pds: PdsClient) -> None:
    await pds.latest_commit(account.did, f"{account.pds.url}/path?query#fragment")
    assert account.pds.requests["/xrpc/com.atproto.sync.getLatestCommit"] == 1
