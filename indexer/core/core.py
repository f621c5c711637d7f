"""The core that decodes frames, verifies commits and reads exports: the Python code, or the native core beside it.

The native core is optional: a distribution of its own, `atproto-indexer-native` (native/README.md). It never gives
another result. It handles what is ordinary, and leaves everything else to the Python code. native/src/python.rs and
native/src/python_export.rs describe the native objects. All of them may be used in any thread. A call that takes long
releases the interpreter's lock.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from indexer import __version__
from indexer.atproto.car import CarReader, car_section
from indexer.atproto.crypto import PublicKey
from indexer.atproto.limits import Limits
from indexer.atproto.mst import BlockOf
from indexer.atproto.record import Problem
from indexer.core.spool import BUFFER_BYTES, Spool
from indexer.errors import SettingsError, UnavailableError, UpstreamError
from indexer.reasons import FetchFailure, Rejection
from indexer.sync import events, verify
from indexer.sync.batch import PreparedCommits
from indexer.sync.changes import RecordConverter
from indexer.sync.events import CommitEvent, Event, OtherShardEvent, decode_frame
from indexer.sync.export import (
    CHUNK_BYTES,
    CHUNK_RECORDS,
    ColumnLayout,
    ExportReader,
    NewRecords,
    ReadyRows,
    RecordChunk,
    Snapshot,
    verify_snapshot,
)
from indexer.sync.policy import Policy
from indexer.sync.repo import Head
from indexer.sync.shard import Shard
from indexer.sync.verify import VerifiedCommit, previous_root

CoreChoice = Literal["auto", "python", "native"]
INTERFACE = 8
"""The number of the interface between this package and the native module."""
PAGE_BYTES = 1 << 14
_PROBLEM_OF_SHAPE = (None, Problem.NOT_A_MAP, Problem.NO_TYPE, Problem.OTHER_TYPE)


class CommitsBeingVerified:
    """Commits that the threads of the native core verify, without the interpreter's lock.

    The results are what `verify_commit` returns, with converted records. A result is None if `verify_commit` has to
    decide: the commit has a flaw, is not authentic, is malformed, or has an unusual form.
    """

    def __init__(self, commits: Sequence[tuple[CommitEvent, PublicKey]], running: Any) -> None:
        """Wait for what the native module has begun for these commits."""
        self._waiting = iter(commits)
        self._running = running

    def wait(self) -> None:
        """Block until all results are there, without the interpreter's lock."""
        self._running.wait()

    def next_results(self, count: int = sys.maxsize) -> PreparedCommits:
        """Return the results of the next commits, at most `count`; none at the end. Wait for all of them."""
        results: list[VerifiedCommit | None] = self._running.next_results(count)
        return PreparedCommits(islice(self._waiting, len(results)), results)


class Core:
    """The Python code."""

    name = "python"
    version = __version__  # of the package that it is part of
    threads = 1  # the maximum number of threads in which it verifies commits at once
    verifies_ahead = False  # commits are verified only when they are planned

    def decoder(self, limits: Limits, shard: Shard) -> Callable[[bytes], Event]:
        """Return the function that decodes the frames of a stream for a shard."""
        owns = None if shard.count == 1 else shard.owns
        return lambda frame: decode_frame(frame, limits, owns)

    def open_export(self, directory: Path, limits: Limits, _layout: ColumnLayout) -> ExportReader:
        """Return a reader of an export that may write a file in a directory. Its ready-made rows have this layout.

        Raises:
            UnavailableError: With SPOOL_FULL.
        """
        return Spool(directory, limits)

    def begin_verification(
        self, commits: Sequence[tuple[CommitEvent, PublicKey]], policy: Policy
    ) -> CommitsBeingVerified:
        """Begin to verify commits ahead; return at once."""
        raise NotImplementedError


