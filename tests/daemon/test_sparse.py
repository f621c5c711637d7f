"""Resyncs that fetch only the records of one collection: few bytes, and nothing unproven is stored or deleted."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from indexer.atproto.crypto import PrivateKey
from indexer.demo.local_pds import CAR_TYPE, GET_BLOCKS, GET_RECORD, GET_REPO
from indexer.demo.local_repo import LocalRepo, Write, car
from indexer.resync.sparse import SparseFetch
from tests.daemon.running_daemon import LIKE, POST, FilteredNetwork, RunningDaemon, running_daemon
from tests.database_checks import assert_change_log_consistent
from tests.faulty_network import Fault, FaultyAccount
from tests.waiting import until

pytestmark = pytest.mark.slow

CAR = {"Content-Type": CAR_TYPE}
MAX_SHARE = 0.1
"""Of the bytes of an export, for 30 records of 2,030."""


def write_lost(account: FaultyAccount, likes: Sequence[str] = (), posts: int = 0, delete: Sequence[str] = ()) -> None:
    """Make one commit that the relay does not send, and one that it does."""
    writes = [Write.create(f"{LIKE}/{rkey}", {"$type": LIKE, "rkey": rkey}) for rkey in likes]
    writes += [Write.create(f"{POST}/{number:05}", {"$type": POST, "text": "x" * 200}) for number in range(posts)]
    writes += [Write.delete(f"{LIKE}/{rkey}") for rkey in delete]
    account.apply_writes(writes, lost=True)
    account.create(POST, {"$type": POST})


async def make_due(daemon: RunningDaemon, account: FaultyAccount) -> None:
    """Let the next attempt begin at once: the repo has broken before."""
    await daemon.execute("update indexer.repo set next_attempt_at = null where did = $1", account.did)


def requests_of(daemon: RunningDaemon, path: str) -> int:
    return sum(pds.requests[path] for pds in daemon.network.pdses)


async def test_resync_of_one_collection_needs_few_bytes_and_requests(database: str, tmp_path: Path) -> None:
    """Also after records of it were created, updated and deleted, and if only its absence is to be proven."""
    async with (
        FilteredNetwork(collections=[LIKE]) as network,
        running_daemon(database, tmp_path, network, collections=LIKE) as daemon,
    ):
        account, without = daemon.create_account("ada.test"), daemon.create_account("bob.test")
        write_lost(account, likes=[f"{number:03}" for number in range(30)], posts=2_000)
        write_lost(without, posts=2_000)
        await daemon.wait_until_equal()
        assert len(await daemon.record_rows(account)) == 30
        write_lost(account, likes=["new"], delete=["007", "029"])
        account.apply_writes([Write.update(f"{LIKE}/011", {"$type": LIKE, "changed": True})], lost=True)
        account.create(POST, {"$type": POST})
        await daemon.wait_for_cursor()
        await daemon.resync_until_equal(account)
        assert {row["rkey"] for row in await daemon.record_rows(account)} >= {"new", "011"}
        assert requests_of(daemon, GET_REPO) == 0
        resyncs = daemon.counter("resync", result="synchronized")
        sent = sum(pds.sent[GET_RECORD] + pds.sent[GET_BLOCKS] for pds in network.pdses)
        assert sent / resyncs < MAX_SHARE * sum(map(len, account.repo.export()))
        assert requests_of(daemon, GET_RECORD) == resyncs
        assert requests_of(daemon, GET_BLOCKS) <= 6 * resyncs
        await assert_change_log_consistent(database)


def with_foreign_key(account: FaultyAccount) -> LocalRepo:
    """Return a repo of the account in which the collection is empty. Another key has signed it."""
    return LocalRepo(account.did, PrivateKey.from_seed("k256", b"another"), account.rev)


def answer(path: str, body: bytes) -> list[Fault]:
    return [Fault(path, status=200, headers=CAR, body=body, times=None)]


def error(path: str, status: int, name: str = "") -> list[Fault]:
    return [Fault(path, status=status, body=b'{"error":"%s","message":"?"}' % name.encode(), times=None)]


OLD_PATH = f"{LIKE}/self"
LIES: dict[str, tuple[str, Callable[[FaultyAccount, FaultyAccount], list[Fault]]]] = {
    "no tree node": (
        "export-incomplete: no node",
        lambda _account, _other: [Fault(GET_RECORD, sections=2, times=None)],
    ),
    "no commit": (
        "commit-malformed",
        lambda account, _: answer(GET_RECORD, car(dict(list(account.repo.blocks().items())[1:]))),
    ),
    "no block": (
        "bad-answer: the host lacks blocks",
        lambda _account, _other: [Fault(GET_BLOCKS, sections=1, times=None)],
    ),
    "blocks of another account": (
        "bad-answer: the host lacks blocks",
        lambda _, other: answer(GET_BLOCKS, car(other.repo.blocks(), rootless=True)),
    ),
    "commit of another account": ("envelope-mismatch", lambda _, other: answer(GET_RECORD, car(other.repo.blocks()))),
    "empty repo with a foreign key": (
        "signature-invalid",
        lambda account, _: answer(GET_RECORD, with_foreign_key(account).record_proof(OLD_PATH)),
    ),
    "state before the commits": ("export-stale", lambda account, _: answer(GET_RECORD, car(account.repo.blocks()))),
    "cut in a block": ("unreachable", lambda _account, _other: [Fault(GET_BLOCKS, cut=300, times=None)]),
    "endless proof": ("too-large", lambda _account, _other: answer(GET_RECORD, bytes(3 << 20))),
    "endless blocks": ("too-large", lambda _account, _other: answer(GET_BLOCKS, bytes(5 << 20))),
    "a byte now and then": ("timeout", lambda _account, _other: [Fault(GET_BLOCKS, rate=20, times=None)]),
    "no answer": ("timeout", lambda _account, _other: [Fault(GET_RECORD, hang=True, times=None)]),
    "HTML": ("car-malformed", lambda _account, _other: answer(GET_BLOCKS, b"<html>")),
    "status 404": ("http-status: 404", lambda _account, _other: error(GET_RECORD, 404)),
    "no getBlocks": (
        "http-status: the host does not offer",
        lambda _account, _other: error(GET_BLOCKS, 501, "MethodNotImplemented"),
    ),
    "absent keys refused": (
        "http-status: 400 RecordNotFound",
        lambda _account, _other: error(GET_RECORD, 400, "RecordNotFound"),
    ),
    "every block refused": (
        "bad-answer: the host lacks blocks",
        lambda _account, _other: error(GET_BLOCKS, 400, "InvalidRequest"),
    ),
}
"""By name: the beginning of the error that a lie causes, and the faults of the host of the first account."""


async def test_liars_change_nothing_and_the_export_is_fetched_instead(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as there is no export either, the repo is not synchronized, and its records are as before."""
    monkeypatch.setattr("indexer.net.pds.pds_client.QUERY_TIMEOUT", 0.3)
    async with (
        FilteredNetwork(collections=[LIKE]) as network,
        running_daemon(database, tmp_path, network, collections=LIKE, resync_source="pds") as daemon,
    ):
        account, other = daemon.create_account("ada.test"), daemon.create_account("bob.test")
        write_lost(account, likes=[f"{number:03}" for number in range(60)], posts=300)
        write_lost(other, likes=["one"], posts=300)
        await daemon.wait_until_equal()
        for number, (name, (reason, lie)) in enumerate(LIES.items()):
            daemon.stages.resync_pool.attempts.sparse = SparseFetch(daemon.stages.pds, "always")
            faults, no_export = lie(account, other), error(GET_REPO, 400, "InvalidRequest")
            account.pds.faults += [*faults, *no_export]
            before = await daemon.record_rows(account)
            write_lost(account, likes=[f"new{number}"], delete=[f"{number:03}"])
            await daemon.wait_for_cursor()
            with capture_logs() as logs:
                await make_due(daemon, account)
                await until(lambda no_export=no_export: no_export[0].fired > 0, lambda name=name: name)  # type: ignore[misc]
            errors = [log["error"] for log in logs if log["event"] == "resync.source-failed"]
            assert errors[0].startswith(reason), (name, errors)
            assert (await daemon.repo_row(account))["sync_status"] != "synchronized", name
            assert await daemon.record_rows(account) == before, name
            account.pds.faults.remove(no_export[0])
            await daemon.resync_until_equal(account)
            account.pds.faults.clear()
        assert requests_of(daemon, GET_REPO) >= 2 * len(LIES)
        await assert_change_log_consistent(database)


