"""The commands `export` and `import-first-seen`: write a collection to stdout, import first-seen times."""

import io
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from importlib.util import find_spec
from itertools import count, islice
from typing import IO, Any, Literal

import click
import orjson

from indexer.app.settings import Settings
from indexer.atproto.limits import max_items
from indexer.atproto.syntax import AtUri, is_did
from indexer.cli.arguments import parse_nsid
from indexer.cli.command import command, json_option
from indexer.cli.database import connect_database
from indexer.cli.lexicon import require_views
from indexer.cli.output import CommandProgress, echo_result
from indexer.db import Database, DatabaseError
from indexer.db.exports import Page, SeenRecord
from indexer.db.view_columns import ViewColumn
from indexer.errors import SettingsError

Format = Literal["jsonl", "parquet"]
WritePage = Callable[[Page], None]
ROW_GROUP_BYTES = 16 * 1024 * 1024
"""Approximate size of one row group, which a Parquet reader loads as a whole."""
BATCH_LINES = 1_000
MAX_LINE_BYTES = 32 * 1024 * 1024
"""Maximum length of a line of an import. A record has at most a mebibyte, and JSON takes up to 14 times as much."""
MAX_LINE_ITEMS = 3 << 20
"""Maximum of `max_items` of a line. A row of a typed view has a record twice, and all its bytes may be commas."""
ATTEMPTS = 5
"""Attempts to write a batch of an import: the daemon may have locked its records."""


async def export(db: Database, collection: str, form: Format, view: str | None = None) -> int:
    """Write the visible records of a collection, or the rows of its typed view, to stdout; return their number.

    They are in no particular order.

    Raises:
        UnavailableError: The database does not answer.
        OSError: stdout cannot be written.
    """
    file = sys.stdout.buffer
    count = 0
    async with db.exports.rows(collection, view) as (columns, pages):
        with (
            json_lines(file, columns) if form == "jsonl" else parquet(file, columns) as write,
            CommandProgress("records", None) as progress,
        ):
            async for page in pages:
                write(page)
                count += len(page)
                progress.show(count)
    file.flush()
    return count


@contextmanager
def json_lines(file: IO[bytes], columns: Sequence[ViewColumn]) -> Iterator[WritePage]:
    """Yield a function that writes a page as one JSON object per line. Values of type jsonb are written as they are."""
    of_json = {column.name for column in columns if column.type == "jsonb"}

    def write(page: Page) -> None:
        for row in page:
            values = {
                name: value if value is None or name not in of_json else orjson.Fragment(value)
                for name, value in row.items()
            }
            file.write(orjson.dumps(values, option=orjson.OPT_APPEND_NEWLINE))

    yield write


