"""The encoder and the tree of the local network reproduce published vectors and the repos of other implementations."""

import json
from base64 import b64decode
from typing import Any

import pytest

from indexer.atproto.cid import cid_of
from indexer.demo.dag_cbor import encode
from indexer.demo.reference_tree import ReferenceTree, height
from tests.demo.independent_decoder import cid_from_text, decode_all, decode_car, decode_records
from tests.vectors import vectors

vectors()  # without them, the module is skipped


def test_encoding_matches_published_data_model_fixtures() -> None:
    for case in json.loads(vectors("atproto-interop-tests/data-model/data-model-fixtures.json").read_bytes()):
        block = encode(from_json(case["json"]))
        assert block == b64decode(case["cbor_base64"] + "==")
        assert cid_of(block) == cid_from_text(case["cid"])


def from_json(value: Any) -> Any:
    """Convert AT Protocol JSON to plain values."""
    match value:
        case {"$link": text}:
            return cid_from_text(text)
        case {"$bytes": text}:
            return b64decode(text + "==")
        case dict():
            return {key: from_json(item) for key, item in value.items()}
        case list():
            return [from_json(item) for item in value]
    return value


def test_heights_match_published_ones() -> None:
    cases = json.loads(vectors("atproto-interop-tests/mst/key_heights.json").read_bytes())
    assert [height(case["key"]) for case in cases] == [case["height"] for case in cases]


@pytest.mark.parametrize(
    "name",
    ["mst-test-suite/cars/exhaustive", "indigo/repos", "repos/atproto.dart", "repos/php-car", "jetstream-corpus"],
)
def test_trees_of_other_implementations_are_reproduced(name: str) -> None:
    """The records of repos from other implementations give the same root and nodes."""
    built = 0
    for file in vectors(name).glob("*.car"):
        root, blocks = decode_car(file.read_bytes())
        (head,) = decode_all(blocks[root])
        data = head.get("data", root)  # some files have no commit, only the tree
        if "slice" in file.name:
            continue
        tree = ReferenceTree(decode_records(blocks, data))
        assert tree.data == data, file.name
        assert tree.blocks().items() <= blocks.items()
        built += 1
    assert built


def test_proofs_contain_published_blocks() -> None:
    for case in json.loads(vectors("atproto-interop-tests/firehose/commit-proof-fixtures.json").read_bytes()):
        leaf = cid_from_text(case["leafValue"])
        before = ReferenceTree(dict.fromkeys(case["keys"], leaf))
        after = ReferenceTree(dict.fromkeys({*case["keys"], *case["adds"]} - {*case["dels"]}, leaf))
        assert before.data == cid_from_text(case["rootBeforeCommit"])
        assert after.data == cid_from_text(case["rootAfterCommit"])
        proof = {node for path in case["adds"] + case["dels"] for node in after.proof(path)}
        assert proof >= set(map(cid_from_text, case["blocksInProof"])), case["comment"]