class NativeReader:
    """Reads an export with the native core: as `Spool` does, with a fraction of its CPU time.

    In these cases, the Python code decides, on the same blocks:

    | the native core meets | then |
    |---|---|
    | bytes that are no ordinary CAR file | `CarReader` goes on, and the core stores the blocks that it accepts |
    | a bad commit, signature or tree | `verify_snapshot` verifies the whole export again, and raises the error |
    | a record that is not ordinary, or missing | `NewRecords` converts the chunk that begins with the next record |

    Attributes:
        rest: Reads from the first bytes on that the native core does not handle; None before them.
    """

    def __init__(
        self,
        new_export: Callable[..., Any],
        directory: Path,
        limits: Limits,
        layout: ColumnLayout,
        *,
        buffer_bytes: int = BUFFER_BYTES,
        page_bytes: int = PAGE_BYTES,
    ) -> None:
        """Write blocks to the file when they have `buffer_bytes`, and read it in pages of `page_bytes`."""
        self._export = new_export(str(directory), limits, buffer_bytes, page_bytes, *layout)
        self._limits = limits
        self.rest: CarReader | None = None

    def write(self, chunk: bytes) -> None:
        """See `ExportReader`."""
        if self.rest is not None:
            self._read_rest(self.rest, chunk)
        elif not self._feed(chunk):
            rest, offset, blocks = self._export.take_rest()
            roots = [] if self._export.root is None else [self._export.root]
            self.rest = CarReader(self._limits, roots, offset, blocks)
            self._read_rest(self.rest, rest)

    def finish(self) -> None:
        """See `ExportReader`."""
        if self.rest is None and self._export.is_whole():
            return
        rest = self.rest or CarReader(self._limits)
        try:
            rest.close()
        except UpstreamError as error:
            raise UnavailableError(FetchFailure.EXPORT_INCOMPLETE, error.detail) from None

    @property
    def root(self) -> bytes:
        """The CID of the commit."""
        root: bytes = self._export.root if self.rest is None else self.rest.roots[0]
        return root

    @property
    def size(self) -> int:
        """The size of all blocks with their lengths and CIDs, in bytes."""
        return int(self._export.size)

    def block(self, cid: bytes) -> bytes | None:
        """Return the bytes of a block; None if the export does not contain it.

        Raises:
            UnavailableError: SPOOL_UNREADABLE if the file cannot be read.
        """
        with _reading():
            block: bytes | None = self._export.block(cid)
        return block

    def verify(self, did: str, key: PublicKey, limits: Limits) -> Snapshot:
        """Verify the whole export. The native core uses the limits of the constructor, which must be the same."""
        with _reading():
            proof = self._export.prove(self.root, did, key.curve, key.uncompressed)
        if proof is None:
            return verify_snapshot(did, self.root, self.block, key, limits, self.size)
        return ProvenExport(did, Head(proof.rev, proof.data, self.root), proof.count, self.block, self.size, proof)

    def close(self) -> None:
        """Free the file and the memory. A call that runs in another thread fails soon, and frees them at its end."""
        self._export.close()

    def _feed(self, data: bytes) -> bool:
        """Give bytes to the native core; return False if it leaves some of them to `CarReader`."""
        try:
            return bool(self._export.feed(data))
        except OSError as error:
            raise UnavailableError(FetchFailure.SPOOL_FULL, str(error)) from error

    def _read_rest(self, rest: CarReader, chunk: bytes) -> None:
        """Split bytes into blocks in Python, and let the native core store each block."""
        for cid, block in rest.feed(chunk):
            if not self._feed(car_section(cid + block)):
                raise UpstreamError(Rejection.CAR_MALFORMED, f"a block of {len(block)} bytes")


