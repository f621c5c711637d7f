"""Proofs of the records in ranges: complete and signed, or nothing. The names of the cases say what each is about."""

from collections.abc import Callable, Sequence
from functools import cache
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.atproto.car import split_car
from indexer.atproto.cid import cid_of
from indexer.atproto.crypto import PublicKey
from indexer.atproto.limits import DEFAULT_LIMITS
from indexer.atproto.mst import BlockOf, MissingNodeError, decode_node, encode_node
from indexer.atproto.range_walk import KeyRange, ranges_of
from indexer.demo import dag_cbor
from indexer.demo.local_repo import LocalRepo, Write, car
from indexer.errors import UnavailableError, UpstreamError
from indexer.reasons import FetchFailure, Rejection
from indexer.sync.export import RangeSnapshot, verify_ranges
from tests.daemon.crafted_exports import INVALID_EXPORTS, SignedRepo, entry, keys_of_height, node, node_of_keys
from tests.sync.signing_account import SigningAccount

WANTED, OTHER = "com.example.a", "com.example.b"
NEIGHBOURS = ("com.example.a.sub", "com.example.a-x", "com.example.a0", "com.example.ax")
JUDGED_LATER = {"last record missing", "rev in the future"}
"""Invalid exports that the resync rejects."""


def account_of(*paths: str, name: str = "alice") -> SigningAccount:
    account = SigningAccount(name)
    account.commit(*(Write.create(path, {"path": path}) for path in paths))
    return account


def paths_of(collection: str, records: int) -> list[str]:
    return [f"{collection}/{number:05}" for number in range(records)]


def proven(
    account: SigningAccount,
    body: bytes,
    ranges: Sequence[KeyRange] = tuple(ranges_of([WANTED])),
    key: PublicKey | None = None,
    did: str = "",
) -> RangeSnapshot:
    """Return what a CAR proves; it may lack roots."""
    roots, blocks = split_car(body, DEFAULT_LIMITS, max_bytes=1 << 24, rootless=True)
    root = roots[0] if roots else account.repo.head.cid
    key = key or account.key.public
    return verify_ranges(did or account.did, root, blocks.get, key, DEFAULT_LIMITS, len(body), ranges)


def wanted_of(repo: LocalRepo) -> list[tuple[bytes, bytes]]:
    return sorted((path.encode(), cid_of(b)) for path, b in repo.records.items() if path.startswith(f"{WANTED}/"))


SHAPES = {
    "1 empty repo": [],
    "2 only the wanted record": paths_of(WANTED, 1),
    "3 first collection": [*paths_of(WANTED, 20), *paths_of(OTHER, 60)],
    "4 last collection": [*paths_of(WANTED, 20), *paths_of("com.aaa.b", 60)],
    "5 only collection": paths_of(WANTED, 60),
    "6 no wanted record": [*paths_of("com.aaa.b", 60), *paths_of(OTHER, 60)],
    "7 similar names": [path for name in (WANTED, *NEIGHBOURS) for path in paths_of(name, 20)],
}


@pytest.mark.parametrize("shape", SHAPES)
def test_proof_has_exactly_the_wanted_records(shape: str) -> None:
    account = account_of(*SHAPES[shape])
    snapshot = proven(account, car(account.repo.blocks()))
    assert list(snapshot.records()) == wanted_of(account.repo)
    assert (snapshot.head, snapshot.count) == (account.head, len(wanted_of(account.repo)))


@pytest.mark.parametrize("shape", ["1 empty repo", "2 only the wanted record", "6 no wanted record"])
def test_proof_of_one_key_is_enough_if_no_record_or_only_this_one_is_wanted(shape: str) -> None:
    account = account_of(*SHAPES[shape])
    assert list(proven(account, account.repo.record_proof(f"{WANTED}/00000")).records()) == wanted_of(account.repo)


def test_paths_with_one_record_block_are_all_listed() -> None:
    account = SigningAccount()
    account.commit(*(Write.create(path, {"same": True}) for path in paths_of(WANTED, 5)))
    assert [cid for _, cid in proven(account, car(account.repo.blocks())).records()] == [
        cid_of(dag_cbor.encode({"same": True}))
    ] * 5


@cache
def mixed_account(name: str = "alice") -> SigningAccount:
    return account_of(*paths_of("com.aaa.b", 150), *paths_of(WANTED, 40), *paths_of(OTHER, 150), name=name)


def without_one_key(block: bytes, number: int) -> bytes:
    """Return a node without one of its keys and the subtree after it; another block as it is."""
    try:
        node = decode_node(block, DEFAULT_LIMITS)
    except UpstreamError:
        return block
    for column in (node.keys, node.values, node.trees) if node.keys else ():
        del column[number % len(column)]
    return encode_node(node.keys, node.values, node.left, node.trees)


