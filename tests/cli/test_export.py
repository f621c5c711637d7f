import asyncio
import gc
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from functools import partial
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import click
import pyarrow.parquet as pq
import pytest
from pyarrow.lib import ArrowInvalid

from indexer.atproto.cid import cid_text
from indexer.atproto.limits import DEFAULT_LIMITS
from indexer.cli import export as export_module
from indexer.cli.export import Format, export, parquet, read_seen_records
from indexer.db import Database, DatabaseError, exports
from indexer.db.exports import EXPORTED, Page
from indexer.db.view_columns import ViewColumn
from indexer.reasons import FetchFailure
from indexer.sync.changes import Batch, RecordChange, RepoWrite
from tests.cli.command_line import Session, error_line
from tests.database_server import DatabaseServer
from tests.db.change_log_helpers import connected
from tests.db.lexicon_views import VIEW
from tests.db.repo_rows import completed, delete, did, head, in_progress, insert, put, synchronized
from tests.lexicons.samples import DEFS_DOCUMENT, REVIEW, REVIEW_DOCUMENT, REVIEW_VALUE, sourced
from tests.waiting import until

pytestmark = pytest.mark.slow

VALUE = '{"text": "two\\nlines, \\"quoted\\", 雨", "link": {"$link": "bafy"}, "n": [1, null]}'
FORMATS: tuple[Format, ...] = ("jsonl", "parquet")


@pytest.fixture
async def db(database: str) -> AsyncIterator[Database]:
    db = await Database.open(database, connections=2)
    odd = RecordChange("create", "app.test", "odd", head().rev, put("a/b").cid, None, "nul-character", b"\0")
    await insert(db, synchronized(1), changes=(put("app.test/a", VALUE), odd, put("app.test.more/b")))
    await insert(db, synchronized(2, takedown=True), changes=(put("app.test/hidden"),))
    yield db
    await db.close()


def redirect_stdout(monkeypatch: pytest.MonkeyPatch) -> BytesIO:
    file = BytesIO()
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(buffer=file))
    return file


def rows_of(output: bytes, form: Format) -> list[dict[str, object]]:
    if form == "parquet":
        rows: list[dict[str, object]] = pq.read_table(BytesIO(output)).to_pylist()
        for row in rows:
            row["value"] = row["value"] and json.loads(str(row["value"]))
        return rows
    return [json.loads(line) for line in output.splitlines()]


@pytest.mark.parametrize("form", FORMATS)
async def test_every_visible_record_is_exported(db: Database, monkeypatch: pytest.MonkeyPatch, form: Format) -> None:
    stdout = redirect_stdout(monkeypatch)
    assert await export(db, "app.test", form) == 2
    rows = {row["rkey"]: row for row in rows_of(stdout.getvalue(), form)}
    assert rows.keys() == {"a", "odd"}
    assert rows["a"]["value"] == json.loads(VALUE)
    assert (rows["odd"]["value"], rows["odd"]["value_problem"]) == (None, "nul-character")
    assert tuple(rows["a"]) == EXPORTED
    assert rows["a"]["uri"] == f"at://{did(1)}/app.test/a"
    assert rows["a"]["cid"] == cid_text(put("app.test/a", VALUE).cid or b"")


async def test_export_is_read_in_pages_as_of_one_point_in_time(
    db: Database, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exports, "CHUNK_SIZE", 3)
    await insert(db, synchronized(3), changes=tuple(put(f"many.test/{n}") for n in range(10)))
    found: list[str] = []
    async with db.exports.rows("many.test") as (_, pages):
        async for page in pages:
            if not found:
                other = await Database.open(database, connections=1)
                changes = (delete("many.test/9"), put("many.test/0", "[]", "update"), put("many.test/new"))
                write = RepoWrite(synchronized(3), synchronized(3, version=2), changes)
                assert not (await other.write(Batch((write,)))).skipped
                await other.close()
            assert len(page) <= 3
            found += [f"{record['rkey']} {record['value']}" for record in page]
    assert sorted(found) == [f"{n} {{}}" for n in range(10)]


