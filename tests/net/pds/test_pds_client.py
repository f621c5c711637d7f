"""Exports and latest commits from hosts and a relay, with valid and invalid responses."""

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import islice
from pathlib import Path

import pytest

from indexer.atproto.limits import DEFAULT_LIMITS, Limits
from indexer.core.spool import Spool
from indexer.demo.local_pds import GET_BLOCKS
from indexer.demo.local_repo import Write, car
from indexer.errors import UnavailableError, UpstreamError
from indexer.net.http.host_limits import RateLimits
from indexer.net.http.http_client import OutboundClient, OutboundSettings
from indexer.net.pds.pds_client import PdsClient
from indexer.net.pds.xrpc import XrpcError
from indexer.reasons import FetchFailure, Rejection
from indexer.sync.export import verify_snapshot
from indexer.sync.verify import verify_record
from tests.faulty_network import Fault, FaultyAccount, FaultyNetwork

GET_REPO = "com.atproto.sync.getRepo"
CAR = {"Content-Type": "application/vnd.ipld.car"}


@pytest.fixture
def account(net: FaultyNetwork) -> FaultyAccount:
    account = net.create_account("ada.test", pds=0)
    account.apply_writes([Write.create(f"com.example.note/{n}", {"text": "x" * 100, "n": n}) for n in range(40)])
    return account


@pytest.fixture
def pds(outbound: OutboundClient, tmp_path: Path) -> PdsClient:
    return PdsClient(outbound, DEFAULT_LIMITS, tmp_path / "spool", Spool)


async def failure_of(pds: PdsClient, account: FaultyAccount) -> UnavailableError:
    with pytest.raises(UnavailableError) as failure:
        async with fetched(pds, account.did, account.pds.url):
            pytest.fail("the fetch did not fail")
    return failure.value


@pytest.mark.parametrize("source", ["pds", "relay"])
async def test_export_from_the_pds_or_by_redirect_of_the_relay(
    net: FaultyNetwork, account: FaultyAccount, pds: PdsClient, source: str
) -> None:
    host = account.pds.url if source == "pds" else net.relay.url
    async with fetched(pds, account.did, f"{host}/") as spool:
        key = account.key.public
        snapshot = verify_snapshot(account.did, spool.root, spool.block, key, DEFAULT_LIMITS, spool.size)
        assert spool.root == account.repo.head.cid
        found = {path.decode(): spool.block(cid) for path, cid in snapshot.records()}
    assert found == account.records


@pytest.mark.parametrize("content_type", ["application/car", "text/plain; charset=utf-8", "application/json", "binary"])
async def test_export_of_any_media_type_is_read_if_its_content_proves_itself(
    account: FaultyAccount, pds: PdsClient, content_type: str
) -> None:
    """A body that is not a CAR is refused by its content, with the media type in the message."""
    whole, headers = b"".join(account.repo.export()), {"Content-Type": content_type}
    account.pds.faults.append(Fault(GET_REPO, status=200, headers=headers, body=whole))
    async with fetched(pds, account.did, account.pds.url) as spool:
        verify_snapshot(account.did, spool.root, spool.block, account.key.public, DEFAULT_LIMITS, spool.size)
    for body in (b"<html>", b"<!DOCTYPE html>" + b"<p>Log in</p>" * 1_000, b'{"error":"InvalidRequest"}', whole[:-1]):
        account.pds.faults.append(Fault(GET_REPO, status=200, headers=headers, body=body))
        failure = await failure_of(pds, account)
        assert failure.reason is FetchFailure.BAD_ANSWER
        assert f"media type '{content_type.partition(';')[0]}' for an export, and no valid CAR" in failure.detail


@asynccontextmanager
async def fetched(pds: PdsClient, did: str, host: str) -> AsyncIterator[Spool]:
    async with pds.open_export(did, host) as download:
        await download.fetch()
        assert isinstance(download.reader, Spool)
        yield download.reader