@given(st.data())
def test_any_block_left_out_changed_or_foreign_proves_nothing_wrong(data: st.DataObject) -> None:
    account, foreign = mixed_account(), mixed_account("bob")
    blocks, foreign_blocks = account.repo.blocks(), foreign.repo.blocks()
    cid = data.draw(st.sampled_from(sorted(blocks)))
    block, number = blocks.pop(cid), data.draw(st.integers(0, 1 << 10))
    match data.draw(st.sampled_from(["left out", "bit", "foreign", "foreign under this CID", "one key less"])):
        case "bit":
            changed = bytearray(block)
            changed[number % len(block)] ^= 1 << number % 8
            blocks[cid] = bytes(changed)
        case "foreign":
            blocks |= foreign_blocks
        case "foreign under this CID":
            blocks[cid] = sorted(foreign_blocks.values())[number % len(foreign_blocks)]
        case "one key less":
            shorter = without_one_key(block, number)
            blocks[cid_of(shorter)] = shorter
    result: object
    try:
        result = list(proven(account, car(blocks, rootless=True)).records())
    except (UpstreamError, UnavailableError) as error:
        result = error.reason
    refusals = (FetchFailure.EXPORT_INCOMPLETE, Rejection.BLOCK_HASH_MISMATCH, Rejection.COMMIT_MISSING)
    assert result in (wanted_of(account.repo), *refusals)


def test_any_node_left_out_that_may_have_wanted_records_makes_the_proof_incomplete() -> None:
    """All blocks that the proof needs are left out one by one, and there are few of them."""
    account = account_of(*paths_of("com.aaa.b", 2_000), *paths_of(WANTED, 30), *paths_of(OTHER, 2_000))
    blocks, wanted, needed = account.repo.blocks(), wanted_of(account.repo), set()

    def found(block_of: BlockOf) -> list[tuple[bytes, bytes]]:
        key, ranges = account.key.public, ranges_of([WANTED])
        return list(verify_ranges(account.did, account.head.commit, block_of, key, DEFAULT_LIMITS, 0, ranges).records())

    for cid in account.repo.tree.blocks():
        try:
            assert found(lambda other, cid=cid: None if other == cid else blocks.get(other)) == wanted  # type: ignore[misc]
        except MissingNodeError:
            needed.add(cid)
    assert len(needed) <= 25
    assert found({cid: blocks[cid] for cid in (*needed, account.head.commit)}.get) == wanted


def signed_tree(root: bytes, *nodes: bytes) -> Callable[[SignedRepo], bytes]:
    return lambda source: source.export_tree(root, *nodes)


LEAF, LEAF_2 = islice(keys_of_height(0), 2)
TOP = next(keys_of_height(1, "z"))
TOP_2 = next(keys_of_height(2, "z"))
EMPTY = dag_cbor.encode({"e": [], "l": None})
LEAF_NODE = node_of_keys([LEAF])
MALFORMED = {
    "19 same key twice": signed_tree(node(entry(LEAF), entry(LEAF, len(LEAF) - 1) | {"p": len(LEAF), "k": b""})),
    "20 key on a wrong layer": signed_tree(
        node_of_keys([TOP], left=cid_of(node_of_keys([TOP_2]))), node_of_keys([TOP_2])
    ),
    "21 skipped layer": signed_tree(node_of_keys([TOP_2], left=cid_of(LEAF_NODE)), LEAF_NODE),
    "23 prefix not the longest": signed_tree(node(entry(LEAF), entry(LEAF_2))),
    "24 empty leaf": signed_tree(node_of_keys([TOP], left=cid_of(EMPTY)), EMPTY),
    "25 untrimmed root": signed_tree(node(left=cid_of(LEAF_NODE)), LEAF_NODE),
    **{name: make for name, (make, _) in INVALID_EXPORTS.items() if name not in JUDGED_LATER},
}


@pytest.mark.parametrize("name", MALFORMED)
def test_invalid_commit_or_tree_proves_nothing(name: str) -> None:
    account = SigningAccount()
    account.commit(*(Write.create(path, {}) for path in paths_of("app.bsky.feed.post", 40)))
    body = MALFORMED[name](SignedRepo(account.repo, account.key))
    for ranges in (ranges_of(["app.bsky.feed.post"]), ranges_of(["app.*", "com.example.a"])):
        reason = Rejection.NODE_MALFORMED if name[0].isdigit() else None
        with pytest.raises((UpstreamError, UnavailableError), match=reason):
            proven(account, body, ranges)


def test_proof_of_another_account_key_or_signature_is_rejected() -> None:
    account, mallory = mixed_account(), SigningAccount("mallory")
    body = car(account.repo.blocks())
    for did, key, reason in (
        (mallory.did, account.key.public, Rejection.ENVELOPE_MISMATCH),
        (account.did, mallory.key.public, Rejection.SIGNATURE_INVALID),
    ):
        with pytest.raises(UpstreamError) as caught:
            proven(account, body, key=key, did=did)
        assert caught.value.reason is reason
    shorter = LocalRepo(account.did, mallory.key, account.repo.head.rev)
    shorter.import_records(dict(list(account.repo.records.items())[:-1]), mallory.key, account.repo.head.rev)
    with pytest.raises(UpstreamError, match=Rejection.SIGNATURE_INVALID):
        proven(account, car(shorter.blocks()))


def test_blocks_without_roots_shuffled_and_repeated_are_read() -> None:
    account = mixed_account()
    sections = list(account.repo.export())[1:]
    body = car({}, rootless=True) + b"".join([*reversed(sections), *sections])
    assert list(proven(account, body).records()) == wanted_of(account.repo)
    with pytest.raises(UpstreamError, match=Rejection.CAR_MALFORMED):
        split_car(body, DEFAULT_LIMITS, max_bytes=len(body))
