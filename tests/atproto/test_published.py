"""Published vectors and real data of the formats, except those of the tree (mst/test_published.py)."""

import json
from base64 import b64decode
from collections.abc import Callable
from typing import Any

import pytest
from multiformats import multibase

from indexer.atproto.cbor import CborError, decode_canonical
from indexer.atproto.cid import cid_of, cid_text
from indexer.atproto.crypto import Curve, PrivateKey, parse_did_key, parse_legacy_key
from indexer.atproto.did_document import parse_did_document
from indexer.atproto.lexicon import FieldKind, parse_lexicon, record_fields
from indexer.atproto.limits import DEFAULT_LIMITS
from indexer.atproto.record import decode_record
from indexer.atproto.syntax import AtUri, is_did, is_handle, is_nsid, is_record_key, is_tid
from indexer.reasons import Rejection
from tests.atproto.test_car import read, result_or_reason, split
from tests.vectors import vectors

vectors()  # without them, the module is skipped


def published(name: str) -> Any:
    """Return the JSON of a file of vectors, which is not empty."""
    cases = json.loads(vectors(name).read_text())
    assert cases
    return cases


def padded(text: str) -> bytes:
    return b64decode(text + "==")


# DAG-CBOR


def is_canonical(data: bytes) -> bool:
    try:
        decode_canonical(data)
    except CborError:
        return False
    return True


def test_strict_decoder_accepts_and_rejects_the_conformance_cases() -> None:
    cases = [case for path in sorted(vectors("cbor/dasl-testing").glob("*.json")) for case in published(str(path))]
    applicable = [
        case
        for case in cases
        if {"dag-cbor", "basic"} & {*case["tags"]}
        and case["type"] != "invalid_out"
        and case["name"] != "negative zero float64"  # accepted like any other float; `decode_json` rejects all floats
    ]
    assert len(applicable) > 40
    for case in applicable:
        assert is_canonical(bytes.fromhex(case["data"])) is (case["type"] == "roundtrip"), case["name"]


def test_strict_decoder_accepts_and_rejects_the_codec_fixtures() -> None:
    folder = vectors("cbor/codec-fixtures")
    valid = list(folder.glob("fixtures/*/*.dag-cbor"))
    assert len(valid) > 50
    with_cid_v0 = {"cid-QmRgutAxd8t7oGkSm4wmeuByG6M51wcTso6cubDdQtuEfL", "cid-arrayof"}
    for path in valid:
        if path.parent.name not in with_cid_v0 and not path.parent.name.startswith("dagpb"):
            assert is_canonical(path.read_bytes()), path
    for path in folder.glob("negative-fixtures/dag-cbor/decode/*.json"):
        if "dagpb" not in path.name:
            assert [case for case in published(str(path)) if is_canonical(bytes.fromhex(case["hex"]))] == []


def test_data_model_fixtures_are_converted_to_json() -> None:
    for case in published("atproto-interop-tests/data-model/data-model-fixtures.json"):
        block = padded(case["cbor_base64"])
        value = decode_record(block, "com.example.thing", DEFAULT_LIMITS)
        assert value.json is not None
        assert json.loads(value.json) == case["json"]
        assert cid_text(cid_of(block)) == case["cid"]


# CAR files


def test_car_fixtures_are_split() -> None:
    for case in published("atproto-monorepo/packages/repo/tests/car-file-fixtures.json"):
        roots, blocks = split(padded(case["car"]))
        assert [cid_text(root) for root in roots] == [case["root"]]
        assert {cid_text(cid): block for cid, block in blocks.items()} == {
            block["cid"]: padded(block["bytes"]) for block in case["blocks"]
        }


