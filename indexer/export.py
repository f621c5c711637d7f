"""A collection's records as a file: JSON lines, or Parquet for analysts. Of one moment, in bounded memory."""

import os
import sys
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import ExitStack, aclosing, contextmanager
from pathlib import Path
from typing import IO, Literal, Protocol

import orjson
from rich.console import Console

from indexer.errors import SettingsError
from indexer.progress import counted
from indexer.store import ExportedRecord, Store

Format = Literal["jsonl", "parquet"]
GROUP_BYTES = 16 * 1024 * 1024  # of one row group: what a reader of Parquet takes in at a time, too
ROW_BYTES = 250  # about, beside the value


class Sheet(Protocol):
    """A file that takes records, page by page."""

    def write(self, page: Sequence[ExportedRecord]) -> None: ...
    def finish(self) -> None: ...


async def export(store: Store, collection: str, form: Format, output: Path | None) -> int:
    """Writes the visible records of a collection to a file, which is there when it is whole, or to stdout.

    Gives their number. The order is the database's. Raises `UnavailableError`, `OSError`, and `SettingsError` if the
    library for Parquet is not installed.
    """
    with ExitStack() as stack:
        file = stack.enter_context(_appearing(output)) if output else sys.stdout.buffer
        sheet: Sheet = JsonLines(file) if form == "jsonl" else Parquet(file)
        count = await _fill(sheet, store.export(collection), await store.estimate(collection))
        sheet.finish()
        file.flush()
    return count


async def _fill(sheet: Sheet, pages: AsyncGenerator[list[ExportedRecord]], estimate: int) -> int:
    count = 0
    with counted("records", Console(stderr=True)) as progress:
        task = progress.add_task("records", total=estimate)
        async with aclosing(pages):
            async for page in pages:
                sheet.write(page)
                count += len(page)
                progress.update(task, completed=count, total=max(count, estimate))
        progress.update(task, completed=count, total=count)
    return count


@contextmanager
def _appearing(path: Path) -> Iterator[IO[bytes]]:
    """A file that gets its name at the end of the block, and leaves nothing if the block fails."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


class JsonLines:
    """One JSON object a line; `value` is the record as AT Protocol JSON."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def write(self, page: Sequence[ExportedRecord]) -> None:
        for record in page:
            value = None if record.value is None else orjson.Fragment(record.value)
            self._file.write(orjson.dumps({**record._asdict(), "value": value}, option=orjson.OPT_APPEND_NEWLINE))

    def finish(self) -> None:
        """Nothing is behind the last line."""


class Parquet:
    """The same columns; `value` is JSON text."""

    def __init__(self, file: IO[bytes]) -> None:
        try:
            import pyarrow as pa  # noqa: PLC0415 - a large library, for this alone
            import pyarrow.parquet as pq  # noqa: PLC0415
        except ImportError:
            raise SettingsError("Parquet needs the library pyarrow: pip install 'indexer[parquet]'") from None
        types = {"indexed_at": pa.timestamp("us", tz="UTC")}
        self._schema = pa.schema([(name, types.get(name, pa.string())) for name in ExportedRecord._fields])
        self._pa = pa
        self._writer = pq.ParquetWriter(file, self._schema, compression="zstd")
        self._group: list[ExportedRecord] = []
        self._bytes = 0

    def write(self, page: Sequence[ExportedRecord]) -> None:
        self._group += page
        self._bytes += sum(ROW_BYTES + len(record.value or "") for record in page)
        if self._bytes >= GROUP_BYTES:
            self._write_group()

    def finish(self) -> None:
        self._write_group()
        self._writer.close()

    def _write_group(self) -> None:
        if self._group:
            columns = [list(column) for column in zip(*self._group, strict=True)]
            self._writer.write_table(self._pa.table(columns, schema=self._schema))
        self._group, self._bytes = [], 0
