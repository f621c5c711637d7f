"""Commits as their messages show them: signatures, chain, slices, and what undoing the operations gives."""

from typing import Any

import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, utils
from hypothesis import given, settings
from hypothesis import strategies as st
from multiformats import multibase

from indexer.atproto import cid
from indexer.atproto.crypto import Curve, PrivateKey
from indexer.atproto.limits import DEFAULT_LIMITS
from indexer.atproto.mst.inversion import NetOp, Verdict, invert
from indexer.atproto.mst.node import EMPTY_TREE
from indexer.localnet.clock import Clock
from indexer.localnet.dag_cbor import encode
from indexer.localnet.repo import Change, Record, Repo, Write
from tests.localnet.decoding import decode_all, decode_car, decode_records

DID = "did:plc:aaaaaaaaaaaaaaaaaaaaaaaa"
PATHS = st.integers(0, 200).map(lambda n: f"com.example.rec/{n}")


class Host:
    """A repo with what signing it needs."""

    def __init__(self, curve: Curve = "k256") -> None:
        self.key = PrivateKey.from_seed(curve, b"host")
        self.clock = Clock()
        self.repo = Repo(DID, self.key, self.clock.tid())

    def write(self, *writes: Write) -> Change:
        return self.repo.write(writes, self.key, self.clock.tid())


def record(number: int) -> dict[str, Any]:
    return {"$type": "com.example.rec", "n": number}


def net_ops(change: Change) -> list[NetOp]:
    """The operations folded: for each path what was before the first, and what is after the last."""
    old: dict[str, bytes | None] = {}
    new: dict[str, bytes | None] = {}
    for op in change.ops:
        old.setdefault(op["path"], op.get("prev"))
        new[op["path"]] = op["cid"]
    return [NetOp(path.encode(), old[path], new[path]) for path in old if old[path] != new[path]]


def verdict_of(change: Change) -> Verdict:
    _, blocks = decode_car(change.blocks)
    prev = change.prev_data or EMPTY_TREE
    return invert(blocks, change.commit.data, net_ops(change), prev, DEFAULT_LIMITS).verdict


@pytest.mark.parametrize(("curve", "kind"), [("k256", ec.SECP256K1()), ("p256", ec.SECP256R1())])
def test_commits_are_signed_with_low_s_over_their_bytes(curve: Curve, kind: ec.EllipticCurve) -> None:
    host = Host(curve)
    key = multibase.decode(host.key.public.did_key().removeprefix("did:key:"))
    public = ec.EllipticCurvePublicKey.from_encoded_point(kind, key[2:])
    for number in range(8):
        change = host.write(Write.create(f"com.example.rec/{number}", record(number)))
        (signed,) = decode_all(change.commit.block)
        assert list(signed) == ["did", "rev", "sig", "data", "prev", "version"]
        signature = signed.pop("sig")
        r, s = int.from_bytes(signature[:32]), int.from_bytes(signature[32:])
        assert len(signature) == 64
        assert s <= kind.group_order // 2
        public.verify(utils.encode_dss_signature(r, s), encode(signed), ec.ECDSA(hashes.SHA256()))
        assert signed == {"did": DID, "rev": change.commit.rev, "data": change.commit.data, "prev": None, "version": 3}


def test_the_first_commit_is_of_the_empty_tree() -> None:
    first = Host().repo.first
    assert (first.since, first.prev_data, first.ops, first.commit.data) == (None, None, [], EMPTY_TREE)
    root, blocks = decode_car(first.blocks)
    assert root == first.commit.cid
    assert decode_records(blocks, first.commit.data) == {}


def test_commits_form_a_chain() -> None:
    host = Host()
    before = host.repo.head
    for number in range(20):
        change = host.write(Write.create(f"com.example.rec/{number}", record(number)))
        assert (change.since, change.prev_data) == (before.rev, before.data)
        assert change.commit.rev > before.rev
        before = change.commit


def test_an_empty_commit_is_its_block_alone() -> None:
    host = Host()
    data = host.write(Write.create("com.example.rec/a", record(1))).commit.data
    change = host.write()
    assert (change.ops, change.commit.data, change.prev_data) == ([], data, data)
    assert decode_car(change.blocks) == (change.commit.cid, {change.commit.cid: change.commit.block})


