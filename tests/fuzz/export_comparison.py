"""Read an export with the Python code alone and with the native core, and compare what they find."""

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from indexer.atproto.limits import DEFAULT_LIMITS
from indexer.atproto.syntax import CollectionFilter
from indexer.core.core import NativeCore, NativeReader, ProvenExport
from indexer.core.spool import BUFFER_BYTES, Spool
from indexer.db.write import ROW_LAYOUT
from indexer.errors import UnavailableError, UpstreamError
from indexer.sync.export import ExportReader, RecordChunk
from indexer.sync.policy import Policy
from indexer.sync.scope import Scope
from tests.fuzz.comparison import SMALL_LIMITS, DifferenceError
from tests.fuzz.copy_format import change_rows, changes_of, record_rows
from tests.fuzz.outcome_counts import OutcomeCounts
from tests.sync.signing_account import STORE_ALL, SigningAccount

SMALL_BUFFERS = {"buffer_bytes": 1_000, "page_bytes": 512}
SMALL_EXPORTS = replace(SMALL_LIMITS, block_bytes=600, repo_bytes=4_000, repo_blocks=30)


FIRST_CHANGE = (3, 1 << 40, 70_000)
"""The segment, the batch and the ordinal of the first change of a chunk."""


class Variant(NamedTuple):
    """One way to read an export: `step` is the number of bytes that arrive at once."""

    policy: Policy
    sizes: Mapping[str, int]
    step: int


VARIANTS = (
    Variant(STORE_ALL, {}, 65_536),
    Variant(Policy(Scope(collections=CollectionFilter(["app.bsky.*"])), DEFAULT_LIMITS), {}, 1_000),
    Variant(Policy(Scope(), SMALL_EXPORTS), {}, 500),
    Variant(STORE_ALL, SMALL_BUFFERS, 300),
)
"""The size of an export selects one of them, so that an input always has the same one."""


class Reading(NamedTuple):
    """The result of a reader for one export.

    Attributes:
        error: The type, the reason and the detail of the error, or None.
        content: The head, the entries of the tree with their blocks, the size, and the chunks of records with
            their rows in the binary format of COPY.
        proven: The native core verified the export.
        ready: The number of records that the native core converted.
    """

    error: tuple[type, str, str] | None
    content: Any = None
    proven: bool = False
    ready: int = 0


class ExportComparison:
    """Compares the two readers on exports, one at a time.

    Attributes:
        counts: What was compared.
    """

    def __init__(self, core: NativeCore, owners: Sequence[SigningAccount]) -> None:
        self._core = core
        self._owners = owners
        self._directory = Path(tempfile.gettempdir())
        self.counts = OutcomeCounts("valid", "proven", "ready")

    def compare(self, data: bytes) -> None:
        """Give an export to both readers.

        Raises:
            DifferenceError: They find different errors, trees, blocks or records.
        """
        variant = VARIANTS[len(data) % len(VARIANTS)]
        owner = next((owner for owner in self._owners if owner.did.encode() in data), self._owners[0])
        limits, sizes = variant.policy.limits, variant.sizes
        expected = _read(Spool(self._directory, limits, sizes.get("buffer_bytes", BUFFER_BYTES)), data, owner, variant)
        found = _read(
            NativeReader(self._core.module.Export, self._directory, limits, ROW_LAYOUT, **sizes), data, owner, variant
        )
        self.counts.executions += 1
        self.counts.add("valid", expected.error is None)
        self.counts.add("proven", found.proven)
        self.counts.add("ready", found.ready)
        if found[:2] != expected[:2]:
            raise DifferenceError(f"Python: {expected}\nnative: {found}")


def _read(reader: ExportReader, data: bytes, owner: SigningAccount, variant: Variant) -> Reading:
    with closing(reader):
        try:
            for start in range(0, len(data), variant.step):
                reader.write(data[start : start + variant.step])
            reader.finish()
            export = reader.verify(owner.did, owner.key.public, variant.policy.limits)
        except (UpstreamError, UnavailableError) as error:
            return Reading((type(error), error.reason, error.detail))
        records = export.new_records(variant.policy)
        chunks = list(iter(records.next_chunk, None))
        entries = [(path, cid, export.block_of(cid)) for path, cid in export.records()]
        found = [
            (changes_of(chunk), chunk.count, chunk.missing, chunk.size, _rows(chunk, owner.did)) for chunk in chunks
        ]
        ready = sum(chunk.count for chunk in chunks if chunk.rows)
        content = (export.head, entries, reader.size, found)
        return Reading(None, content, isinstance(export, ProvenExport), ready)


def _rows(chunk: RecordChunk, did: str) -> tuple[bytes, bytes]:
    """Return the rows of a chunk for the tables of records and of changes: its own, or those of its changes."""
    if chunk.rows is not None:
        return b"".join(chunk.rows.records()), chunk.rows.changes(*FIRST_CHANGE)
    return record_rows(did, chunk.changes), change_rows(did, chunk.changes, *FIRST_CHANGE)
