import gc
import json
import sys
from collections.abc import AsyncIterator
from functools import partial
from io import BytesIO
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
from pyarrow.lib import ArrowInvalid

from indexer.atproto.cid import cid_text
from indexer.cli import export as export_module
from indexer.cli.export import Format, export, parquet
from indexer.db import Database, DatabaseError, exports
from indexer.db.exports import ExportedRecord
from indexer.reasons import FetchFailure
from indexer.sync.changes import Batch, RecordChange, RepoWrite
from tests.cli.command_line import Session, error_line
from tests.db.repo_rows import delete, did, head, insert, put, synchronized

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
    assert list(rows["a"]) == list(ExportedRecord._fields) or form == "parquet"
    assert rows["a"]["uri"] == f"at://{did(1)}/app.test/a"
    assert rows["a"]["cid"] == cid_text(put("app.test/a", VALUE).cid or b"")


async def test_export_is_read_in_pages_as_of_one_point_in_time(
    db: Database, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exports, "CHUNK_SIZE", 3)
    await insert(db, synchronized(3), changes=tuple(put(f"many.test/{n}") for n in range(10)))
    found: list[str] = []
    async for page in db.exports.records("many.test"):
        if not found:
            other = await Database.open(database, connections=1)
            changes = (delete("many.test/9"), put("many.test/0", "[]", "update"), put("many.test/new"))
            write = RepoWrite(synchronized(3), synchronized(3, version=2), changes)
            assert not (await other.write(Batch((write,)))).skipped
            await other.close()
        assert len(page) <= 3
        found += [f"{record.rkey} {record.value}" for record in page]
    assert sorted(found) == [f"{n} {{}}" for n in range(10)]


def fail_after_one_page(monkeypatch: pytest.MonkeyPatch, db: Database, page: list[ExportedRecord]) -> None:
    async def pages(_: str) -> AsyncIterator[list[ExportedRecord]]:
        yield page
        raise DatabaseError(FetchFailure.UNREACHABLE, "connection lost")

    monkeypatch.setattr(db.exports, "records", pages)


async def test_parquet_that_is_cut_off_on_stdout_is_not_a_complete_file(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library writes the footer when the writer is deleted, also after an error."""
    [page] = [page async for page in db.exports.records("app.test")]
    fail_after_one_page(monkeypatch, db, page)
    monkeypatch.setattr(export_module, "parquet", partial(parquet, group_bytes=1))
    stdout = redirect_stdout(monkeypatch)
    with pytest.raises(DatabaseError):
        await export(db, "app.test", "parquet")
    gc.collect()
    assert len(stdout.getvalue()) > 100, "a part was written"
    with pytest.raises(ArrowInvalid):
        pq.read_table(BytesIO(stdout.getvalue()))


async def test_row_groups_have_a_maximum_size(db: Database) -> None:
    [[record, *_]] = [page async for page in db.exports.records("app.test")]
    file = BytesIO()
    with parquet(file, group_bytes=10_000) as write:
        for size in (4_000, 7_000, 1_000, 1_000, 20_000, 1):
            write([record._replace(value="x" * size)])
    metadata = pq.read_metadata(file)
    assert [metadata.row_group(n).num_rows for n in range(metadata.num_row_groups)] == [2, 3, 1]


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