@pytest.mark.parametrize("view", [None, REVIEW])
async def test_parquet_that_is_cut_off_on_stdout_is_not_a_complete_file(
    db: Database, monkeypatch: pytest.MonkeyPatch, view: str | None
) -> None:
    """The library writes the footer when the writer is deleted, also after an error."""
    await store_reviews(db)
    rows = db.exports.rows

    @asynccontextmanager
    async def fail_after_one_page(*arguments: Any) -> AsyncIterator[tuple[list[ViewColumn], AsyncIterator[Page]]]:
        async def failing(pages: AsyncIterator[Page]) -> AsyncIterator[Page]:
            yield await anext(pages)
            raise DatabaseError(FetchFailure.UNREACHABLE, "connection lost")

        async with rows(*arguments) as (columns, pages):
            yield columns, failing(pages)

    monkeypatch.setattr(db.exports, "rows", fail_after_one_page)
    monkeypatch.setattr(export_module, "parquet", partial(parquet, group_bytes=1))
    stdout = redirect_stdout(monkeypatch)
    with pytest.raises(DatabaseError):
        await export(db, REVIEW, "parquet", view)
    gc.collect()
    assert len(stdout.getvalue()) > 100, "a part was written"
    with pytest.raises(ArrowInvalid):
        pq.read_table(BytesIO(stdout.getvalue()))


def test_row_groups_have_a_maximum_size() -> None:
    file = BytesIO()
    with parquet(file, [ViewColumn("records", "", "value", "text", "")], group_bytes=10_000) as write:
        for size in (4_000, 7_000, 1_000, 1_000, 20_000, 1):
            write(cast(Page, [("x" * size,)]))
    metadata = pq.read_metadata(file)
    assert [metadata.row_group(n).num_rows for n in range(metadata.num_row_groups)] == [2, 3, 1]


async def store_reviews(db: Database) -> list[dict[str, Any]]:
    """Store three reviews in a typed view, of which one is hidden; return the rows of the others."""
    await db.lexicons.add(sourced(REVIEW_DOCUMENT, DEFS_DOCUMENT))
    changes = (put(f"{REVIEW}/full", json.dumps(REVIEW_VALUE)), put(f"{REVIEW}/empty", "{}"))
    await insert(db, synchronized(3), changes=changes)
    await insert(db, synchronized(4, takedown=True), changes=changes[:1])
    async with connected(db.dsn) as sql:
        return [dict(row) for row in await sql.fetch(f"select * from {VIEW} order by rkey")]  # noqa: S608 - a constant


@pytest.mark.parametrize("form", FORMATS)
async def test_typed_export_has_the_rows_of_the_view_with_their_types(
    db: Database, monkeypatch: pytest.MonkeyPatch, form: Format
) -> None:
    expected = await store_reviews(db)
    assert [row["title"] for row in expected] == [None, "Grüße"]
    of_json = {column.name for column in await db.lexicons.columns() if column.type == "jsonb"}
    stdout = redirect_stdout(monkeypatch)
    assert await export(db, REVIEW, form, REVIEW) == 2
    if form == "parquet":
        table = pq.read_table(BytesIO(stdout.getvalue()))
        found = table.to_pylist()
        types = {str(table.schema.field(name).type) for name in table.column_names}
        assert types == {
            "bool", "int16", "int64", "list<element: string>", "string", "timestamp[us, tz=UTC]",
        }  # fmt: skip
        assert table.schema.field("stars").type == "int64"
    else:
        found = rows_of(stdout.getvalue(), form)
        expected = [
            {
                name: json.loads(value) if value and name in of_json
                else value.isoformat() if isinstance(value, datetime) else value
                for name, value in row.items()
            }
            for row in expected
        ]  # fmt: skip
    assert sorted(found, key=lambda row: str(row["rkey"])) == expected