class _Sink(io.RawIOBase):
    """Passes bytes on until it is cut off. The Parquet library writes the end of a file when its writer is deleted."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.cut_off = False

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        if not self.cut_off:
            self._file.write(data)
        return len(data)


@contextmanager
def parquet(file: IO[bytes], columns: Sequence[ViewColumn], group_bytes: int = ROW_GROUP_BYTES) -> Iterator[WritePage]:
    """Yield a function that writes a page as Parquet, with the types of the columns; jsonb is JSON text.

    A row group has about `group_bytes`. If the block fails, the file has no footer, and no reader accepts it.
    """
    import pyarrow as pa  # noqa: PLC0415 - a large optional library
    import pyarrow.parquet as pq  # noqa: PLC0415

    types = {
        "bigint": pa.int64(),
        "boolean": pa.bool_(),
        "jsonb": pa.string(),
        "smallint": pa.int16(),
        "text": pa.string(),
        "text[]": pa.list_(pa.string()),
        "timestamp with time zone": pa.timestamp("us", tz="UTC"),
    }
    schema = pa.schema([(column.name, types[column.type]) for column in columns])
    sink = _Sink(file)
    writer = pq.ParquetWriter(sink, schema, compression="zstd")
    group: list[pa.Table] = []

    size = 0

    def write_group() -> None:
        nonlocal size
        if group:
            writer.write_table(pa.concat_tables(group))
        size = 0
        group.clear()

    def write(page: Page) -> None:
        nonlocal size
        group.append(pa.table([list(column) for column in zip(*page, strict=True)], schema=schema))
        size += group[-1].nbytes
        if size >= group_bytes:
            write_group()

    try:
        yield write
        write_group()
        writer.close()
    finally:
        sink.cut_off = True


@command("export")
@click.option(
    "--collection", required=True, metavar="NSID", type=parse_nsid, help="Export the records of this collection."
)
@click.option("--typed", is_flag=True, help="Export the rows of its typed view instead.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["jsonl", "parquet"]),
    default="jsonl",
    show_default=True,
    help="Format of the output.",
)
async def export_command(settings: Settings, *, collection: str, typed: bool, form: Format) -> None:
    """Write all visible records of a collection to stdout.

    The output is from one point in time. Parquet needs pyarrow: install the extra `parquet` of the package. If the
    command fails, the output is incomplete: check the exit code.
    """
    if form == "parquet" and sys.stdout.isatty():
        raise click.UsageError("Parquet cannot be written to a terminal. Redirect the output to a file.")
    if form == "parquet" and find_spec("pyarrow") is None:
        raise SettingsError(
            "Parquet needs the library pyarrow, which is not installed; install the package as "
            "atproto-indexer[parquet], or build its image with --build-arg EXTRAS=parquet"
        )
    async with connect_database(settings) as db:
        stored = await db.lexicons.load() if typed else {}
        if typed:
            require_views([collection], stored)
        count = await export(db, collection, form, stored[collection].view if typed else None)
    click.echo(f"records: {count:,}", err=True)


@command("import-first-seen")
@click.argument("file", metavar="FILE|-", type=click.File("rb"))
@json_option
async def import_first_seen_command(settings: Settings, *, file: IO[bytes]) -> None:
    """Import first-seen times from JSON lines that another database has exported.

    `indexer export` writes such lines. Each stored record keeps the earlier time. Records that are not stored are
    skipped: run the command after the backfill.
    """
    counts = Counter[str]()
    lines = read_seen_records(file)
    async with connect_database(settings) as db:
        with CommandProgress("records", None) as progress:
            while batch := list(islice(lines, BATCH_LINES)):
                latest_first = sorted(batch, key=lambda one: one.first_seen, reverse=True)
                seen = list({one[:3]: one for one in latest_first}.values())  # of each record the earliest time
                stored, changed = await _set_first_seen(db, seen)
                counts += Counter(records=len(seen), set=changed, not_stored=len(seen) - stored)
                progress.show(counts["records"])
    result = {name: counts[name] for name in ("records", "set", "not_stored")}
    text = "records: {records:,}, first-seen times set: {set:,}, not stored: {not_stored:,}".format_map(result)
    echo_result(result, text)


async def _set_first_seen(db: Database, seen: Sequence[SeenRecord]) -> tuple[int, int]:
    for _ in range(ATTEMPTS - 1):
        with suppress(DatabaseError):  # the daemon may have locked a record
            return await db.exports.set_first_seen(seen)
    return await db.exports.set_first_seen(seen)


def read_seen_records(file: IO[bytes]) -> Iterator[SeenRecord]:
    """Yield the record of each line of an export.

    Raises:
        BadParameter: A line is too long, or names no record and time.
    """
    for number in count(1):
        if not (line := file.readline(MAX_LINE_BYTES + 1)):
            return
        try:
            yield _seen_record(line)
        except (ValueError, OverflowError) as error:
            why = "not JSON" if isinstance(error, orjson.JSONDecodeError) else error
            where = f"line {number} of {file.name}"
            raise click.BadParameter(f"{where}: {why}; earlier lines may have been imported") from None


def _seen_record(line: bytes) -> SeenRecord:
    """Return the record of a line; raise `ValueError` or `OverflowError` if there is none."""
    if len(line) > MAX_LINE_BYTES:
        raise ValueError(f"longer than {MAX_LINE_BYTES} bytes")
    if max_items(line) > MAX_LINE_ITEMS:
        raise ValueError(f"more than {MAX_LINE_ITEMS} items")
    row = orjson.loads(line)
    if not isinstance(row, dict):
        raise ValueError("not a JSON object")  # noqa: TRY004 - the line is wrong, not the code
    uri, time, live = row.get("uri"), row.get("first_seen"), row.get("first_seen_live")
    if not (isinstance(uri, str) and isinstance(time, str) and (live is None or isinstance(live, bool))):
        raise ValueError("uri, first_seen or first_seen_live is missing, or has the wrong type")
    record, first_seen = AtUri.parse(uri), datetime.fromisoformat(time)
    if first_seen.tzinfo is None or record.rkey is None or not is_did(record.authority):
        raise ValueError("uri must be the AT-URI of a record, with a DID; first_seen must have a time zone")
    return SeenRecord(record.authority, record.collection or "", record.rkey, first_seen.astimezone(UTC), live)