async def test_export_that_was_cut_off_is_not_complete(account: FaultyAccount, pds: PdsClient) -> None:
    """Its rate says nothing about the usual rate of its host."""
    whole = b"".join(account.repo.export())
    account.pds.faults.append(Fault(GET_REPO, status=200, headers=CAR, body=whole[:-1]))
    async with pds.open_export(account.did, account.pds.url) as download:
        with pytest.raises(UnavailableError) as failure:
            await download.fetch()
        assert failure.value.reason is FetchFailure.EXPORT_INCOMPLETE
        assert (download.received, download.complete) == (len(whole) - 1, False)
    async with pds.open_export(account.did, account.pds.url) as download:
        assert await download.fetch()
        assert download.complete


async def test_complete_export_releases_its_request_slot(account: FaultyAccount, tmp_path: Path) -> None:
    settings = OutboundSettings("test", allow_private_hosts=True, rates=RateLimits(host_concurrency=1))
    async with OutboundClient(settings) as outbound:
        pds = PdsClient(outbound, DEFAULT_LIMITS, tmp_path, Spool)
        async with fetched(pds, account.did, account.pds.url):
            await pds.fetch_latest_commit(account.did, account.pds.url)


async def test_latest_commit(net: FaultyNetwork, account: FaultyAccount, pds: PdsClient) -> None:
    for host in (account.pds.url, net.relay.url):
        assert await pds.fetch_latest_commit(account.did, host) == (account.repo.head.cid, account.rev)


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        ("deactivated", FetchFailure.REPO_DEACTIVATED),
        ("takendown", FetchFailure.REPO_TAKENDOWN),
        ("suspended", FetchFailure.REPO_SUSPENDED),
        ("deleted", FetchFailure.REPO_NOT_FOUND),
    ],
)
async def test_inactive_repo_is_a_permanent_failure(
    account: FaultyAccount, pds: PdsClient, status: str, reason: FetchFailure
) -> None:
    account.set_status(status)
    assert (await failure_of(pds, account)).reason is reason
    with pytest.raises(UnavailableError) as failure:
        await pds.fetch_latest_commit(account.did, account.pds.url)
    assert failure.value.reason is reason
    assert reason.is_permanent


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (Fault(GET_REPO, cut=1_000), FetchFailure.UNREACHABLE),
        (Fault(GET_REPO, status=200, headers=CAR), FetchFailure.EXPORT_INCOMPLETE),
        (Fault(GET_REPO, status=200, headers={"Content-Type": "text/html"}, body=b"<html>"), FetchFailure.BAD_ANSWER),
        (Fault(GET_REPO, status=404, body=b"<html>"), FetchFailure.HTTP_STATUS),
        (Fault(GET_REPO, status=500), FetchFailure.HTTP_STATUS),
        (Fault(GET_REPO, status=429, body=b"<html>"), FetchFailure.THROTTLED),
        (Fault(GET_REPO, status=302, headers={"Location": "ftp://127.0.0.1/"}), FetchFailure.REFUSED_ADDRESS),
    ],
)
async def test_failed_export_leaves_no_file_and_the_next_one_succeeds(
    account: FaultyAccount, pds: PdsClient, tmp_path: Path, fault: Fault, reason: FetchFailure
) -> None:
    account.pds.faults.append(fault)
    assert (await failure_of(pds, account)).reason is reason
    assert list((tmp_path / "spool").iterdir()) == []
    if reason is not FetchFailure.THROTTLED:
        async with fetched(pds, account.did, account.pds.url) as spool:
            assert spool.block(account.repo.head.cid)