async def test_typed_export_needs_a_stored_lexicon(db: Database, session: Session) -> None:
    await store_reviews(db)
    result = await session.run("export", "--collection", REVIEW, "--typed")
    assert (result.returncode, result.stderr) == (0, "records: 2\n")
    assert '"stars":5,' in result.stdout
    result = await session.run("export", "--collection", "app.test.none", "--typed")
    assert (result.returncode, error_line(result)[:34]) == (4, "the lexicon of app.test.none was n")


async def first_seen(dsn: str) -> dict[str, tuple[datetime, bool | None]]:
    async with connected(dsn) as sql:
        rows = await sql.fetch("select rkey, first_seen, first_seen_live from atproto.records")
        return {row["rkey"]: (row["first_seen"], row["first_seen_live"]) for row in rows}


async def test_first_seen_times_are_kept_in_another_database(
    db: Database, database: str, session: Session, postgres: DatabaseServer, tmp_path: Path
) -> None:
    """The earlier time stays, also if the file is imported again."""
    await insert(db, synchronized(3), changes=(put("app.test.more/a"), put("app.test.more/gone")))
    before = await first_seen(database)
    exported = await session.run("export", "--collection", "app.test.more")
    file = tmp_path / "records.jsonl"
    file.write_text(exported.stdout + exported.stdout)
    other = postgres.create(migrated=True)
    session.configure(INDEXER_DATABASE_URL=other)
    result = await session.run("import-first-seen", str(file), "--json")
    assert json.loads(result.stdout) == {"records": 3, "set": 0, "not_stored": 3}
    new = await Database.open(other, connections=1)
    claimed = await in_progress(new, 3)
    async with new.resyncs.transaction(claimed) as transaction:
        await transaction.write([put("app.test.more/a", "{}"), put("app.test.more/new")], "export")
        await transaction.finish(Batch((RepoWrite(claimed, completed(claimed)),)))
    resynced = await first_seen(other)
    for expected in ({"records": 3, "set": 1, "not_stored": 2}, {"records": 3, "set": 0, "not_stored": 2}):
        result = await session.run("import-first-seen", str(file), "--json")
        assert (result.returncode, json.loads(result.stdout)) == (0, expected)
        assert await first_seen(other) == {"a": before["a"], "new": resynced["new"]}
    assert (before["a"][1], resynced["a"][1], resynced["new"][1]) == (True, False, False)
    file.write_text(exported.stdout.replace(before["a"][0].isoformat(), "2026-01-02T03:04:05.000001-01:00"))
    file.write_text(exported.stdout + file.read_text() + exported.stdout)
    await session.run("import-first-seen", str(file))
    assert (await first_seen(other))["a"] == (datetime(2026, 1, 2, 4, 4, 5, 1, UTC), True)
    update = RepoWrite(completed(claimed), completed(completed(claimed)), (put("app.test.more/a", "[]", "update"),))
    assert not (await new.write(Batch((update,)))).skipped
    file.write_text(exported.stdout)
    result = await session.run("import-first-seen", str(file))
    assert (result.returncode, result.stdout) == (0, "records: 3, first-seen times set: 0, not stored: 2\n")
    assert (await first_seen(other))["a"] == (datetime(2026, 1, 2, 4, 4, 5, 1, UTC), True)
    await new.close()


