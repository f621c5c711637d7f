"""The operations of a PLC directory: what they prove is stored, and nothing else is believed."""

import gzip
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from time import time
from typing import Any

import pytest

from indexer import crash_points
from indexer.atproto.plc import did_of, parse_entry, verify_log
from indexer.db import Database
from indexer.db.crawls import CrawlProgress
from indexer.db.shard_lock import OPERATIONS
from indexer.demo import dag_cbor
from indexer.demo.plc_operations import sign
from indexer.errors import UnavailableError
from indexer.net.http.http_client import OutboundClient
from indexer.net.identity.did_resolver import DidResolver, identity_of
from indexer.net.identity.identity_cache import IdentityCache, IdentityLifetimes
from indexer.net.identity.plc_export import PlcExport, ReadOperations, operations_in_file
from indexer.sync.identity import HandleCheck, StoredIdentity
from indexer.tasks.plc_operations import PlcOperations
from indexer.telemetry.conditions import (
    PLC_EXPORT_FAILING,
    PLC_OPERATIONS_UNPROVEN,
    PLC_POSITION_UNKNOWN,
    Conditions,
)
from indexer.telemetry.metrics import Metrics
from tests.atproto.plc_logs import KEYS, START, Log, did_keys
from tests.atproto.plc_oracle import cid_of
from tests.faulty_network import Fault
from tests.plc_directory import Directory, Line, lines_of, to_text
from tests.waiting import until

HIGH, MIDDLE, LOW, OTHER = KEYS


class DeathError(Exception):
    """Ends a reading as if the process was killed."""


class FailingResolver(DidResolver):
    """Fails the test if a DID is looked up."""

    def __init__(self) -> None:
        pass

    async def resolve(self, did: str, *, known: bool = True) -> StoredIdentity:
        raise AssertionError(did, known)


def log_of(number: int, *keys: Any) -> Log:
    """Return a log with one operation, with the handle `n….example`."""
    log = Log(*(keys or (HIGH, LOW)), signer=LOW, alsoKnownAs=[f"at://n{number}.example"])
    log.entries[0]["createdAt"] = (START + timedelta(milliseconds=number)).isoformat()
    return log


def legacy_log() -> Log:
    """Return a log that begins with an operation of the old form."""
    first = {"type": "create", "signingKey": did_keys(LOW)[0], "recoveryKey": did_keys(HIGH)[0], "prev": None}
    signed = sign(first | {"handle": "old.example", "service": "https://pds.example"}, LOW)
    log = log_of(0)
    log.did, log.entries = did_of(dag_cbor.encode(signed)), []
    log.append(signed, hours=0)
    return log


def all_kinds() -> list[Log]:
    """Return logs with a move, a rotation, a recovery, a tombstone that is undone, one that is not, and an old one."""
    moved, recovered, undone, ended, old = (log_of(1), log_of(2), log_of(3), log_of(4), legacy_log())
    moved.update(
        LOW, services={"atproto_pds": {"type": "AtprotoPersonalDataServer", "endpoint": "https://new.example"}}
    )
    moved.update(LOW, HIGH, MIDDLE, verificationMethods={"atproto": did_keys(OTHER)[0]})
    first = recovered.entries[0]["cid"]
    recovered.update(LOW, alsoKnownAs=["at://stolen.example"])
    recovered.update(LOW, alsoKnownAs=["at://stolen.example"])
    recovered.update(HIGH, HIGH, LOW, prev=first, hours=70)
    undone.end(LOW)
    undone.update(HIGH, HIGH, LOW, prev=undone.entries[0]["cid"], hours=3)
    ended.update(LOW)
    ended.end(HIGH)
    old.update(LOW, HIGH, LOW)
    return [moved, recovered, undone, ended, old]


async def pages_of(lines: list[Line]) -> AsyncGenerator[ReadOperations]:
    """Yield lines as one page."""
    operations = [one for line in lines if (one := parse_entry(line)) is not None]
    yield ReadOperations(operations, 0.0)


