"""Published trees, repos and commits of other implementations: nodes, walks and inversion."""

import json
import tarfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import cbor2
import pytest

from indexer.atproto.inversion import NetOp, Verdict, invert
from indexer.atproto.limits import DEFAULT_LIMITS
from indexer.atproto.mst import MissingNodeError, common_prefix, key_height, leaves, walk
from indexer.errors import UpstreamError
from tests.atproto.mst import oracle
from tests.atproto.mst.oracle import Blocks, cid_from_text
from tests.atproto.mst.random_trees import edited
from tests.demo.independent_decoder import decode_car
from tests.vectors import vectors

vectors()  # without them, the module is skipped


def test_heights_and_prefixes_of_keys_equal_the_published_ones() -> None:
    folder = vectors("atproto-interop-tests/mst")
    for case in json.loads((folder / "key_heights.json").read_text()):
        assert key_height(case["key"].encode()) == case["height"]
    for case in json.loads((folder / "common_prefix.json").read_text()):
        assert common_prefix(case["left"].encode(), case["right"].encode()) == case["len"], case
    keys = (folder / "example_keys.txt").read_text().split()
    assert len(keys) == 156
    assert [key_height(key.encode()) for key in keys] == [int(key[1]) for key in keys]


# Walks


def walked(blocks: Blocks, root: bytes) -> dict[bytes, bytes]:
    records = dict(walk(blocks.get, root, DEFAULT_LIMITS))
    assert list(records) == sorted(records)
    assert dict(leaves(blocks.get, root)) == records
    return records


def test_all_trees_of_the_mst_test_suite_are_walked() -> None:
    paths = sorted(vectors("mst-test-suite/cars/exhaustive").glob("*.car"))
    sizes = set()
    for path in paths:
        root, blocks = decode_car(path.read_bytes())
        records = walked(blocks, root)
        assert oracle.build(records) == (root, blocks), path.name
        sizes.add(len(records))
    assert len(paths) == 128
    assert sizes == set(range(8))


WHOLE_REPOS = {
    "indigo/repos/greenground.repo.car": 2,
    "indigo/repos/fakermaker.repo.car": 142,
    "jetstream-corpus/repo.car": 23,
    "repos/atproto.dart/repo.car": 2836,
    "repos/php-car/repo.car": 83,
    "repos/arroba/snarfed2.car": 5,
    "repos/repo-stream/empty.car": 0,
    "repos/repo-stream/tiny.car": 8,
}


def exported(name: str) -> tuple[bytes, Blocks]:
    """Return the root of the tree and the blocks of a published CAR file."""
    root, blocks = decode_car(vectors(name).read_bytes())
    return cbor2.loads(blocks[root])["data"].value[1:], blocks


@pytest.mark.parametrize(("name", "count"), WHOLE_REPOS.items())
def test_whole_repos_are_walked(name: str, count: int) -> None:
    data, blocks = exported(name)
    records = walked(blocks, data)
    assert len(records) == count
    root, nodes = oracle.build(records)
    assert root == data
    assert nodes.items() <= blocks.items()
    if name == "jetstream-corpus/repo.car":
        lines = vectors("jetstream-corpus/car_expected_records.tsv").read_text().splitlines()
        expected = {line.split("\t")[0].encode(): cid_from_text(line.split("\t")[1]) for line in lines}
        assert records == expected


def test_slices_of_repos_are_incomplete_and_prefixes_of_the_node_above_are_rejected() -> None:
    for name in ("indigo/repos/repo_slice.car", "repos/skyfall/attie.car"):
        data, blocks = exported(name)
        with pytest.raises(MissingNodeError):
            walked(blocks, data)
    data, blocks = exported("proto_rune-frames/sync/repo.car")
    with pytest.raises(UpstreamError, match="prefix"):
        walked(blocks, data)


# Inversion


def checked_verdict(blocks: Blocks, root: bytes, ops: Sequence[NetOp], prev_data: bytes) -> Verdict:
    """Return the verdict, after checking that without any one of the blocks it is OK or UNDECIDABLE."""
    for missing in blocks:
        rest = {cid: block for cid, block in blocks.items() if cid != missing}
        inversion = invert(rest, root, ops, prev_data, DEFAULT_LIMITS)
        assert (inversion.verdict, inversion.root) in {(Verdict.OK, prev_data), (Verdict.UNDECIDABLE, None)}
    inversion = invert(blocks, root, ops, prev_data, DEFAULT_LIMITS)
    assert inversion.root in {None, prev_data}
    return inversion.verdict


def mst_test_suite() -> Iterator[tuple[Blocks, bytes, list[NetOp], bytes]]:
    """Yield the blocks of the minimal proof, the new root, the operations and the old root of each case."""
    cars = vectors("mst-test-suite/cars/exhaustive")
    trees = {path.stem: decode_car(path.read_bytes()) for path in cars.iterdir()}
    with tarfile.open(vectors("mst-test-suite/tests-diff-half.tar.gz")) as cases:
        for member in cases:
            file = cases.extractfile(member)
            if file is None:
                continue
            case = json.load(file)
            old, _ = trees[Path(case["inputs"]["mst_a"]).stem]
            new, blocks = trees[Path(case["inputs"]["mst_b"]).stem]
            proof = [cid_from_text(text) for text in case["results"]["inductive_proof_nodes"]]
            yield {cid: blocks[cid] for cid in proof}, new, [net_op(op) for op in case["results"]["record_ops"]], old


def net_op(op: dict[str, str | None]) -> NetOp:
    rpath, *values = op["rpath"], op["old_value"], op["new_value"]
    assert rpath
    old, new = [None if text is None else cid_from_text(text) for text in values]
    return NetOp(rpath.encode(), old, new)


@pytest.mark.slow
def test_all_cases_of_the_mst_test_suite_are_inverted_as_by_the_oracle() -> None:
    """With the whole proof, without each of its nodes, and every eighth without its last node as the oracle does."""
    verdicts = Counter[Verdict]()
    for number, (blocks, root, ops, old) in enumerate(mst_test_suite()):
        verdicts[checked_verdict(blocks, root, ops, old)] += 1
        if number % 8 == 0:
            present = dict(list(blocks.items())[:-1])
            inversion = invert(present, root, ops, old, DEFAULT_LIMITS)
            assert (inversion.verdict, inversion.root) == oracle.invert(present, root, ops, old)
    assert verdicts == {Verdict.OK: 8192}


@pytest.mark.parametrize("name", ["atproto-interop-tests/firehose", "atproto-monorepo/packages/repo/tests"])
def test_commit_proof_fixtures_are_inverted(name: str) -> None:
    fixtures = json.loads(vectors(f"{name}/commit-proof-fixtures.json").read_text())
    assert len(fixtures) == 6
    for fixture in fixtures:
        value = cid_from_text(fixture["leafValue"])
        before = {key.encode(): value for key in fixture["keys"]}
        edits = {key.encode(): value for key in fixture["adds"]} | {key.encode(): None for key in fixture["dels"]}
        after = edited(before, edits)
        root, blocks = oracle.build(after)
        prev_data = oracle.build(before)[0]
        assert (prev_data, root) == tuple(cid_from_text(fixture[f"root{when}Commit"]) for when in ("Before", "After"))
        proof = {cid: blocks[cid] for cid in map(cid_from_text, fixture["blocksInProof"])}
        assert checked_verdict(proof, root, oracle.difference(before, after), prev_data) is Verdict.OK
