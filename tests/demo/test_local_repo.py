"""Signatures, chain and slices of commits, and the inversion of their operations."""

from typing import Any

import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, utils
from hypothesis import given, settings
from hypothesis import strategies as st
from multiformats import multibase

from indexer.atproto import cid
from indexer.atproto.crypto import Curve, PrivateKey
from indexer.atproto.inversion import NetOp, Verdict, invert
from indexer.atproto.limits import DEFAULT_LIMITS
from indexer.atproto.mst import EMPTY_TREE
from indexer.demo.dag_cbor import encode
from indexer.demo.local_repo import LocalChange, LocalRepo, Record, TidClock, Write
from tests.demo.independent_decoder import decode_all, decode_car, decode_records
from tests.profiles import scaled

DID = "did:plc:aaaaaaaaaaaaaaaaaaaaaaaa"
PATHS = st.integers(0, 200).map(lambda n: f"com.example.rec/{n}")


class SignedRepo:
    """A repo with its key and its clock."""

    def __init__(self, curve: Curve = "k256") -> None:
        self.key = PrivateKey.from_seed(curve, b"repo")
        self.clock = TidClock()
        self.repo = LocalRepo(DID, self.key, self.clock.tid())

    def write(self, *writes: Write) -> LocalChange:
        return self.repo.write(writes, self.key, self.clock.tid())


def record(number: int) -> dict[str, Any]:
    return {"$type": "com.example.rec", "n": number}


def net_ops(change: LocalChange) -> list[NetOp]:
    """Return the net operations: for each path the CID before its first and after its last operation."""
    old: dict[str, bytes | None] = {}
    new: dict[str, bytes | None] = {}
    for op in change.ops:
        old.setdefault(op["path"], op.get("prev"))
        new[op["path"]] = op["cid"]
    return [NetOp(path.encode(), old[path], new[path]) for path in old if old[path] != new[path]]


def verdict_of(change: LocalChange) -> Verdict:
    _, blocks = decode_car(change.blocks)
    prev = change.prev_data or EMPTY_TREE
    return invert(blocks, change.commit.data, net_ops(change), prev, DEFAULT_LIMITS).verdict


@pytest.mark.parametrize(("curve", "kind"), [("k256", ec.SECP256K1()), ("p256", ec.SECP256R1())])
def test_commits_are_signed_with_low_s(curve: Curve, kind: ec.EllipticCurve) -> None:
    signed_repo = SignedRepo(curve)
    key = multibase.decode(signed_repo.key.public.did_key().removeprefix("did:key:"))
    public = ec.EllipticCurvePublicKey.from_encoded_point(kind, key[2:])
    for number in range(8):
        change = signed_repo.write(Write.create(f"com.example.rec/{number}", record(number)))
        (signed,) = decode_all(change.commit.block)
        assert list(signed) == ["did", "rev", "sig", "data", "prev", "version"]
        signature = signed.pop("sig")
        r, s = int.from_bytes(signature[:32]), int.from_bytes(signature[32:])
        assert len(signature) == 64
        assert s <= kind.group_order // 2
        public.verify(utils.encode_dss_signature(r, s), encode(signed), ec.ECDSA(hashes.SHA256()))
        assert signed == {"did": DID, "rev": change.commit.rev, "data": change.commit.data, "prev": None, "version": 3}


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
def test_repeated_path_has_prev_from_before_batch(
    start: list[Record], writes: list[Write], forms: list[tuple[str, bytes | None, bytes | None]]
) -> None:
    signed_repo = SignedRepo()
    signed_repo.write(Write.create("com.example.rec/b", record(9)), *(Write.create(PATH, first) for first in start))
    change = signed_repo.write(*writes)
    assert [(op["action"], op["cid"], op.get("prev")) for op in change.ops] == forms
    assert all(("prev" in op) == (op.get("prev") is not None) for op in change.ops)
    assert verdict_of(change) is Verdict.OK


@settings(max_examples=scaled(60))
@given(st.lists(st.lists(st.tuples(PATHS, st.integers(0, 3)), max_size=6), min_size=1, max_size=12))
def test_inverting_any_commit_gives_previous_tree(batches: list[list[tuple[str, int]]]) -> None:
    """In a batch, number 0 deletes the path and any other number writes it. The inversion is that of the indexer."""
    signed_repo, expected = SignedRepo(), dict[str, bytes]()
    for batch in batches:
        writes = []
        for path, number in batch:
            if number:
                writes.append((Write.update if path in expected else Write.create)(path, record(number)))
                expected[path] = cid.cid_of(encode(record(number)))
            elif expected.pop(path, None):
                writes.append(Write.delete(path))
        change = signed_repo.write(*writes)
        assert verdict_of(change) is Verdict.OK
        _, blocks = decode_car(change.blocks)
        assert {write.block for write in writes if write.block} <= set(blocks.values())
        assert decode_records(signed_repo.repo.tree.blocks(), change.commit.data) == expected