@asynccontextmanager
async def reading(
    db: Database, outbound: OutboundClient, directory: Directory, *tracked: Log
) -> AsyncIterator[PlcOperations]:
    """Run the directory, with accounts that are tracked before."""
    await db.repos.add([log.did for log in tracked])
    await directory.start()
    try:
        export = PlcExport(outbound, directory.url, "test")
        yield PlcOperations(db, export, Conditions(), Metrics(), allow_http=True)
    finally:
        await directory.stop()


async def stored(db: Database, log: Log) -> StoredIdentity:
    return (await db.identities.stored([log.did]))[log.did]


async def read_pages(task: PlcOperations, *, everything: bool = False) -> CrawlProgress:
    progress = await task.begin(everything=everything)
    return await task.read(progress, task.export.pages(progress.cursor))


def results(task: PlcOperations) -> dict[str, int]:
    names = ("proven", "repeated", "skipped", "unproven")
    values = {
        name: task.metrics.registry.get_sample_value("indexer_plc_operations_total", {"result": name}) for name in names
    }
    return {name: int(value) for name, value in values.items() if value}


async def assert_equal(db: Database, logs: Iterable[Log]) -> None:
    """Each stored identity is the one that the rules give for the whole log."""
    for log in logs:
        document = verify_log(log.did, log.marked(), allow_http=True)
        identity = await stored(db, log)
        if document is None:
            assert identity.gone
        else:
            expected = identity_of(document, identity.fetched_at)
            assert (identity.fingerprint, identity.denials) == (expected.fingerprint, 0)
        assert identity.is_exported