@pytest.mark.parametrize("fault", [error(GET_RECORD, 400, "RecordNotFound"), error(GET_BLOCKS, 501)], ids=str)
async def test_host_without_the_methods_is_asked_for_them_only_once(
    database: str, tmp_path: Path, fault: list[Fault]
) -> None:
    async with (
        FilteredNetwork(collections=[LIKE]) as network,
        running_daemon(database, tmp_path, network, collections=LIKE, sparse_resync="always") as daemon,
    ):
        account = network.create_account("ada.test")
        account.pds.faults += fault
        for number in range(3):
            write_lost(account, likes=[f"{number}{other}" for other in range(30)])
            await daemon.wait_for_cursor()
            await daemon.resync_until_equal(account)
        assert (fault[0].fired, requests_of(daemon, GET_REPO)) == (1, 3)


async def test_rows_say_how_they_were_proven_last(database: str, tmp_path: Path) -> None:
    async with (
        FilteredNetwork(collections=[LIKE]) as network,
        running_daemon(database, tmp_path, network, collections=LIKE) as daemon,
    ):
        account = network.create_account("ada.test")

        async def proofs() -> dict[str, str]:
            await daemon.wait_until_equal()
            rows = await daemon.execute("select rkey, proof from atproto.records where did = $1", account.did)
            return {row["rkey"]: row["proof"] for row in rows}

        await daemon.wait_until_equal()
        account.create(LIKE, {"$type": LIKE}, rkey="live")
        assert await proofs() == {"live": "commit"}
        write_lost(account, likes=["range", "later"], posts=300)
        await daemon.wait_for_cursor()
        await daemon.resync_until_equal(account)
        assert await proofs() == {"live": "commit", "range": "range", "later": "range"}
        daemon.stages.resync_pool.attempts.sparse = SparseFetch(daemon.stages.pds, "never")
        write_lost(account, likes=["export", "updated"])
        await daemon.wait_for_cursor()
        await daemon.resync_until_equal(account)
        account.update(f"{LIKE}/updated", {"$type": LIKE, "text": "live"})
        account.update(f"{LIKE}/later", {"$type": LIKE, "text": "live"})
        expected = {"live": "commit", "range": "range", "export": "export"}
        assert await proofs() == expected | {"later": "commit", "updated": "commit"}