async def test_import_waits_for_no_write_of_the_daemon_until_a_deadlock(
    db: Database, session: Session, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It tries again some times, then ends."""
    file = tmp_path / "records.jsonl"
    file.write_text(json.dumps(GOOD | {"uri": f"at://{did(1)}/app.test.more/b"}))
    attempts: list[int] = []
    set_first_seen = exports.Exports.set_first_seen

    async def counted(self: exports.Exports, seen: list[exports.SeenRecord]) -> tuple[int, int]:
        attempts.append(len(seen))
        return await set_first_seen(self, seen)

    monkeypatch.setattr(exports.Exports, "set_first_seen", counted)
    async with connected(db.dsn) as sql:
        async with sql.transaction():
            await sql.execute("select from indexer.record for update")
            monkeypatch.setattr(export_module, "ATTEMPTS", 1)
            result = await session.run("import-first-seen", str(file))
            assert (result.returncode, "lock timeout" in error_line(result)) == (1, True)
            monkeypatch.setattr(export_module, "ATTEMPTS", 5)
            running = asyncio.create_task(session.run("import-first-seen", str(file), "--json"))
            await until(lambda: len(attempts) >= 3)
        assert json.loads((await running).stdout) == {"records": 1, "set": 1, "not_stored": 0}
        assert await sql.fetchval("select deadlocks from pg_stat_database where datname = current_database()") == 0


GOOD = {"uri": f"at://{did(1)}/app.test.more/a", "first_seen": "2026-01-02T03:04:05Z", "first_seen_live": None}
BAD_LINES = {
    "": "not JSON",
    "\udcff": "not JSON",
    "[" * 100_000: "not JSON",
    "[]": "not a JSON object",
    json.dumps(GOOD)[:-1]: "not JSON",
    json.dumps(GOOD | {"uri": 1}): "uri, first_seen or first_seen_live is missing",
    json.dumps(GOOD | {"first_seen": None}): "uri, first_seen or first_seen_live is missing",
    json.dumps(GOOD | {"first_seen_live": 1}): "uri, first_seen or first_seen_live is missing",
    json.dumps(GOOD | {"uri": "at://a.test/app.test.more/a"}): "uri must be the AT-URI of a record",
    json.dumps(GOOD | {"uri": f"at://{did(1)}/app.test.more"}): "uri must be the AT-URI of a record",
    json.dumps(GOOD | {"uri": f"at://{did(1)}/app.test.more/\0"}): "not a record key",
    json.dumps(GOOD | {"first_seen": "2026-01-02T03:04:05"}): "first_seen must have a time zone",
    json.dumps(GOOD | {"first_seen": "infinity"}): "Invalid isoformat string",
    json.dumps(GOOD | {"first_seen": "0001-01-01T00:00:00+01:00"}): "date value out of range",
    json.dumps(GOOD | {"value": "x" * 2_000_000}): "longer than 1000000 bytes",
    "[" + "[]," * 50_000 + "[": "more than 100000 items",
}


def test_bad_line_of_an_import_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export_module, "MAX_LINE_BYTES", 1_000_000)
    monkeypatch.setattr(export_module, "MAX_LINE_ITEMS", 100_000)
    for line, problem in BAD_LINES.items():
        file = BytesIO(f"{json.dumps(GOOD)}\n{line}\n".encode(errors="surrogateescape"))
        file.name = "file"
        records = read_seen_records(file)
        assert next(records).rkey == "a"
        with pytest.raises(click.BadParameter, match=f"^line 2 of file: .*{problem}"):
            next(records)


def test_largest_record_of_a_typed_view_is_not_too_long() -> None:
    text = "," * DEFAULT_LIMITS.record_bytes
    [record] = read_seen_records(BytesIO(json.dumps(GOOD | {"value": {"text": text}, "text": text}).encode()))
    assert record.rkey == "a"


async def test_bad_import_ends_with_one_line(db: Database, session: Session, tmp_path: Path) -> None:
    file = tmp_path / "lines"
    file.write_text(f"{json.dumps(GOOD)}\n\n")
    result = await session.run("import-first-seen", str(file))
    assert result.returncode == 2
    assert f"line 2 of {file}: not JSON" in error_line(result)


def test_error_without_pyarrow_names_this_distribution_and_comes_before_the_database_is_opened(
    session_without_database: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export_module, "find_spec", lambda _: None)
    result = session_without_database("export", "--collection", "app.test.a", "--format", "parquet")
    assert result.returncode == 2
    assert "install the package as atproto-indexer[parquet]" in error_line(result)
    assert "--build-arg EXTRAS=parquet" in error_line(result)


async def test_export_command(db: Database, session: Session) -> None:
    result = await session.run("export", "--collection", "app.test.more")
    assert (result.returncode, result.stderr) == (0, "records: 1\n")
    assert [row["rkey"] for row in rows_of(result.stdout.encode(), "jsonl")] == ["b"]
    result = await session.run("export", "--collection", "app.test.none")
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "records: 0\n")