PATH = "com.example.rec/a"
ONE, TWO = record(1), record(2)
A, B = cid.cid_of(encode(ONE)), cid.cid_of(encode(TWO))


@pytest.mark.parametrize(
    ("start", "writes", "forms"),
    [
        ([], [Write.create(PATH, ONE), Write.update(PATH, TWO)], [("create", A, None), ("update", B, None)]),
        ([], [Write.create(PATH, ONE), Write.delete(PATH)], [("create", A, None), ("delete", None, None)]),
        ([ONE], [Write.delete(PATH), Write.create(PATH, ONE)], [("delete", None, A), ("create", A, A)]),
        ([ONE], [Write.update(PATH, TWO), Write.update(PATH, TWO)], [("update", B, A), ("update", B, A)]),
    ],
)
def test_a_path_named_twice_has_the_prev_of_before_the_batch(
    start: list[Record], writes: list[Write], forms: list[tuple[str, bytes | None, bytes | None]]
) -> None:
    host = Host()
    host.write(Write.create("com.example.rec/b", record(9)), *(Write.create(PATH, first) for first in start))
    change = host.write(*writes)
    assert [(op["action"], op["cid"], op.get("prev")) for op in change.ops] == forms
    assert all(("prev" in op) == (op.get("prev") is not None) for op in change.ops)
    assert verdict_of(change) is Verdict.OK


@pytest.mark.parametrize(
    "write",
    [
        Write.update("com.example.rec/b", record(1)),
        Write.delete("com.example.rec/b"),
        Write.create("com.example.rec/a", record(2)),
    ],
)
def test_a_batch_with_a_write_out_of_place_changes_nothing(write: Write) -> None:
    host = Host()
    head = host.write(Write.create("com.example.rec/a", record(1))).commit
    with pytest.raises(KeyError):
        host.write(Write.create("com.example.rec/c", record(1)), write)
    assert (host.repo.head, list(host.repo.records)) == (head, ["com.example.rec/a"])
    assert host.write(Write.delete("com.example.rec/a")).prev_data == head.data


@settings(max_examples=60)
@given(st.lists(st.lists(st.tuples(PATHS, st.integers(0, 3)), max_size=6), min_size=1, max_size=12))
def test_undoing_any_commit_gives_the_tree_before(batches: list[list[tuple[str, int]]]) -> None:
    """0 deletes, else writes that number; batches may name a path more than once. Judged by the product's inversion."""
    host, expected = Host(), dict[str, bytes]()
    for batch in batches:
        writes = []
        for path, number in batch:
            if number:
                writes.append((Write.update if path in expected else Write.create)(path, record(number)))
                expected[path] = cid.cid_of(encode(record(number)))
            elif expected.pop(path, None):
                writes.append(Write.delete(path))
        change = host.write(*writes)
        assert verdict_of(change) is Verdict.OK
        _, blocks = decode_car(change.blocks)
        assert {write.block for write in writes if write.block} <= set(blocks.values())
        assert decode_records(host.repo.tree.blocks(), change.commit.data) == expected


def test_undoing_a_forged_list_of_operations_fails() -> None:
    host = Host()
    host.write(*(Write.create(f"com.example.rec/{number}", record(number)) for number in range(50)))
    change = host.write(Write.delete("com.example.rec/7"), Write.create("com.example.rec/60", record(60)))
    change.ops.pop()
    assert verdict_of(change) is Verdict.MISMATCH


def test_an_export_is_streamable_and_whole() -> None:
    host = Host()
    host.write(*(Write.create(f"com.example.rec/{number}", record(number // 2)) for number in range(120)))
    export = b"".join(host.repo.export())
    root, blocks = decode_car(export)
    assert root == host.repo.head.cid
    assert list(blocks)[:2] == [host.repo.head.cid, host.repo.head.data]
    found = decode_records(blocks, host.repo.head.data)
    assert found == {path: cid.cid_of(block) for path, block in host.repo.records.items()}
    assert all(blocks[found[path]] == block for path, block in host.repo.records.items())


def test_an_export_goes_on_with_the_revision_that_it_began() -> None:
    host = Host()
    host.write(*(Write.create(f"com.example.rec/{number}", record(number)) for number in range(20)))
    export = host.repo.export()
    begun = next(export)
    whole = b"".join(host.repo.export())
    host.write(*(Write.delete(f"com.example.rec/{number}") for number in range(20)))
    assert begun + b"".join(export) == whole
