from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.atproto.cid import cid_of
from indexer.atproto.commit import MAX_COMMIT_BYTES, Commit, decode_commit
from indexer.atproto.crypto import PrivateKey
from indexer.atproto.mst import EMPTY_TREE
from indexer.demo import dag_cbor
from indexer.errors import UpstreamError
from indexer.reasons import Rejection

DID = "did:plc:" + "a" * 24
REV = "3ke6kg3wk2222"
KEY = PrivateKey.from_seed("k256", b"commit")
PUBLISHED = bytes.fromhex(
    "a5636469647820"
    "6469643a706c633a616161616161616161616161616161616161616161616161"
    "637265766d336b65366b6733776b323232326464617461d82a5825"
    "00017112209dfefe61dd76ea3dcae5023880b08379d57adf20482d6fdbe2759289f647677b"
    "6470726576f66776657273696f6e03"
)


def signed(**changes: Any) -> bytes:
    """Return a signed commit of another encoder. A field that is `...` is omitted."""
    fields = {"did": DID, "rev": REV, "data": EMPTY_TREE, "prev": None, "version": 3} | changes
    fields = {name: value for name, value in fields.items() if value is not ...}
    return dag_cbor.encode({"sig": KEY.sign(dag_cbor.encode(fields)), **fields})


def decoded(block: bytes) -> Commit:
    return decode_commit(block, cid_of(block))


def test_signed_bytes_are_recovered_from_a_commit() -> None:
    commit = decoded(signed())
    assert commit.unsigned == PUBLISHED
    assert (commit.did, commit.rev, commit.data) == (DID, REV, EMPTY_TREE)
    assert KEY.public.verify(commit.sig, commit.unsigned)


@pytest.mark.parametrize("changes", [{"prev": ...}, {"prev": cid_of(b"")}, {"zzz": 1}, {"aa": [1, 2]}, {"sih": b"x"}])
def test_unknown_fields_stay_in_the_signed_bytes(changes: dict[str, Any]) -> None:
    commit = decoded(signed(**changes))
    assert KEY.public.verify(commit.sig, commit.unsigned)


def test_commit_may_have_23_fields_and_no_more() -> None:
    unknown = {f"x{number:02}": number for number in range(17)}
    commit = decoded(signed(**unknown))
    assert KEY.public.verify(commit.sig, commit.unsigned)
    with pytest.raises(UpstreamError, match="more than 23 fields"):
        decoded(signed(**unknown, another=1))


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("version", [2, 4, True, "3", ...]),
        ("did", ["alice.test", 7, ...]),
        ("rev", ["now", ...]),
        ("data", [..., None, b"\x01\x71\x12\x20" + bytes(31)]),
        ("prev", ["none"]),
        ("sig", [b"short", bytes(65), "text", None]),
    ],
)
def test_commit_with_an_invalid_field_is_rejected(name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(UpstreamError) as caught:
            decoded(signed(**{name: value}))
        assert caught.value.reason is Rejection.COMMIT_MALFORMED


@pytest.mark.parametrize("did", ["did:plc:ddata" + "a" * 19, "did:web:ddata.example", "did:web:crev.example"])
@pytest.mark.parametrize("rev", [REV, "3ddata3wk2222"])
def test_values_that_look_like_fields_stay_in_the_signed_bytes(did: str, rev: str) -> None:
    fields = {"did": did, "rev": rev, "data": EMPTY_TREE, "prev": None, "version": 3}
    assert decoded(signed(did=did, rev=rev)).unsigned == dag_cbor.encode(fields)


def test_commit_over_the_size_limit_is_rejected() -> None:
    longest = "did:web:" + "a" * 2_040
    assert decoded(signed(did=longest)).did == longest
    room = MAX_COMMIT_BYTES - len(signed(zz="z" * 5_000)) + 5_000
    assert decoded(signed(zz="z" * room)).did == DID
    with pytest.raises(UpstreamError) as caught:
        decoded(signed(zz="z" * (room + 1)))
    assert caught.value.reason is Rejection.COMMIT_MALFORMED


@pytest.mark.parametrize("block", [b"", b"\xa0", b"\x80", signed() + b"\0", signed()[:-1], b"\x81" * 50_000])
def test_block_that_is_not_a_canonical_map_is_rejected(block: bytes) -> None:
    with pytest.raises(UpstreamError):
        decoded(block)


def test_commit_that_is_not_canonical_or_repeats_the_entry_sig_inside_a_value_is_rejected() -> None:
    """It is unclear which of two entries `sig` is not part of the signed bytes."""
    block = signed()
    assert block.endswith(b"version\x03")
    entry = block[block.index(b"\x63sig") : block.index(b"\x63sig") + 70]
    fields = {"did": DID, "rev": REV, "data": EMPTY_TREE, "prev": None, "version": 3}
    for malformed in (block[:-1] + b"\x18\x03", dag_cbor.encode({"sig": entry[6:], **fields, "zz": entry})):
        with pytest.raises(UpstreamError):
            decoded(malformed)


@given(st.integers(0, len(signed()) - 1), st.integers(0, 7))
def test_flipped_bit_invalidates_the_signature(offset: int, bit: int) -> None:
    block = bytearray(signed())
    block[offset] ^= 1 << bit
    try:
        commit = decoded(bytes(block))
    except UpstreamError:
        return
    assert not KEY.public.verify(commit.sig, commit.unsigned)