@pytest.fixture
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a page have 50 lines."""
    monkeypatch.setattr("indexer.net.identity.plc_export.PAGE_LINES", 50)


@pytest.mark.usefixtures("small_pages")
@pytest.mark.parametrize("repeats", [False, True])
async def test_import_stores_what_the_logs_prove(db: Database, outbound: OutboundClient, repeats: bool) -> None:
    logs = [*all_kinds(), *map(log_of, range(5, 120))]
    lines = lines_of(*logs, numbered=not repeats)
    async with reading(db, outbound, Directory(lines, repeats=repeats), *logs[:10]) as task:
        began = time()
        progress = await read_pages(task)
        assert progress.finished_at is not None
        assert began <= progress.finished_at <= time()
        await assert_equal(db, logs[:10])
        skipped = [line for line in lines if line["did"] not in {log.did for log in logs[:10]}]
        found = results(task)
        assert found["proven"] == len(lines) - len(skipped)
        assert found["skipped"] >= len(skipped)
        assert found.keys() <= {"proven", "skipped", "repeated"}
        again = await read_pages(task)
        assert (again.cursor, again.found) == (progress.cursor, progress.found)
        assert not task.conditions.active()


async def test_operations_that_are_read_again_change_nothing(db: Database, outbound: OutboundClient) -> None:
    """Also those from before the part of the chain that is stored."""
    log = log_of(1)
    for _ in range(3):
        log.update(LOW, hours=100)
    async with reading(db, outbound, Directory(lines_of(log)), log) as task:
        progress = await read_pages(task)
        before = await stored(db, log)
        await db.crawls.save(replace(progress, cursor=None))
        await read_pages(task)
        assert await stored(db, log) == before
        assert results(task) == {"proven": 4, "repeated": 4}
        assert not task.conditions.active()


@pytest.mark.parametrize("name", ["export.jsonl", "export.jsonl.gz"])
async def test_file_is_read_and_the_directory_continues_there(
    db: Database, outbound: OutboundClient, tmp_path: Path, name: str
) -> None:
    logs, path = all_kinds(), tmp_path / name
    lines = lines_of(*logs)
    text = to_text(lines[:6])
    text = text.replace(b"\n", 1_000 * b"\n", 1)
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    async with reading(db, outbound, directory := Directory(lines), *logs) as task:
        begun = await task.begin()
        progress = await task.read(begun, operations_in_file(path, begun.cursor))
        assert (progress.cursor, progress.listed) == ("6", 6)
        assert progress.finished_at == datetime.fromisoformat(lines[5]["createdAt"]).timestamp()
        await task.read(progress, operations_in_file(path, progress.cursor))
        assert results(task) == {"proven": 6}
        await read_pages(task)
        assert directory.asked[0] == "5"
        await assert_equal(db, logs)


@pytest.mark.parametrize("text", [b"{", b"[]", b"{}", to_text([{"did": "did:plc:" + "a" * 24, "createdAt": "today"}])])
async def test_file_with_other_lines_is_refused(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "export"
    path.write_bytes(text)
    with pytest.raises(UnavailableError):
        async for _ in operations_in_file(path, None):
            pass
    path = path.with_suffix(".gz")
    path.write_bytes(gzip.compress(to_text(lines_of(log_of(1))))[:-9])
    with pytest.raises(UnavailableError):
        async for _ in operations_in_file(path, None):
            pass


@pytest.mark.usefixtures("small_pages")
async def test_killed_import_continues_with_the_page_after_the_last_stored_one(
    db: Database, outbound: OutboundClient
) -> None:
    """It dies in the transaction of each page, and after its COMMIT."""
    logs = [*all_kinds(), *map(log_of, range(5, 110))]
    lines = lines_of(*logs)
    points, deaths = list[str](), list[str]()

    def die(point: str) -> None:
        points.append(point)
        if point in ("operations.saved", crash_points.COMMITTED) and len(points) == 1 + len(deaths):
            deaths.append(point)
            raise DeathError

    async with reading(db, outbound, Directory(lines), *logs[:5]) as task:
        crash_points.hooks.append(die)
        try:
            for _ in lines:
                points.clear()
                try:
                    await read_pages(task)
                except DeathError:
                    continue
                break
        finally:
            crash_points.hooks.remove(die)
        await assert_equal(db, logs[:5])
    assert len(deaths) >= 4
    assert set(deaths) == {"operations.saved", crash_points.COMMITTED}


async def test_reading_ends_when_another_process_has_stored_the_next_page(
    db: Database, outbound: OutboundClient
) -> None:
    log = log_of(1)
    async with reading(db, outbound, Directory(lines_of(log, log_of(2))), log) as task:
        begun = await task.begin()
        await read_pages(task)
        log.update(LOW, alsoKnownAs=["at://unread.example"])
        assert await task.read(begun, task.export.pages(None)) == begun
        assert (await stored(db, log)).handle == "n1.example"


async def test_all_dids_are_stored_and_handles_are_verified_when_the_repo_is_used(
    db: Database, outbound: OutboundClient
) -> None:
    logs = all_kinds()
    async with reading(db, outbound, Directory(lines_of(*logs)), logs[0]) as task:
        await read_pages(task)
        await read_pages(task, everything=True)
        await assert_equal(db, logs)
        assert (await task.begin()).collection == "*"
    due, _ = await db.identities.due_handles(range(256), 10, time())
    assert [claim.did for claim in due] == [logs[0].did]
    cache = IdentityCache(FailingResolver(), db.identities, Metrics(), clock=time, refresh_rate=1.0)
    await cache.preload([logs[1].did])
    identity = cache.peek(logs[1].did)
    assert identity is not None
    document = verify_log(logs[1].did, logs[1].marked(), allow_http=True)
    assert document is not None
    assert identity.key == document.signing_key

    async def is_due() -> bool:
        due, _ = await db.identities.due_handles(range(256), 10, time())
        return {claim.did for claim in due} == {logs[0].did, logs[1].did}

    await until(is_due)
    await cache.close()


def changed(lines: list[Line], **fields: Any) -> list[Line]:
    """Return the lines with other fields of the last one."""
    return [*lines[:-1], lines[-1] | fields]


def forged(lines: list[Line]) -> list[Line]:
    """Return the lines with a new key in the last one, and the old signature."""
    operation = lines[-1]["operation"] | {"verificationMethods": {"atproto": did_keys(OTHER)[0]}}
    return changed(lines, operation=operation, cid=cid_of(operation))


def of_another_did(lines: list[Line]) -> list[Line]:
    """Return the lines with an operation of the first DID as one of the last."""
    return changed(lines, operation=lines[0]["operation"], cid=lines[0]["cid"])


@pytest.mark.parametrize("lie", [forged, of_another_did, lambda lines: changed(lines, cid="bafyrei")])
async def test_operation_that_proves_nothing_changes_nothing_and_causes_a_lookup(
    db: Database, outbound: OutboundClient, lie: Callable[[list[Line]], list[Line]]
) -> None:
    other, log = log_of(1), log_of(2)
    async with reading(db, outbound, directory := Directory(lines_of(other, log)), other, log) as task:
        await read_pages(task)
        before = await stored(db, log)
        assert not before.stale
        log.update(LOW, alsoKnownAs=["at://new.example"])
        directory.lines = lie(lines_of(other, log))
        await read_pages(task)
        assert await stored(db, log) == replace(before, stale=True)
        assert (await stored(db, other)).stale is False
        assert task.conditions.is_active(PLC_OPERATIONS_UNPROVEN)
        log.update(LOW, alsoKnownAs=["at://newer.example"])
        directory.lines += lines_of(other, log)[-1:]
        await read_pages(task)  # its predecessor is unknown
        assert await stored(db, log) == replace(before, stale=True)


@pytest.mark.parametrize(("fetched_at", "stale"), [(1e9, True), (1.79e9, False)])
async def test_operation_of_a_repo_without_chain_is_only_a_hint(
    db: Database, outbound: OutboundClient, fetched_at: float, stale: bool
) -> None:
    """It is none if the identity was looked up much later."""
    log = log_of(1)
    async with reading(db, outbound, directory := Directory(lines_of(log_of(2))), log) as task:
        progress = await read_pages(task)
        known = StoredIdentity(log.did, "n1.example", "https://pds.example", did_keys(LOW)[0], fetched_at)
        await db.identities.save([known])
        log.update(LOW)
        directory.lines += [line | {"seq": 2} for line in lines_of(log)[1:]]
        await read_pages(task)
        assert progress.cursor == "1"
        assert (await stored(db, log)).stale is stale
        assert not task.conditions.active()


NOW = datetime.now(UTC)
BAD_PAGES: dict[str, Callable[[list[Line]], list[Line]]] = {
    "old": lambda page: [page[0] | {"seq": 1}],
    "backwards": lambda page: page[::-1],
    "without numbers": lambda page: [{name: value for name, value in line.items() if name != "seq"} for line in page],
    "from the future": lambda page: changed(page, createdAt=(NOW + timedelta(hours=2)).isoformat()),
    "not objects": lambda page: [*page, 1],  # type: ignore[list-item]
    "no DID": lambda page: changed(page, did="did:web:host.example"),
    "no number": lambda page: changed(page, seq=True),
    "from the past": lambda page: changed(page, createdAt="0001-01-01T00:00:00+14:00"),
    "before all directories": lambda page: changed(page, createdAt="1999-01-01T00:00:00Z"),
    "no time": lambda page: changed(page, createdAt="2025-01-01T00:00:00"),
}


@pytest.mark.parametrize("lie", BAD_PAGES)
async def test_page_that_is_not_in_order_changes_nothing(db: Database, outbound: OutboundClient, lie: str) -> None:
    log = log_of(1)
    log.update(LOW)
    async with reading(db, outbound, directory := Directory(lines_of(log)), log) as task:
        begun = await read_pages(task)
        log.update(LOW, alsoKnownAs=["at://new.example"])
        log.update(LOW, alsoKnownAs=["at://newer.example"])
        directory.lines = lines_of(log)
        directory.change = BAD_PAGES[lie]
        with pytest.raises(UnavailableError):
            await read_pages(task)
        assert (await stored(db, log)).handle == "alice.example"
        await task.follow()
        assert task.conditions.is_active(PLC_EXPORT_FAILING)
        assert (await task.begin()).listed == begun.listed
        directory.change = lambda page: page
        await task.follow()
        assert not task.conditions.active()
        await assert_equal(db, [log])


@pytest.mark.parametrize("fault", [Fault("/export", status=503), Fault("/export", cut=100)])
async def test_directory_that_fails_is_reported_and_read_again(
    db: Database, outbound: OutboundClient, fault: Fault
) -> None:
    log = log_of(1)
    log.update(LOW)
    async with reading(db, outbound, directory := Directory(lines_of(log)), log) as task:
        await db.crawls.save(replace(await task.begin(), cursor="1"))
        directory.faults = [fault]
        await task.follow()
        assert task.conditions.is_active(PLC_EXPORT_FAILING)
        await task.follow()
        assert not task.conditions.active()
        assert (await task.begin()).cursor == "2"


async def test_directory_that_lacks_the_last_operation_is_not_followed(db: Database, outbound: OutboundClient) -> None:
    log = log_of(1)
    log.update(LOW)
    async with reading(db, outbound, directory := Directory(lines_of(log)), log) as task:
        progress = await read_pages(task)
        directory.lines = lines_of(log_of(2))
        await task.follow()
        assert task.conditions.is_active(PLC_POSITION_UNKNOWN)
        assert (await task.begin()).cursor == progress.cursor
        directory.lines = lines_of(log)
        await task.follow()
        assert not task.conditions.active()


@pytest.mark.usefixtures("small_pages")
async def test_page_of_one_millisecond_ends_the_reading(db: Database, outbound: OutboundClient) -> None:
    """The rest of the operations of the millisecond cannot be read."""
    lines = [line | {"createdAt": START.isoformat()} for line in lines_of(*map(log_of, range(51)), numbered=False)]
    async with reading(db, outbound, Directory(lines, repeats=True)) as task:
        with pytest.raises(UnavailableError, match="one millisecond"):
            await read_pages(task)


async def test_later_lookup_stays_and_is_repeated_if_a_recent_operation_differs(
    db: Database, outbound: OutboundClient
) -> None:
    """A lookup may get the document from before an operation, also a little later."""
    log = log_of(1)
    log.update(LOW, alsoKnownAs=["at://bob.example"], hours=24)
    lines = lines_of(log)
    accepted_at = datetime.fromisoformat(lines[-1]["createdAt"]).timestamp()
    key = did_keys(KEYS[1])[0]
    await db.repos.add([log.did])
    looked_up = StoredIdentity(log.did, "n1.example", "https://pds.example", key, fetched_at=accepted_at + 60)
    await db.identities.save([looked_up])
    async with reading(db, outbound, Directory(lines)) as task:
        await task.read(await task.begin(), pages_of(lines[:1]))
        assert await stored(db, log) == replace(looked_up, chain=(await stored(db, log)).chain)
        assert not (await stored(db, log)).is_exported
        await read_pages(task)
        identity = await stored(db, log)
        assert (identity.handle, identity.stale) == ("n1.example", True)
        loaded = (await db.identities.load([log.did]))[log.did]
        assert loaded.fetched_at == accepted_at + 60
    expected = identity_of(verify_log(log.did, log.marked(), allow_http=True), time())  # type: ignore[arg-type]
    await db.identities.save([expected])  # the lookup that follows
    loaded = (await db.identities.load([log.did]))[log.did]
    assert loaded.is_exported
    assert loaded.fetched_at > expected.fetched_at - 60


async def test_later_lookup_that_a_change_has_made_doubtful_stays_so(db: Database, outbound: OutboundClient) -> None:
    log = log_of(1)
    await db.repos.add([log.did])
    looked_up = StoredIdentity(log.did, "n1.example", "https://pds.example", did_keys(LOW)[0], 1.79e9, stale=True)
    await db.identities.save([looked_up])
    async with reading(db, outbound, Directory(lines_of(log))) as task:
        await read_pages(task)
    assert (await stored(db, log)).stale


async def test_exported_identity_is_as_recent_as_the_last_reading(db: Database, outbound: OutboundClient) -> None:
    log = log_of(1)
    async with reading(db, outbound, Directory(lines_of(log)), log) as task:
        progress = await read_pages(task)
        assert (await stored(db, log)).fetched_at < 1.8e9
        loaded = (await db.identities.load([log.did]))[log.did]
        assert loaded.fetched_at == pytest.approx(progress.finished_at, abs=0.001)
        cache = IdentityCache(FailingResolver(), db.identities, Metrics(), clock=time, refresh_rate=1.0)
        await cache.preload([log.did])
        assert cache.peek(log.did)
        cache.forget(None)
        assert cache.peek(log.did) is None


async def test_identity_in_memory_is_loaded_again_when_it_is_old(db: Database, outbound: OutboundClient) -> None:
    """So a notification that was lost delays a change by a day at most, and causes no lookup."""
    log, now = log_of(1), time()
    async with reading(db, outbound, directory := Directory(lines_of(log)), log) as task:
        await read_pages(task)
        cache = IdentityCache(FailingResolver(), db.identities, Metrics(), clock=lambda: now, refresh_rate=1.0)
        await cache.preload([log.did])
        log.update(LOW, verificationMethods={"atproto": did_keys(OTHER)[0]})
        directory.lines = lines_of(log)
        progress = await read_pages(task)
        await cache.preload([log.did])
        before = cache.peek(log.did)
        assert before is not None
        assert before.key != OTHER.public
        now = before.fetched_at + IdentityLifetimes().max_age + 1
        await db.crawls.save(replace(progress, finished_at=now))
        await cache.preload([log.did])
        identity = cache.peek(log.did)
        assert identity is not None
        assert identity.key == OTHER.public
        assert identity.fetched_at == pytest.approx(now, abs=0.001)
        await cache.close()
    labels = {"cause": "age", "result": "asked"}
    assert cache.metrics.registry.get_sample_value("indexer_identity_refreshes_total", labels) == 0


async def test_tombstone_of_a_tracked_repo_causes_a_lookup(db: Database, outbound: OutboundClient) -> None:
    tracked, other = log_of(1), log_of(2)
    for log in (tracked, other):
        log.end(LOW)
    async with reading(db, outbound, directory := Directory(lines_of(tracked, other)), tracked) as task:
        await read_pages(task, everything=True)
        assert [(await stored(db, log)).stale for log in (tracked, other)] == [True, False]
        for log in (tracked, other):
            log.update(HIGH, HIGH, LOW, prev=log.entries[0]["cid"])
        directory.lines = lines_of(tracked, other)
        await read_pages(task, everything=True)
        await assert_equal(db, [tracked, other])
        assert [(await stored(db, log)).stale for log in (tracked, other)] == [True, False]


def messages(lines: list[Line]) -> list[bytes]:
    return [to_text([line]) for line in lines]


@pytest.mark.parametrize("reason", ["", "OutdatedCursor", "ConsumerTooSlow"])
async def test_pages_come_before_the_stream_that_the_directory_closed(
    db: Database, outbound: OutboundClient, reason: str
) -> None:
    """An outdated cursor, or a consumer that is too slow, is routine. Other types of messages are skipped."""
    log = log_of(1)
    async with reading(db, outbound, directory := Directory(lines_of(log)), log) as task:
        await read_pages(task)
        log.update(LOW)
        log.update(LOW)
        directory.lines = lines_of(log)[:2]
        directory.messages = messages([{"type": "later"}, lines_of(log)[2]])
        directory.reason, directory.asked = reason, []
        await task.follow()
        await assert_equal(db, [log])
        assert directory.asked == ["0", "1", "2"]
        assert (await task.begin()).cursor == "3"
        directory.lines = lines_of(log)
        directory.messages, directory.asked = (), []
        await task.follow()
        assert directory.asked == ["2", "2", "3"]
        assert not task.conditions.active()


async def test_without_a_position_only_new_operations_are_followed(db: Database, outbound: OutboundClient) -> None:
    log = log_of(1)
    async with reading(db, outbound, directory := Directory([]), log) as task:
        await task.follow()
        assert task.conditions.is_active(PLC_EXPORT_FAILING)
        directory.messages = messages([line | {"seq": 7} for line in lines_of(log)])
        await task.follow()
        assert directory.asked == ["live"]
        assert (await task.begin()).cursor == "7"
        await assert_equal(db, [log])


@pytest.mark.parametrize("seqs", [[2, 4, 4], [2, 4, 3], [2, 1], [None]])
async def test_stream_that_goes_backwards_changes_nothing(
    db: Database, outbound: OutboundClient, seqs: list[int | None]
) -> None:
    log = log_of(1)
    async with reading(db, outbound, directory := Directory(lines_of(log)), log) as task:
        await read_pages(task)
        for _ in seqs:
            log.update(LOW, alsoKnownAs=["at://new.example"])
        new = zip(lines_of(log)[1:], seqs, strict=True)
        directory.messages = messages([line | {"seq": seq} for line, seq in new])
        await task.follow()
        assert (await stored(db, log)).handle == "n1.example"
        assert (await task.begin()).cursor == "1"
        assert task.conditions.is_active(PLC_EXPORT_FAILING)


async def test_stream_that_does_not_know_the_position_is_not_followed(db: Database, outbound: OutboundClient) -> None:
    async with reading(db, outbound, directory := Directory(lines_of(log_of(1)))) as task:
        await read_pages(task)
        directory.messages, directory.reason = (), "FutureCursor"
        await task.follow()
        assert task.conditions.is_active(PLC_POSITION_UNKNOWN)


async def test_only_one_process_follows(db: Database, outbound: OutboundClient) -> None:
    async with reading(db, outbound, directory := Directory([])) as task:
        async with db.shard_locks.open(OPERATIONS) as lock:
            assert await lock.claim()
            await task.follow()
            assert directory.requests.total() == 0
        await task.follow()
        assert directory.requests.total() == 1


async def test_chain_of_a_day_has_a_limit(
    db: Database, outbound: OutboundClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("indexer.atproto.plc.MAX_OPERATIONS", 3)
    log = log_of(1)
    for _ in range(3):
        log.update(LOW, alsoKnownAs=["at://new.example"])
    async with reading(db, outbound, Directory(lines_of(log)), log) as task:
        await read_pages(task)
        assert results(task) == {"proven": 3, "unproven": 1}


async def test_new_handle_of_a_tracked_repo_is_verified(db: Database, outbound: OutboundClient) -> None:
    log = log_of(1)
    async with reading(db, outbound, Directory(lines_of(log)), log) as task:
        progress = await read_pages(task)
        claims, _ = await db.identities.due_handles(range(256), 10, time())
        await db.identities.save_handle_check(HandleCheck(claims[0], "n1.example", 0, time() + 1_000))
        assert await db.identities.due_handles(range(256), 10, time()) == ([], None)
        log.update(LOW, alsoKnownAs=["at://new.example"])
        await task.read(progress, pages_of(lines_of(log)[1:]))
        claims, _ = await db.identities.due_handles(range(256), 10, time())
        assert [(claim.did, claim.claimed) for claim in claims] == [(log.did, "new.example")]


def moved(log: Log, hours: float = 1) -> Log:
    """Append a move of an account; return its log."""
    service = {"type": "AtprotoPersonalDataServer", "endpoint": "https://new.example"}
    log.update(LOW, services={"atproto_pds": service}, hours=hours)
    return log


async def age_of(db: Database, log: Log) -> float:
    """Return for how many seconds the identity counts as fetched."""
    return time() - (await db.identities.load([log.did]))[log.did].fetched_at


async def test_chain_of_a_repo_that_is_untracked_for_a_time_is_complete(db: Database, outbound: OutboundClient) -> None:
    log = log_of(1)
    async with reading(db, outbound, Directory(lines_of(log)), log) as task:
        progress = await read_pages(task)
        await db.scope.untrack([log.did])
        await task.read(progress, pages_of(lines_of(moved(log))[1:]))
        await db.scope.track([log.did])
        await assert_equal(db, [log])


async def test_lookup_that_is_stored_meanwhile_leaves_no_incomplete_chain(
    db: Database, outbound: OutboundClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An old document, from a directory that lags, does not count as the one after the last operation."""
    log = log_of(1)
    async with reading(db, outbound, Directory(lines_of(log)), log) as task:
        progress = await read_pages(task)
        old, save = await stored(db, log), db.crawls.save_operations

        async def save_after_lookup(*arguments: Any) -> bool:
            await db.identities.save([replace(old, chain=None, fetched_at=time())])
            return await save(*arguments)

        monkeypatch.setattr(db.crawls, "save_operations", save_after_lookup)
        await task.read(progress, pages_of(lines_of(moved(log))[1:]))
    after = await stored(db, log)
    assert (after.pds, after.chain, after.stale) == (old.pds, None, True)