def test_both_parsers_of_car_files_agree_on_hostile_files_and_real_exports() -> None:
    results: dict[str, object] = {}
    hostile = [path for path in vectors("car-hostile").rglob("*") if path.is_file() and path.suffix != ".txt"]
    exports = sorted(vectors("repos").rglob("*.car"))
    for path in [*hostile, *exports]:
        data = path.read_bytes()
        results[path.name] = result_or_reason(split, data)
        assert result_or_reason(read, data, [1, len(data) // 2]) == results[path.name], path
    rejected = {name for name, result in results.items() if isinstance(result, Rejection)}
    assert {"badheaderlength.car", "sample-corrupt-pragma.car", "sample-v1-with-zero-len-section2.car"} <= rejected
    assert len(exports) > 4
    assert rejected.isdisjoint(path.name for path in exports)


# Signatures and keys


def test_signatures_are_verified() -> None:
    cases = published("atproto-interop-tests/crypto/signature-fixtures.json")
    assert len(cases) == 6
    for case in cases:
        message, signature = padded(case["messageBase64"]), padded(case["signatureBase64"])
        for key in (
            parse_did_key(case["publicKeyDid"]),
            parse_legacy_key(case["didDocSuite"], case["publicKeyMultibase"]),
        ):
            assert key.verify(signature, message) is case["validSignature"], case["comment"]


@pytest.mark.parametrize("curve", ["k256", "p256"])
def test_public_key_of_a_private_key_is_the_did_key(curve: Curve) -> None:
    for case in published(f"atproto-interop-tests/crypto/w3c_didkey_{curve.upper()}.json"):
        secret = bytes.fromhex(case["privateKeyBytesHex"]) if "privateKeyBytesHex" in case else None
        secret = secret or multibase.decode("z" + case["privateKeyBytesBase58"])
        assert PrivateKey(curve, secret).public.did_key() == case["publicDidKey"]


# DID documents


def test_documents_are_parsed() -> None:
    for method, handle, pds in (("plc", "atproto.com", "https://bsky.social"), ("web", None, None)):
        raw = published(f"indigo/identity/did_{method}_doc.json")
        parsed = parse_did_document(raw, raw["id"], allow_http=False)
        assert (parsed.handle, parsed.pds, parsed.signing_key is not None) == (handle, pds, pds is not None)
    documents = published("jetstream-frames/did_docs.json")
    assert len(documents) > 50
    for did, raw in documents.items():
        parsed = parse_did_document(raw, did, allow_http=False)
        assert parsed.signing_key is not None
        assert (parsed.pds or "").startswith("https://")


# Lexicons and identifiers


def test_lexicons_are_read() -> None:
    for path in sorted(vectors("atproto-interop-tests/lexicon/catalog").glob("*.json")):
        assert parse_lexicon(published(str(path))).nsid
    for case in published("atproto-interop-tests/lexicon/lexicon-valid.json"):
        assert parse_lexicon(case["lexicon"]).nsid, case["name"]
    # Only what columns depend on is checked: some of these are invalid in another way.
    for case in published("atproto-interop-tests/lexicon/lexicon-invalid.json"):
        try:
            lexicon = parse_lexicon(case["lexicon"])
        except ValueError:
            continue
        for field in record_fields(lexicon, {}):
            assert field.kind in FieldKind, case["name"]


def is_at_uri(text: str) -> bool:
    try:
        AtUri.parse(text)
    except ValueError:
        return False
    return True


CHECKS: dict[str, Callable[[str], bool]] = {
    "did": is_did,
    "handle": is_handle,
    "nsid": is_nsid,
    "recordkey": is_record_key,
    "tid": is_tid,
    "aturi": is_at_uri,
}


@pytest.mark.parametrize("kind", CHECKS)
def test_identifiers_are_accepted_or_rejected(kind: str) -> None:
    for suffix, valid in (("valid", True), ("invalid", False)):
        lines = vectors(f"atproto-interop-tests/syntax/{kind}_syntax_{suffix}.txt").read_text().split("\n")
        cases = [line for line in lines if line and not line.startswith("#")]
        assert len(cases) > 3
        assert [case for case in cases if CHECKS[kind](case) is not valid] == []
