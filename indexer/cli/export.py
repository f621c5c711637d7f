"""The command `export`: write a collection as JSON lines or Parquet."""

import io
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from importlib.util import find_spec
from typing import IO, Any, Literal

import click
import orjson

from indexer.app.settings import Settings
from indexer.cli.arguments import parse_nsid
from indexer.cli.command import ExitCode, command
from indexer.cli.database import connect_database
from indexer.cli.output import CommandProgress
from indexer.db import Database
from indexer.db.exports import ExportedRecord
from indexer.errors import SettingsError

Format = Literal["jsonl", "parquet"]
WritePage = Callable[[Sequence[ExportedRecord]], None]
ROW_GROUP_BYTES = 16 * 1024 * 1024
"""Approximate size of one row group, which a Parquet reader loads as a whole."""
ROW_BYTES = 250
"""Approximate size of a row without its value."""


def require_library(form: Format) -> None:
    """Raise `SettingsError` if the library that writes this format is not installed."""
    if form == "parquet" and find_spec("pyarrow") is None:
        raise SettingsError(
            "Parquet needs the library pyarrow, which is not installed; install the package as "
            "atproto-indexer[parquet], or build its image with --build-arg EXTRAS=parquet"
        )


async def export(db: Database, collection: str, form: Format) -> int:
    """Write the visible records of a collection to stdout, in no particular order; return their number.

    Raises:
        UnavailableError: The database does not answer.
        OSError: stdout cannot be written.
    """
    file = sys.stdout.buffer
    count = 0
    with (
        json_lines(file) if form == "jsonl" else parquet(file) as write,
        CommandProgress("records", None) as progress,
    ):
        async with aclosing(db.exports.records(collection)) as pages:
            async for page in pages:
                write(page)
                count += len(page)
                progress.show(count)
    file.flush()
    return count


@contextmanager
def json_lines(file: IO[bytes]) -> Iterator[WritePage]:
    """Yield a function that writes a page as one JSON object per line; `value` is the record as AT Protocol JSON."""

    def write(page: Sequence[ExportedRecord]) -> None:
        for record in page:
            value = None if record.value is None else orjson.Fragment(record.value)
            file.write(orjson.dumps({**record._asdict(), "value": value}, option=orjson.OPT_APPEND_NEWLINE))

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
def parquet(file: IO[bytes], group_bytes: int = ROW_GROUP_BYTES) -> Iterator[WritePage]:
    """Yield a function that writes a page as Parquet with the same columns; `value` is JSON text.

    A row group has about `group_bytes`. If the block fails, the file has no footer, and no reader accepts it.
    """
    import pyarrow as pa  # noqa: PLC0415 - a large optional library
    import pyarrow.parquet as pq  # noqa: PLC0415

    types = {"indexed_at": pa.timestamp("us", tz="UTC")}
    schema = pa.schema([(name, types.get(name, pa.string())) for name in ExportedRecord._fields])
    sink = _Sink(file)
    writer = pq.ParquetWriter(sink, schema, compression="zstd")
    group: list[ExportedRecord] = []
    size = 0

    def write_group() -> None:
        nonlocal size
        if group:
            columns = [list(column) for column in zip(*group, strict=True)]
            writer.write_table(pa.table(columns, schema=schema))
        size = 0
        group.clear()

    def write(page: Sequence[ExportedRecord]) -> None:
        nonlocal size
        group.extend(page)
        size += sum(ROW_BYTES + len(record.value or "") for record in page)
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
@click.option(
    "--format",
    "form",
    type=click.Choice(["jsonl", "parquet"]),
    default="jsonl",
    show_default=True,
    help="Format of the output.",
)
async def export_command(settings: Settings, *, collection: str, form: Format) -> int:
    """Write all visible records of a collection to stdout.

    The output has the records of one point in time, as JSON lines or Parquet. Parquet needs the library pyarrow,
    which the extra `parquet` of the package installs. If the command fails, the output is incomplete: check the exit
    code.
    """
    if form == "parquet" and sys.stdout.isatty():
        raise click.UsageError("Parquet cannot be written to a terminal. Redirect the output to a file.")
    require_library(form)
    async with connect_database(settings) as db:
        count = await export(db, collection, form)
    click.echo(f"records: {count:,}", err=True)
    return ExitCode.OK