async def test_reading_of_another_directory_does_not_confirm_older_identities(
    db: Database, outbound: OutboundClient
) -> None:
    """A daemon that begins with the new operations of another one does not read what was before them."""
    log, other = log_of(1), log_of(2)
    directory = Directory(lines_of(log))
    async with reading(db, outbound, directory, log, other) as task:
        first = await task.read(await task.begin(), pages_of(lines_of(log)))
        await db.crawls.save(replace(first, finished_at=time() - 5_000))
        task.export = replace(task.export, url="http://other.example")
        operation = parse_entry(lines_of(other)[0])
        assert operation is not None

        async def new() -> AsyncGenerator[ReadOperations]:
            yield ReadOperations([operation], time())

        second = await task.read(await task.begin(), new())
        assert await age_of(db, log) > 4_000
        assert await age_of(db, other) > 4_000
        await db.crawls.begin_operations(replace(second, cursor=None, finished_at=None))
        assert await age_of(db, log) > 10_000, "nothing of the new reading is complete"
        await read_pages_of(task, log, other)
        assert await age_of(db, log) < 10


async def test_directory_that_was_read_between_two_readings_of_another_one_delays_nothing(
    db: Database, outbound: OutboundClient
) -> None:
    """The other one has read all of its operations, too."""
    log = log_of(1)
    async with reading(db, outbound, Directory(lines_of(log)), log) as task:
        progress = await read_pages(task)
        between = CrawlProgress("identities", "http://other.example", began_at=time(), finished_at=time())
        await db.crawls.save(between)
        await task.read(progress, pages_of([]))
        assert await db.crawls.progress("identities", between.source, "") is not None, "it has not read so much yet"
        await read_pages(task)
        assert await db.crawls.progress("identities", between.source, "") is None


