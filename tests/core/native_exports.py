"""Exports of a small repo, and all that a reader gives for one, to compare the native reader with the reference."""

from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from indexer.atproto.cid import cid_of
from indexer.atproto.crypto import Curve, PrivateKey, PublicKey
from indexer.atproto.limits import DEFAULT_LIMITS, Limits
from indexer.core.core import NativeReader, ProvenExport
from indexer.core.spool import BUFFER_BYTES, Spool
from indexer.demo import dag_cbor
from indexer.errors import UnavailableError, UpstreamError
from indexer.sync.changes import RecordChange
from indexer.sync.export import ExportReader, Snapshot
from indexer.sync.policy import Policy
from tests.atproto.mst import oracle
from tests.fuzz.copy_format import changes_of
from tests.native_module import native_reader
from tests.profiles import scaled
from tests.sync.signing_account import STORE_ALL

DID = "did:plc:z72i7hdynmk6r22z27h6tvur"
REV = "3lwafzkjqm25s"
POST = "app.bsky.feed.post"
KEYS: dict[Curve, PrivateKey] = {curve: PrivateKey.from_seed(curve, b"export") for curve in ("k256", "p256")}
SMALL_BUFFERS = {"buffer_bytes": 1_000, "page_bytes": 512}
EXAMPLES = scaled(100)

Blocks = dict[bytes, bytes]


class Chunk(NamedTuple):
    """A chunk of new records, and how it was made."""

    changes: list[RecordChange]
    missing: int
    size: int
    ready: bool


class Outcome(NamedTuple):
    """All that a reader gives for one export.

    Attributes:
        error: The type, the reason and the detail of the error, or None.
        ordinary: The native core read all bytes.
        proven: The native core verified the export.
        chunks: The new records.
        rest: Everything else.
    """

    error: tuple[type, str, str] | None
    ordinary: bool
    proven: bool
    chunks: list[Chunk]
    rest: Any


def signed(data: bytes, curve: Curve = "k256", **fields: Any) -> bytes:
    """Return the block of a commit of the tree with this root."""
    unsigned = {"did": DID, "rev": REV, "data": data, "prev": None, "version": 3} | fields
    return dag_cbor.encode(unsigned | {"sig": KEYS[curve].sign(dag_cbor.encode(unsigned))})


def repo(records: dict[bytes, bytes], curve: Curve = "k256") -> Blocks:
    """Return the blocks of a repo with these records: path to block. The first one is the commit."""
    root, nodes = oracle.build({path: cid_of(block) for path, block in records.items()})
    commit = signed(root, curve)
    return {cid_of(commit): commit, **nodes, **{cid_of(block): block for block in records.values()}}


def post(number: int, **fields: Any) -> bytes:
    return dag_cbor.encode({"$type": POST, "text": f"post {number} \u00e9\n", "n": number} | fields)


def posts(count: int) -> dict[bytes, bytes]:
    return {f"{POST}/{number:06}".encode(): post(number) for number in range(count)}


def outcome(
    reader: ExportReader,
    data: bytes,
    key: PublicKey,
    policy: Policy = STORE_ALL,
    limits: Limits = DEFAULT_LIMITS,
    step: int = 65_536,
) -> Outcome:
    """Read and verify an export, and convert its records."""
    read, proven, error = 0, False, None
    chunks: list[Chunk] = []
    rest: Any = None
    try:
        for start in range(0, len(data), step):
            reader.write(data[start : start + step])
            read += 1
        reader.finish()
        export = reader.verify(DID, key, limits)
        proven = isinstance(export, ProvenExport)
        chunks = list(chunks_of(export, policy))
        entries = list(export.records())
        blocks = [export.block_of(cid) for _, cid in entries]
        rest = (export.head, entries, blocks, reader.size)
    except (UpstreamError, UnavailableError) as caught:
        error = type(caught), caught.reason, caught.detail
    return Outcome(error, isinstance(reader, NativeReader) and reader.rest is None, proven, chunks, (read, rest))


def chunks_of(export: Snapshot, policy: Policy) -> Iterator[Chunk]:
    records = export.new_records(policy)
    while (chunk := records.next_chunk()) is not None:
        changes = changes_of(chunk)
        assert chunk.count == len(changes)
        yield Chunk(changes, chunk.missing, chunk.size, chunk.rows is not None)


def both(
    directory: Path,
    data: bytes,
    key: PublicKey | None = None,
    limits: Limits = DEFAULT_LIMITS,
    sizes: Mapping[str, int] = MappingProxyType({}),
    **options: Any,
) -> Outcome:
    """Return the outcome of the native reader, which must be that of the Python reader."""
    key = key or KEYS["k256"].public
    with closing(Spool(directory, limits, sizes.get("buffer_bytes", BUFFER_BYTES))) as spool:
        expected = outcome(spool, data, key, limits=limits, **options)
    native = outcome(native_reader(directory, limits, **sizes), data, key, limits=limits, **options)
    assert native.error == expected.error
    assert native.rest == expected.rest
    assert [chunk[:3] for chunk in native.chunks] == [chunk[:3] for chunk in expected.chunks]
    return native


def ready(native: Outcome) -> int:
    """Return the number of records that the native core converted."""
    return sum(len(chunk.changes) for chunk in native.chunks if chunk.ready)