@pytest.mark.parametrize(("smaller", "complete"), [(0, True), (1, False), (6_000, False)])
async def test_download_stops_at_the_first_byte_above_the_limit(
    account: FaultyAccount, pds: PdsClient, tmp_path: Path, smaller: int, *, complete: bool
) -> None:
    """It can be continued. Otherwise it leaves no file."""
    size = sum(map(len, account.repo.export()))
    account.pds.faults.append(Fault(GET_REPO, rate=20 * size))
    async with pds.open_export(account.did, account.pds.url) as download:
        assert await download.fetch(size - smaller) == complete
        assert complete or await download.fetch()
        assert download.complete
    async with pds.open_export(account.did, account.pds.url) as download:
        assert await download.fetch(size - smaller) == complete
    assert list((tmp_path / "spool").iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limits", "detail"),
    [({}, None), ({"export_min_rate": 100_000}, r"\d+ bytes in \d+ s$"), ({"export_timeout": 0.3}, "TimeoutError$")],
)
async def test_slow_export(
    account: FaultyAccount, outbound: OutboundClient, tmp_path: Path, limits: dict[str, float], detail: str | None
) -> None:
    """Send the export in about a second and a half."""
    account.pds.faults.append(Fault(GET_REPO, rate=sum(map(len, account.repo.export())) * 2 // 3))
    pds = PdsClient(outbound, DEFAULT_LIMITS, tmp_path / "spool", Spool, **limits)
    if detail is None:
        async with fetched(pds, account.did, account.pds.url) as spool:
            assert spool.block(account.repo.head.cid)
    else:
        failure = await failure_of(pds, account)
        assert failure.reason is FetchFailure.TIMEOUT
        assert re.search(detail, failure.detail), failure.detail
    assert list((tmp_path / "spool").iterdir()) == []


async def test_export_truncated_between_two_blocks_is_found_by_verification(
    account: FaultyAccount, pds: PdsClient
) -> None:
    account.pds.faults.append(Fault(GET_REPO, sections=3))
    async with fetched(pds, account.did, account.pds.url) as spool:
        with pytest.raises(UnavailableError) as failure:
            verify_snapshot(account.did, spool.root, spool.block, account.key.public, DEFAULT_LIMITS, spool.size)
    assert failure.value.reason is FetchFailure.EXPORT_INCOMPLETE


async def test_export_that_is_not_a_car_file_or_too_large(
    account: FaultyAccount, pds: PdsClient, outbound: OutboundClient, tmp_path: Path
) -> None:
    account.pds.faults.append(Fault(GET_REPO, status=200, headers=CAR, body=b"<html></html>" * 100))
    with pytest.raises(UpstreamError) as rejection:
        async with fetched(pds, account.did, account.pds.url):
            pytest.fail("the fetch did not fail")
    assert rejection.value.reason is Rejection.CAR_MALFORMED
    small = PdsClient(outbound, Limits(repo_bytes=1_000), tmp_path, Spool)
    assert (await failure_of(small, account)).reason is FetchFailure.TOO_LARGE


CID, REV = b"bafyreie5cvv4h45feadgeuwhbcutmh6t2ceseocckahdoe6uat64zmz454", b"3l3qo2vuowo2b"
DEEP = b'{"cid": ' + b"[" * 1_015 + b"]" * 1_015 + b', "rev": "' + REV + b'"}'  # nearly as deep as orjson decodes


@pytest.mark.parametrize(
    "body",
    [
        *b" <html> [] null {}".split(b" "),
        b'{"cid": 1, "rev": 2}',
        b'{"cid": "bafy", "rev": "' + REV + b'"}',
        b'{"cid": "' + CID + b'", "rev": "now"}',
        b'{"cid": "' + CID[:-1] + b'!", "rev": "' + REV + b'"}',
        b'{"active": "yes"}',
        b"[" * 60_000,
        DEEP,
    ],
    ids=len,
)
async def test_invalid_latest_commit_is_refused(account: FaultyAccount, pds: PdsClient, body: bytes) -> None:
    account.pds.faults.append(Fault("", status=200, body=body, times=None))
    with pytest.raises(UnavailableError) as failure:
        await pds.fetch_latest_commit(account.did, account.pds.url)
    assert failure.value.reason is FetchFailure.BAD_ANSWER


async def test_record_with_its_proof(account: FaultyAccount, pds: PdsClient) -> None:
    path = "com.example.note/7"
    answer = await pds.fetch_record_proof(account.did, path, account.pds.url)
    proof = answer.body
    assert answer.server == f"127.0.0.1:{account.pds.port}"
    assert proof == account.repo.record_proof(path)
    block = verify_record(account.did, path, proof, account.key.public, DEFAULT_LIMITS)
    assert block == account.records[path]
    account.set_status("takendown")
    with pytest.raises(UnavailableError) as failure:
        await pds.fetch_record_proof(account.did, path, account.pds.url)
    assert failure.value.reason is FetchFailure.REPO_TAKENDOWN


@pytest.fixture
def many_blocks(account: FaultyAccount) -> dict[bytes, bytes]:
    """Return 130 blocks of the account."""
    account.apply_writes([Write.create(f"com.example.note/a{n}", {"n": n}) for n in range(100)])
    return dict(islice(account.repo.blocks().items(), 130))


@pytest.mark.parametrize(
    ("status", "longest", "refused", "answered"), [(414, 7_000, 0, 2), (431, 4_000, 1, 3), (400, 1_500, 3, 7)]
)
async def test_blocks_are_requested_in_parts_that_the_host_accepts(
    account: FaultyAccount,
    pds: PdsClient,
    many_blocks: dict[bytes, bytes],
    status: int,
    longest: int,
    refused: int,
    answered: int,
) -> None:
    """Later requests to the host are as short at once."""
    host, body = account.pds.url, b'{"error":"InvalidRequest","message":"too many values"}'
    account.pds.faults.append(Fault(GET_BLOCKS, status=status, body=body, times=None, longer_than=longest))
    for requests in (refused + answered, answered):
        assert await pds.fetch_blocks(account.did, list(many_blocks), host, 1_000_000) == many_blocks
        assert account.pds.requests.pop(GET_BLOCKS) == requests


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (Fault(GET_BLOCKS, status=400, body=b'{"error":"InvalidRequest","message":"no"}', times=4), "http-status: 400"),
        (Fault(GET_BLOCKS, status=414, times=4), "http-status: 414"),
        (Fault(GET_BLOCKS, status=400, body=b'{"error":"RepoTakendown","message":"?"}'), "repo-takendown"),
        (Fault(GET_BLOCKS, status=501), "http-status: the host does not offer"),
        (Fault(GET_BLOCKS, status=429), "throttled"),
        (Fault(GET_BLOCKS, status=200, headers=CAR, body=bytes(1_000_000)), "too-large"),
        (Fault(GET_BLOCKS, status=200, headers=CAR, body=b"<html>"), "car-malformed"),
        (Fault(GET_BLOCKS, cut=100), "unreachable"),
    ],
)
async def test_failed_request_for_blocks_is_not_repeated(
    account: FaultyAccount, pds: PdsClient, many_blocks: dict[bytes, bytes], fault: Fault, reason: str
) -> None:
    account.pds.faults.append(fault)
    with pytest.raises((UnavailableError, UpstreamError), match=f"^{reason}"):
        await pds.fetch_blocks(account.did, list(many_blocks), account.pds.url, 100_000)
    assert fault.fired == (fault.times or 1)