@dataclass(frozen=True, slots=True)
class ProvenExport(Snapshot):
    """An export that the native core has verified. All reads raise as `NativeReader.block` does."""

    native: Any

    def records(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield the path and the CID of each record, in bytewise path order."""
        return _entries(self.native.records(["*"]))

    def new_records(self, policy: Policy) -> NewRecords:
        """Return the records that `policy` selects, converted."""
        converter = RecordConverter(policy, self.did, self.head.rev, self.size)
        records = self.native.records(policy.scope.collections.with_excluded)
        if policy.store_values and self.did not in policy.scope.removed:
            return _NativeNewRecords(records, self.block_of, converter)
        return NewRecords(_entries(records), self.block_of, converter)


class _NativeNewRecords(NewRecords):
    """The chunks of the native core, and those that it leaves to the reference. Both take records from one iterator."""

    def __init__(self, records: Any, block_of: BlockOf, converter: RecordConverter) -> None:
        super().__init__(_entries(records), block_of, converter)
        self._records = records

    def next_chunk(self) -> RecordChunk | None:
        converter = self._converter
        with _reading():
            chunk = self._records.chunk(CHUNK_RECORDS, CHUNK_BYTES, converter.items.left, converter.bytes_left)
        if chunk is None:
            return super().next_chunk()
        converter.count_converted(chunk.items, chunk.size)
        # The reference converts the chunks with missing records.
        return RecordChunk(chunk.count, 0, chunk.size, rows=ReadyRows(chunk)) if chunk.count else None


@contextmanager
def _reading() -> Iterator[None]:
    """Raise SPOOL_UNREADABLE if the native core cannot read the spool file."""
    try:
        yield
    except OSError as error:
        raise UnavailableError(FetchFailure.SPOOL_UNREADABLE, str(error)) from error


def _entries(records: Any) -> Iterator[tuple[bytes, bytes]]:
    with _reading():
        yield from records


class NativeCore(Core):
    """The native core with its own threads. It may be called from several threads at once."""

    name = "native"
    verifies_ahead = True

    def __init__(self, module: Any, threads: int) -> None:
        """Start the threads. `module` is the native module (native/src/python.rs); `threads` is at least 1."""
        self.version: str = module.__version__
        self.threads = threads
        self.module = module
        self._core = module.Core(threads, verify, _PROBLEM_OF_SHAPE)

    def decoder(self, limits: Limits, shard: Shard) -> Callable[[bytes], Event]:
        """See `Core`."""
        decode_commit, decode_other = self.commit_decoder(limits, shard), super().decoder(limits, shard)

        def decode(frame: bytes) -> Event:
            event = decode_commit(frame)
            return decode_other(frame) if event is None else event

        return decode

    def commit_decoder(self, limits: Limits, shard: Shard) -> Callable[[bytes], CommitEvent | OtherShardEvent | None]:
        """Return a function that decodes ordinary `#commit` frames as `decode_frame` does.

        It returns None for every other frame, for which `decode_frame` has to decide.
        """
        buckets = None if shard.count == 1 else shard.buckets
        decode: Callable[[bytes], CommitEvent | OtherShardEvent | None]
        decode = self.module.FrameDecoder(events, limits, buckets).decode
        return decode

    def open_export(self, directory: Path, limits: Limits, layout: ColumnLayout) -> ExportReader:
        """See `Core`."""
        return NativeReader(self.module.Export, directory, limits, layout)

    def begin_verification(
        self, commits: Sequence[tuple[CommitEvent, PublicKey]], policy: Policy
    ) -> CommitsBeingVerified:
        """See `Core`."""
        given = [(event, previous_root(event), key.curve, key.uncompressed) for event, key in commits]
        patterns = policy.scope.collections.with_excluded if policy.store_values else ()
        return CommitsBeingVerified(commits, self._core.begin(given, patterns, policy.limits))


PYTHON_CORE = Core()


def load_core(choice: CoreChoice, threads: int) -> Core:
    """Return the core that the settings choose. A native one starts this number of threads, which verify commits.

    "auto" is the native core if it is installed and fits this release.

    Raises:
        SettingsError: The choice is "native", and the native core is not installed or does not fit this release.
    """
    if choice == "python":
        return PYTHON_CORE
    try:
        import atproto_indexer_native as module  # noqa: PLC0415 because most installations do not have it
    except ImportError as error:
        problem = f"the native core is not installed: {error}. Install atproto-indexer-native."
    else:
        if module.INTERFACE == INTERFACE:
            return NativeCore(module, threads)
        problem = (
            f"atproto-indexer-native {module.__version__} has interface {module.INTERFACE}; "
            f"this release needs {INTERFACE}."
        )
    if choice == "native":
        raise SettingsError(problem)
    return PYTHON_CORE
