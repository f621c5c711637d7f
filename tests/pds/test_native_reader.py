"""The native reader gives the same as the Python reader: blocks, verified exports, records, and errors."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexer.atproto import cbor
from indexer.atproto.cid import RAW, cid_of
from indexer.atproto.crypto import Curve
from indexer.atproto.limits import DEFAULT_LIMITS, Limits
from indexer.atproto.syntax import CollectionFilter
from indexer.localnet import dag_cbor
from indexer.localnet.local_repo import car, car_header, car_section
from indexer.pds import Spool, reader_factory
from indexer.pds.native_reader import NativeReader
from indexer.pds.spool import SpoolSizes
from indexer.reasons import FetchFailure, Rejection
from indexer.sync.export import CHUNK_BYTES, CHUNK_RECORDS, ExportReader
from indexer.sync.policy import Policy
from indexer.sync.scope import Scope
from indexer.sync.shard import bucket_of
from tests.atproto.mst import oracle
from tests.native_module import native_core
from tests.pds.native_exports import (
    DID,
    EXAMPLES,
    KEYS,
    POST,
    REV,
    SMALL_BUFFERS,
    Blocks,
    both,
    post,
    posts,
    ready,
    repo,
    signed,
)
from tests.sync.signing_account import STORE_ALL
from tests.vectors import ROOT, vectors

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("curve", KEYS)
@pytest.mark.parametrize("count", [0, 1, 2, 7, 50, 1_999, 2_000, 2_001, 5_003])
def test_flawless_exports_are_read_by_the_native_core_alone(tmp_path: Path, curve: Curve, count: int) -> None:
    native = both(tmp_path, car(repo(posts(count), curve)), KEYS[curve].public)
    assert native.error is None
    assert native.ordinary
    assert native.proven
    assert ready(native) == count


@pytest.mark.parametrize("step", [1, 35, 4_096])
def test_pieces_and_buffers_of_any_size_give_the_same(tmp_path: Path, step: int) -> None:
    data = car(repo(posts(60)))
    for sizes in (SMALL_BUFFERS, SpoolSizes(buffer_bytes=1, page_bytes=41)):
        assert ready(both(tmp_path, data, sizes=sizes, step=step)) == 60


@pytest.mark.parametrize("seed", range(4))
def test_order_and_repetition_of_blocks_do_not_matter(tmp_path: Path, seed: int) -> None:
    blocks = repo(posts(300))
    [commit, *others] = [car_section(cid, block) for cid, block in blocks.items()]
    sections = [*others[seed::4], *others, commit, *others[::7]]
    raw = RAW + cid_of(b"extra")[4:]
    native = both(tmp_path, car_header(next(iter(blocks))) + b"".join(sections) + car_section(raw, b"extra"))
    assert native.proven
    assert ready(native) == 300


@settings(max_examples=EXAMPLES)
@given(st.sets(st.sampled_from([key for height in range(6) for key in islice(oracle.keys_of_height(height), 12)])))
def test_trees_of_any_shape_are_proven(tmp_path_factory: pytest.TempPathFactory, keys: set[bytes]) -> None:
    native = both(tmp_path_factory.getbasetemp(), car(repo({key: post(1) for key in keys})))
    assert native.proven
    assert native.error is None


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


@pytest.mark.parametrize("name", SHAPES)
def test_records_of_unusual_shapes_are_converted_by_the_native_core(tmp_path: Path, name: str) -> None:
    native = both(tmp_path, car(repo(posts(30) | {f"{POST}/a".encode(): SHAPES[name]})))
    assert ready(native) == 31


@pytest.mark.parametrize(
    "path", [b"a", b"a.b/c", b"a.b.c/", b"a.b.c/\xff", b"\xff.b.c/d", b"a.b.c/" + b"k" * 600, b"a.b.c/."]
)
def test_paths_of_bad_syntax_name_no_record(tmp_path: Path, path: bytes) -> None:
    native = both(tmp_path, car(repo(posts(30) | {path: post(1)})))
    assert native.proven
    assert sum(len(chunk.changes) for chunk in native.chunks) == 30


def test_missing_records_have_no_value(tmp_path: Path) -> None:
    blocks = repo(posts(30))
    del blocks[cid_of(post(7))]
    native = both(tmp_path, car(blocks))
    assert native.proven
    assert [chunk.missing for chunk in native.chunks] == [1]


@pytest.mark.parametrize("patterns", [("app.bsky.feed.like",), ("app.bsky.graph.*", "com.example.a"), ("app.bsky.*",)])
def test_only_selected_collections_are_converted(tmp_path: Path, patterns: tuple[str, ...]) -> None:
    names = [POST, "app.bsky.feed.like", "app.bsky.graph.follow", "com.example.a", "com.example.ab"]
    records = {f"{name}/{n}".encode(): dag_cbor.encode({"$type": name}) for name in names for n in range(9)}
    policy = Policy(Scope(collections=CollectionFilter(patterns)), DEFAULT_LIMITS)
    native = both(tmp_path, car(repo(records)), policy=policy)
    expected = sum(policy.scope.collections.matches(name) for name in names) * 9
    assert ready(native) == expected > 0


@pytest.mark.parametrize("option", [{"links": True}, {"store_values": False}])
def test_other_policies_are_followed(tmp_path: Path, option: dict[str, bool]) -> None:
    native = both(tmp_path, car(repo(posts(40))), policy=Policy(Scope(), DEFAULT_LIMITS, **option))
    assert native.proven
    assert [len(chunk.changes) for chunk in native.chunks] == [40]


def test_values_beyond_the_bounds_of_the_export_are_omitted(tmp_path: Path) -> None:
    large = post(0, more=["x" * 100] * 300)
    shared = {f"{POST}/{number:06}".encode(): large for number in range(2_500)}
    small = {f"app.bsky.feed.like/{number:06}".encode(): post(number) for number in range(2_000)}
    native = both(tmp_path, car(repo(small | shared)))
    changes = [change for chunk in native.chunks for change in chunk.changes]
    assert {change.problem for change in changes} == {None, "other-type", "omitted"}
    assert ready(native) > 0


def test_the_item_budget_of_the_export_is_the_same(tmp_path: Path) -> None:
    heavy = {f"{POST}/{number:06}".encode(): post(number, list=[0] * 4_000) for number in range(200)}
    light = {f"app.bsky.feed.like/{number:06}".encode(): post(number) for number in range(5_000)}
    native = both(tmp_path, car(repo(light | heavy)))
    problems = [change.problem for chunk in native.chunks for change in chunk.changes]
    assert "too-many-items" in problems
    assert ready(native) > 0


def without(number: int) -> Callable[[Blocks], Blocks]:
    return lambda blocks: dict([*islice(blocks.items(), number), *islice(blocks.items(), number + 1, None)])


@pytest.mark.parametrize("number", range(14))
def test_exports_that_lack_a_block_end_alike(tmp_path: Path, number: int) -> None:
    native = both(tmp_path, car_header(next(iter(repo(posts(40))))) + car(without(number)(repo(posts(40))))[59:])
    assert native.ordinary
    assert native.proven is (native.error is None)


def malformed_nodes() -> Iterator[bytes]:
    """Yield roots of trees that are not canonical."""
    root, nodes = oracle.build({key: cid_of(b"a") for key in islice(oracle.keys_of_height(2), 3)})
    block = nodes[root]
    yield block + b"\0"
    yield block[:-1]
    yield block.replace(b"\x61p\x00", b"\x61p\x18\x00", 1)
    yield block.replace(b"app", b"apq", 1)
    yield b"\xa2\x61e\x80\x61l\xd8\x2a\x58\x25\x00" + root
    yield b"\xa2\x61e\x80\x61l\xf6"
    yield dag_cbor.encode({"e": [], "l": None, "x": 1})
    yield dag_cbor.encode({"e": [{"k": b"b", "p": 0, "t": None, "v": cid_of(b"a")}] * 2, "l": None})
    yield dag_cbor.encode({"e": [{"k": b"b", "p": 0, "t": root, "v": cid_of(b"a")}], "l": None})
    yield b"\x00"


def test_malformed_trees_end_alike(tmp_path: Path) -> None:
    reasons = []
    for node in malformed_nodes():
        commit = signed(cid_of(node))
        _, nodes = oracle.build({key: cid_of(b"a") for key in islice(oracle.keys_of_height(2), 3)})
        native = both(tmp_path, car({cid_of(commit): commit, cid_of(node): node, **nodes}))
        assert native.proven is (native.error is None)
        reasons.append(native.error and native.error[1])
    assert reasons.count(Rejection.NODE_MALFORMED) >= 7


COMMITS: dict[str, Callable[[bytes], bytes]] = {
    "another DID": lambda data: signed(data, did="did:plc:aaaaaaaaaaaaaaaaaaaaaaaa"),
    "no DID": lambda data: signed(data, did="x"),
    "version 2": lambda data: signed(data, version=2),
    "bad rev": lambda data: signed(data, rev="1"),
    "another field": lambda data: signed(data, zzz=1),
    "a previous commit": lambda data: signed(data, prev=cid_of(b"a")),
    "another key": lambda data: signed(data, "p256"),
    "flipped signature": lambda data: signed(data).replace(KEYS["k256"].sign(b""), b"")[:-1] + b"\x04",
    "high s": lambda data: high_s(signed(data)),
    "too long": lambda data: signed(data, zzz="x" * 9_000),
    "not a commit": lambda _: b"\xa0",
}


def high_s(commit: bytes) -> bytes:
    order = 0xFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFEBAAEDCE6AF48A03BBFD25E8CD0364141
    start = commit.index(b"\x63sig\x58\x40") + 6 + 32
    s = order - int.from_bytes(commit[start : start + 32])
    return commit[:start] + s.to_bytes(32) + commit[start + 32 :]


@pytest.mark.parametrize("name", COMMITS)
def test_commits_of_any_form_end_alike(tmp_path: Path, name: str) -> None:
    root, nodes = oracle.build({path: cid_of(block) for path, block in posts(5).items()})
    commit = COMMITS[name](root)
    native = both(tmp_path, car({cid_of(commit): commit, **nodes}))
    assert native.proven is (name == "a previous commit")
    assert (native.error is None) is (name in {"a previous commit", "another field"})


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


@cache
def sample() -> bytes:
    return car(repo(posts(12) | {b"com.example.a/1": SHAPES["link and bytes"], b"x.y.z/1": UNUSUAL["float"]}))


@settings(max_examples=5 * EXAMPLES)
@given(st.data())
def test_changed_bytes_end_alike(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    changed = bytearray(sample())
    for _ in range(data.draw(st.integers(1, 3))):
        position = data.draw(st.integers(0, len(changed) - 1))
        match data.draw(st.sampled_from(["flip", "cut", "insert"])):
            case "flip":
                changed[position] ^= data.draw(st.integers(1, 255))
            case "cut":
                del changed[position : position + data.draw(st.integers(1, 80))]
            case _:
                changed[position:position] = data.draw(st.binary(min_size=1, max_size=40))
    both(tmp_path_factory.getbasetemp(), bytes(changed), step=data.draw(st.sampled_from([7, 300, 65_536])))


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


@settings(max_examples=5 * EXAMPLES)
@given(
    st.binary(max_size=200)
    | st.binary(max_size=60).map(lambda block: b"\xa2\x65$type\x72app.bsky.feed.post\x61a" + block)
)
def test_records_of_any_bytes_end_alike(tmp_path_factory: pytest.TempPathFactory, record: bytes) -> None:
    native = both(tmp_path_factory.getbasetemp(), car(repo({f"{POST}/a".encode(): record})))
    assert native.proven


def published() -> list[Path]:
    return sorted(path for path in ROOT.rglob("*.car") if "car-hostile" not in path.parts)


def test_published_repos_end_alike_with_their_own_and_with_our_signature(tmp_path: Path) -> None:
    vectors("mst-test-suite")
    proven = 0
    for path in published():
        data = path.read_bytes()
        assert both(tmp_path, data).error is not None, path  # the key is ours
        root, blocks = oracle.read_car(data)
        trees = {"mst-test-suite": root}.get(path.relative_to(ROOT).parts[0]) or data_of(blocks[root])
        commit = signed(trees)
        native = both(tmp_path, car({cid_of(commit): commit, **blocks}))
        assert native.proven is (native.error is None), path
        proven += native.proven
    assert proven == 128 + 8


def data_of(commit: bytes) -> bytes:
    start = commit.index(b"\x64data\xd8\x2a\x58\x25\x00") + 10
    return commit[start : start + 36]


def test_published_hostile_files_end_alike(tmp_path: Path) -> None:
    vectors("car-hostile")
    files = [path for path in (ROOT / "car-hostile").rglob("*") if path.is_file() and path.suffix != ".txt"]
    assert len(files) > 5
    for path in files:
        assert both(tmp_path, path.read_bytes(), step=100).error is not None, path


def test_ready_rows_are_those_of_the_reference(tmp_path: Path) -> None:
    records = posts(3) | {f"{POST}/x".encode(): SHAPES["no type"]}
    reader = NativeReader(native_core(), tmp_path, DEFAULT_LIMITS)
    reader.write(car(repo(records)))
    chunk = reader.verify(DID, KEYS["k256"].public, DEFAULT_LIMITS).new_records(STORE_ALL, reader.size).next_chunk()
    assert chunk is not None
    bucket = bucket_of(DID).to_bytes(2)
    rows, logged = [], []
    for ordinal, change in enumerate(chunk.changes(), 100):
        names = [change.collection.encode(), change.rkey.encode()]
        value = b"\x01" + (change.value or "").encode()
        problem = change.problem.encode() if change.problem else None
        rows.append([DID.encode(), *names, bucket, change.cid, REV.encode(), value, problem, None])
        number = ordinal.to_bytes(4)
        logged.append(
            [
                b"\0\x05",
                bytes(7) + b"\x09",
                number,
                bucket,
                b"\0",
                b"create",
                DID.encode(),
                *names,
                REV.encode(),
                change.cid,
            ]
        )
    assert chunk.record_rows is not None
    assert b"".join(chunk.record_rows) == copy_rows(rows)
    assert chunk.change_rows(5, 9, 100) == copy_rows(logged)


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
            for reader in (NativeReader(native_core(), tmp_path, DEFAULT_LIMITS), Spool(tmp_path, DEFAULT_LIMITS))
        )
        full = [count >= CHUNK_RECORDS or size >= CHUNK_BYTES for count, size in native]
        assert full == [True] * (len(full) - 1) + [False]
        assert native == reference


def chunk_sizes(reader: ExportReader, data: bytes) -> list[tuple[int, int]]:
    """Return the records and the bytes of each chunk."""
    with closing(reader):
        reader.write(data)
        reader.finish()
        records = reader.verify(DID, KEYS["k256"].public, DEFAULT_LIMITS).new_records(STORE_ALL, reader.size)
        return [(chunk.count, chunk.size) for chunk in iter(records.next_chunk, None)]


def test_without_a_core_the_reader_is_the_reference() -> None:
    assert reader_factory(None) is Spool