async def test_identity_whose_later_operations_are_not_read_yet_is_stale(
    db: Database, outbound: OutboundClient
) -> None:
    """It is looked up before it is used. A lookup ends that."""
    log = log_of(1)
    async with reading(db, outbound, Directory([]), log) as task:
        entry = parse_entry(lines_of(log)[0])
        assert entry is not None

        async def first_page() -> AsyncGenerator[ReadOperations]:
            yield ReadOperations([entry], entry.accepted_at.timestamp())

        await task.read(await task.begin(), first_page())
        assert (await db.identities.load([log.did]))[log.did].stale
        await db.identities.save([replace(await stored(db, log), chain=None, fetched_at=time())])
        assert not (await db.identities.load([log.did]))[log.did].stale


async def read_pages_of(task: PlcOperations, *logs: Log) -> None:
    """Read all operations, up to now."""

    async def pages() -> AsyncGenerator[ReadOperations]:
        operations = [one for line in lines_of(*logs) if (one := parse_entry(line)) is not None]
        yield ReadOperations(operations, time())

    await task.read(await task.begin(), pages())


async def test_deeply_nested_operation_changes_nothing(db: Database, outbound: OutboundClient) -> None:
    log, value = log_of(1), list[Any]()
    for _ in range(1_010):
        value = [value]
    async with reading(db, outbound, Directory(lines_of(log)), log) as task:
        progress = await read_pages(task)
        entry = parse_entry(lines_of(moved(log))[1])
        assert entry is not None

        async def nested() -> AsyncGenerator[ReadOperations]:
            yield ReadOperations([replace(entry, operation={**entry.operation, "x": value})], time())

        await task.read(progress, nested())
        assert results(task)["unproven"] == 1
        assert (await stored(db, log)).stale


async def test_line_of_many_values_is_refused_before_it_is_decoded(outbound: OutboundClient) -> None:
    directory = Directory([])
    directory.faults = [Fault("/export", status=200, body=b"[" + b"[]," * 100_000 + b"[]]")]
    await directory.start()
    try:
        with pytest.raises(UnavailableError, match="more than 200,000 bytes"):
            await anext(PlcExport(outbound, directory.url, "test").pages(None))
    finally:
        await directory.stop()