async def test_bytes_are_limited_over_all_requests(
    account: FaultyAccount, pds: PdsClient, many_blocks: dict[bytes, bytes]
) -> None:
    max_bytes = sum(map(len, many_blocks.values())) + 36 * len(many_blocks)
    with pytest.raises(UnavailableError, match=FetchFailure.TOO_LARGE):
        await pds.fetch_blocks(account.did, list(many_blocks), account.pds.url, max_bytes)
    assert account.pds.requests[GET_BLOCKS] == 2


async def test_only_requested_blocks_count_and_a_missing_one_is_refused_at_once(
    account: FaultyAccount, pds: PdsClient, many_blocks: dict[bytes, bytes]
) -> None:
    host, first, old = account.pds.url, next(iter(many_blocks)), account.repo.head.cid
    whole = car(account.repo.blocks(), rootless=True)
    account.pds.faults.append(Fault(GET_BLOCKS, status=200, headers=CAR, body=whole))
    assert await pds.fetch_blocks(account.did, [first, old], host, 100_000) == {first: many_blocks[first]}
    account.apply_writes([])
    with pytest.raises(XrpcError, match="Could not find cids: bafy"):
        await pds.fetch_blocks(account.did, list(many_blocks), host, 100_000)
    assert account.pds.requests[GET_BLOCKS] == 2


async def test_only_the_origin_of_the_host_is_used(account: FaultyAccount, pds: PdsClient) -> None:
    for host in ("", "pds.example", "//", "https://[::1", "at://did:plc:x", "http://\x00/"):
        with pytest.raises(UnavailableError) as failure:
            await pds.fetch_latest_commit(account.did, host)
        assert failure.value.reason is FetchFailure.REFUSED_ADDRESS
    await pds.fetch_latest_commit(account.did, f"{account.pds.url}/path?query#fragment")
    assert account.pds.requests["/xrpc/com.atproto.sync.getLatestCommit"] == 1
