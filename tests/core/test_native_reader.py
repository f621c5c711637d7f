"""The native reader gives the same as the Python reader: blocks, verified exports, records, and errors."""

from collections.abc import Iterable, Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import cbor2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexer.atproto import cbor
from indexer.atproto.cid import RAW, cid_of
from indexer.atproto.crypto import Curve
from indexer.atproto.limits import DEFAULT_LIMITS, Limits
from indexer.atproto.syntax import CollectionFilter
from indexer.core.core import NativeReader
from indexer.core.spool import Spool
from indexer.db.write import in_filling_order
from indexer.demo import dag_cbor
from indexer.demo.local_repo import car, car_header, car_section
from indexer.reasons import FetchFailure, Rejection
from indexer.sync.export import CHUNK_BYTES, ColumnLayout, ExportReader
from indexer.sync.policy import Policy
from indexer.sync.scope import Scope
from indexer.sync.shard import bucket_of
from tests.atproto.mst import oracle
from tests.core.native_exports import (
    DID,
    EXAMPLES,
    KEYS,
    POST,
    REV,
    SMALL_BUFFERS,
    both,
    post,
    posts,
    ready,
    repo,
    signed,
)
from tests.demo.independent_decoder import decode_car
from tests.fuzz.copy_format import changes_of
from tests.native_module import native_module, native_reader
from tests.sync.signing_account import STORE_ALL
from tests.vectors import vectors

native_module()  # without it, the module is skipped
pytestmark = pytest.mark.slow
CHUNK_RECORDS = 2_000


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("core.core", "sync.export"):
        monkeypatch.setattr(f"indexer.{module}.CHUNK_RECORDS", CHUNK_RECORDS)


@pytest.mark.parametrize(
    ("curve", "count"), [("p256", 50), *[("k256", count) for count in (0, 1, 2, 1_999, 2_000, 2_001, 5_003)]]
)
def test_flawless_exports_are_read_by_the_native_core_alone(tmp_path: Path, curve: Curve, count: int) -> None:
    native = both(tmp_path, car(repo(posts(count), curve)), KEYS[curve].public)
    assert native.error is None
    assert native.ordinary
    assert native.proven
    assert ready(native) == count


@pytest.mark.parametrize("step", [1, 35, 4_096])
def test_pieces_and_buffers_of_any_size_give_the_same(tmp_path: Path, step: int) -> None:
    data = car(repo(posts(60)))
    for sizes in (SMALL_BUFFERS, {"buffer_bytes": 1, "page_bytes": 41}):
        assert ready(both(tmp_path, data, sizes=sizes, step=step)) == 60


# Records whose value the reference computes, or which have an unusual shape. `$type` of a record is its collection.
UNUSUAL: dict[str, bytes] = {
    "float": b"\xa1\x61a\xfb" + bytes(7) + b"\x01",
    "large integer": dag_cbor.encode({"a": 1 << 63}),
    "nul": dag_cbor.encode({"$type": POST, "text": "\0"}),
    "reserved key": dag_cbor.encode({"$type": POST, "x": {"$link": "y"}}),
    "not canonical": b"\xa1\x61a\x18\x01",
    "not CBOR": b"\xff",
    "empty": b"",
    "deep": b"\x81" * 300 + b"\x00",
    "large": dag_cbor.encode({"$type": POST, "text": "x" * DEFAULT_LIMITS.record_bytes}),
    "many items": cbor.encode({"$type": POST, "list": [0] * (DEFAULT_LIMITS.record_items + 1)}),
}
SHAPES: dict[str, bytes] = {
    "not a map": dag_cbor.encode([1, "a", None]),
    "no type": dag_cbor.encode({"text": "a"}),
    "type not a text": dag_cbor.encode({"$type": 1}),
    "other type": dag_cbor.encode({"$type": "app.bsky.feed.like"}),
    "link and bytes": dag_cbor.encode({"$type": POST, "link": cid_of(b"a"), "bytes": b"abc"}),
    "long": dag_cbor.encode({"$type": POST, "text": "\U0001f600" * 400, "list": list(range(500))}),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_records_are_converted_by_the_reference(tmp_path: Path, name: str) -> None:
    records = posts(4_500) | {f"{POST}/002500".encode(): UNUSUAL[name]}
    native = both(tmp_path, car(repo(records)))
    assert native.proven
    assert [len(chunk.changes) for chunk in native.chunks if chunk.ready] == [2_000, 500]


def test_records_of_unusual_shapes_and_paths_are_converted_or_left_out(tmp_path: Path) -> None:
    shapes = {f"{POST}/{number}".encode(): block for number, block in enumerate(SHAPES.values())}
    blocks = repo(posts(30) | shapes)
    assert ready(both(tmp_path, car(blocks))) == 36
    del blocks[cid_of(post(7))]
    native = both(tmp_path, car(blocks))
    assert (native.proven, [chunk.missing for chunk in native.chunks]) == (True, [1])
    bad = b"a", b"a.b/c", b"a.b.c/", b"a.b.c/\xff", b"\xff.b.c/d", b"a.b.c/" + b"k" * 600, b"a.b.c/."
    native = both(tmp_path, car(repo(posts(30) | dict.fromkeys(bad, post(1)))))
    assert (native.proven, sum(len(chunk.changes) for chunk in native.chunks)) == (True, 30)


def test_policies_are_followed(tmp_path: Path) -> None:
    names = [POST, "app.bsky.feed.like", "app.bsky.graph.follow", "com.example.a", "com.example.ab"]
    data = car(repo({f"{name}/{n}".encode(): dag_cbor.encode({"$type": name}) for name in names for n in range(9)}))
    for patterns, count in ((["app.bsky.feed.like"], 1), (["app.bsky.graph.*", "com.example.a"], 2), (["app.*"], 3)):
        policy = Policy(Scope(collections=CollectionFilter(patterns)), DEFAULT_LIMITS)
        assert ready(both(tmp_path, data, policy=policy)) == 9 * count
    native = both(tmp_path, data, policy=Policy(Scope(), DEFAULT_LIMITS, store_values=False))
    assert native.proven
    assert [len(chunk.changes) for chunk in native.chunks] == [45]


def test_values_and_items_beyond_the_bounds_of_the_export_are_omitted(tmp_path: Path) -> None:
    shared = {f"{POST}/{n:06}".encode(): post(0, more=["x" * 100] * 300) for n in range(2_500)}
    heavy = {f"{POST}/{n:06}".encode(): post(n, list=[0] * 4_000) for n in range(200)}
    light = {f"app.bsky.feed.like/{n:06}".encode(): post(n) for n in range(5_000)}
    for records, problem in ((shared, "omitted"), (heavy, "too-many-items")):
        native = both(tmp_path, car(repo(light | records)))
        assert problem in {change.problem for chunk in native.chunks for change in chunk.changes}
        assert ready(native) > 0


def test_exports_that_lack_a_block_end_alike(tmp_path: Path) -> None:
    blocks = repo(posts(40))
    header = car_header(next(iter(blocks)))
    for missing in list(blocks)[:14]:
        rest = [car_section(cid, block) for cid, block in blocks.items() if cid != missing]
        native = both(tmp_path, header + b"".join(rest))
        assert native.ordinary
        assert native.proven is (native.error is None)


def test_commits_of_unusual_forms_end_alike(tmp_path: Path) -> None:
    root, nodes = oracle.build({path: cid_of(block) for path, block in posts(5).items()})
    for commit, proven in (
        (signed(root, prev=cid_of(b"a")), True),
        (signed(root, did="did:plc:aaaaaaaaaaaaaaaaaaaaaaaa"), False),
        (signed(root, zzz="x" * 9_000), False),
        (signed(root, "p256"), False),
        (b"\xa0", False),
    ):
        native = both(tmp_path, car({cid_of(commit): commit, **nodes}))
        assert (native.proven, native.error is None) == (proven, proven)


FOREIGN = b"\x01\x70\x12\x20" + bytes(32)


def car_files() -> Iterator[bytes]:
    """Yield CAR files that are not ordinary, most of them malformed."""
    blocks = repo(posts(20))
    good, root = car(blocks), next(iter(blocks))
    header, rest = good[:59], good[59:]
    middle = len(car(dict(islice(blocks.items(), 5))))
    for inserted in (
        car_section(FOREIGN, b"a block"),
        car_section(FOREIGN, b""),
        car_section(cid_of(b"a"), b"b"),
        b"\x00",
        b"\x80\x00",
        b"\x81\x00x",
        b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
        b"\xff\xff\xff\xff\x0f",
        b"\x03abc",
        b"\x24" + FOREIGN[:35],
    ):
        yield good[:middle] + inserted + good[middle:]
        yield good + inserted
    yield dag_header([root, cid_of(b"a")]) + rest
    yield dag_header([]) + rest
    yield dag_header([root], version=2) + rest
    yield dag_header([RAW + root[4:]]) + rest
    yield dag_header([root], other=True) + rest
    yield b"\x3a" + header[2:] + rest
    yield header[:-1]
    yield header
    yield b""
    yield b"\0"
    yield rest
    for size in (*range(55, 70), middle - 1, middle, middle + 1, middle + 30, len(good) - 1):
        yield good[:size]


def dag_header(roots: list[bytes], **fields: Any) -> bytes:
    header = dag_cbor.encode({"roots": roots, "version": 1} | fields)
    return bytes([len(header)]) + header


@pytest.mark.parametrize("step", [1, 100, 65_536])
def test_car_files_of_any_form_end_alike(tmp_path: Path, step: int) -> None:
    outcomes = [both(tmp_path, data, step=step, sizes=SMALL_BUFFERS) for data in car_files()]
    reasons = {native.error[1] for native in outcomes if native.error}
    expected = {Rejection.CAR_MALFORMED, Rejection.BLOCK_HASH_MISMATCH, FetchFailure.EXPORT_INCOMPLETE}
    assert expected <= reasons
    assert sum(not native.ordinary for native in outcomes) > 15
    assert any(native.proven and not native.ordinary for native in outcomes)


@pytest.mark.parametrize(
    "limits",
    [
        Limits(repo_bytes=2_000),
        Limits(repo_blocks=7),
        Limits(block_bytes=150),
        Limits(node_entries=3),
        Limits(tree_depth=0),
        Limits(record_bytes=40),
        Limits(record_json_bytes=60),
        Limits(record_items=5),
    ],
)
def test_limits_are_the_same(tmp_path: Path, limits: Limits) -> None:
    data = car(repo(posts(40) | {f"{POST}/long".encode(): post(1, list=list(range(2_000)))}))
    policy = Policy(Scope(), limits)
    native = both(tmp_path, data, limits=limits, policy=policy, step=500)
    assert native.error is not None or any(change.problem for chunk in native.chunks for change in chunk.changes)


@settings(max_examples=5 * EXAMPLES)
@given(st.data())
def test_changed_blocks_with_right_hashes_end_alike(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """A changed node or record gets its own CID, and the nodes above it and the commit are made for it."""
    records = posts(12) | {b"com.example.a/1": SHAPES["link and bytes"]}
    root, nodes = oracle.build({path: cid_of(block) for path, block in records.items()})
    blocks = {**nodes, **{cid_of(block): block for block in records.values()}}
    target = data.draw(st.sampled_from(sorted(blocks)))
    changed = bytearray(blocks[target])
    position = data.draw(st.integers(0, len(changed) - 1))
    changed[position : position + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=3))
    replaced = {target: bytes(changed)}
    while target != root:
        [(parent, block)] = [(cid, block) for cid, block in nodes.items() if target in block]
        before = target
        target, replaced[parent] = parent, block.replace(before, cid_of(replaced[before]))
    commit = signed(cid_of(replaced[root]))
    new = {cid_of(block): block for block in {**blocks, **replaced}.values()}
    native = both(tmp_path_factory.getbasetemp(), car({cid_of(commit): commit, **new}))
    assert native.ordinary


def test_published_repos_and_hostile_files_end_alike(tmp_path: Path) -> None:
    """With their own signature and with ours."""
    proven = 0
    for path in sorted(vectors().rglob("*.car")):
        data = path.read_bytes()
        assert both(tmp_path, data, step=100).error is not None, path  # the key is ours
        if "car-hostile" in path.parts:
            continue
        root, blocks = decode_car(data)
        if "mst-test-suite" not in path.parts:  # these have no commit, only the tree
            root = cbor2.loads(blocks[root])["data"].value[1:]
        commit = signed(root)
        native = both(tmp_path, car({cid_of(commit): commit, **blocks}))
        assert native.proven is (native.error is None), path
        proven += native.proven
    assert proven == 128 + 8


def test_ready_rows_are_those_of_the_reference(tmp_path: Path) -> None:
    records = posts(3) | {f"{POST}/x".encode(): SHAPES["no type"]}
    reader = native_reader(tmp_path, DEFAULT_LIMITS)
    reader.write(car(repo(records)))
    chunk = reader.verify(DID, KEYS["k256"].public, DEFAULT_LIMITS).new_records(STORE_ALL).next_chunk()
    assert chunk is not None
    did, rev, bucket = DID.encode(), REV.encode(), bucket_of(DID).to_bytes(2)
    rows, logged = [], []
    for ordinal, change in enumerate(changes_of(chunk), 100):
        names, cid = [change.collection.encode(), change.rkey.encode()], change.cid
        value = b"\x01" + (change.value or "").encode()
        problem = change.problem.encode() if change.problem else None
        rows.append([did, *names, bucket, cid, rev, value, problem, None, b"e"])
        numbers = [b"\0\x05", bytes(7) + b"\x09", ordinal.to_bytes(4)]
        logged.append([*numbers, bucket, b"\0", b"create", did, *names, rev, cid])
    assert chunk.rows is not None
    assert b"".join(chunk.rows.records()) == copy_rows(in_filling_order(rows))
    assert chunk.rows.changes(5, 9, 100) == copy_rows(logged)


def test_rows_have_the_columns_that_the_layout_names(tmp_path: Path) -> None:
    layout = ColumnLayout(("value", "rkey", "collection"), ("rkey", "ordinal", "collection"))
    reader = NativeReader(native_module().Export, tmp_path, DEFAULT_LIMITS, layout)
    reader.write(car(repo(posts(1))))
    chunk = reader.verify(DID, KEYS["k256"].public, DEFAULT_LIMITS).new_records(STORE_ALL).next_chunk()
    assert chunk is not None
    assert chunk.rows is not None
    rkey = b"000000"
    value = b'\x01{"n":0,"text":"post 0 \xc3\xa9\\n","$type":"app.bsky.feed.post"}'
    assert b"".join(chunk.rows.records()) == copy_rows([[value, rkey, POST.encode()]])
    assert chunk.rows.changes(1, 2, 7) == copy_rows([[rkey, (7).to_bytes(4), POST.encode()]])
    for columns, bad in ((("rkey", "collection", "colour"), "colour"), (("value", "rkey"), "collection")):
        with pytest.raises(ValueError, match=bad):
            NativeReader(native_module().Export, tmp_path, DEFAULT_LIMITS, ColumnLayout(columns, ()))


def copy_rows(rows: Iterable[list[Any]]) -> bytes:
    """Return rows in the binary format of COPY, as the manual of Postgres describes it."""
    null = (-1).to_bytes(4, signed=True)
    fields = [[null if field is None else len(field).to_bytes(4) + field for field in row] for row in rows]
    return b"".join(len(row).to_bytes(2) + b"".join(row) for row in fields)


def test_a_chunk_below_both_limits_is_the_last_one(tmp_path: Path) -> None:
    """Otherwise, the writer of small repos converts chunks for nothing."""
    large = {f"{POST}/{n:02}".encode(): post(n, filler="x" * 900_000) for n in range(25)}
    for records in (posts(3), posts(4_500), large):
        native, reference = (
            chunk_sizes(reader, car(repo(records)))
            for reader in (native_reader(tmp_path, DEFAULT_LIMITS), Spool(tmp_path, DEFAULT_LIMITS))
        )
        full = [count >= CHUNK_RECORDS or size >= CHUNK_BYTES for count, size in native]
        assert full == [True] * (len(full) - 1) + [False]
        assert native == reference


def chunk_sizes(reader: ExportReader, data: bytes) -> list[tuple[int, int]]:
    """Return the records and the bytes of each chunk."""
    with closing(reader):
        reader.write(data)
        reader.finish()
        records = reader.verify(DID, KEYS["k256"].public, DEFAULT_LIMITS).new_records(STORE_ALL)
        return [(chunk.count, chunk.size) for chunk in iter(records.next_chunk, None)]
