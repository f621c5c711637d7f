import pytest
from hypothesis import given
from hypothesis import strategies as st
from multiformats import CID

from indexer.atproto.cid import DAG_CBOR, MAX_LINK_BYTES, RAW, cid_of, cid_text, is_cid, is_link, link_size, parse_cid

DIGESTS = st.binary(min_size=32, max_size=32)


@given(DIGESTS, st.sampled_from([DAG_CBOR, RAW]))
def test_text_equals_that_of_another_library(digest: bytes, prefix: bytes) -> None:
    cid = prefix + digest
    assert is_cid(cid)
    assert cid_text(cid) == str(CID.decode(cid).encode("base32"))
    assert parse_cid(cid_text(cid)) == cid


def test_published_cid() -> None:
    assert cid_text(cid_of(bytes.fromhex("a26165806 16cf6".replace(" ", "")))) == (
        "bafyreie5737gdxlw5i64vzichcalba3z2v5n6icifvx5xytvske7mr3hpm"
    )


@given(st.text(max_size=70))
def test_arbitrary_text_is_rejected_or_round_trips(text: str) -> None:
    try:
        cid = parse_cid(text)
    except ValueError:
        return
    assert cid_text(cid) == text


ALMOST_VALID = """
    bafy
    QmRgutAxd8t7oGkSm4wmeuByG6M51wcTso6cubDdQtuEfL
    BAFYREIE5737GDXLW5I64VZICHCALBA3Z2V5N6ICIFVX5XYTVSKE7MR3HPM
    zafyreie5737gdxlw5i64vzichcalba3z2v5n6icifvx5xytvske7mr3hpm
    bafyreie5737gdxlw5i64vzichcalba3z2v5n6icifvx5xytvske7mr3hp0
    bafyreie5737gdxlw5i64vzichcalba3z2v5n6icifvx5xytvske7mr3hpn
"""


@pytest.mark.parametrize("text", ["", *ALMOST_VALID.split()])
def test_almost_valid_text_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="CID"):
        parse_cid(text)


def test_link_may_have_the_maximum_size_and_no_more() -> None:
    longest = b"\x01\x55\x12\x60" + bytes(96)
    assert len(longest) == MAX_LINK_BYTES
    assert is_link(longest)
    assert not is_link(b"\x01\x55\x12\x61" + bytes(97))


def test_size_of_a_link_is_known_only_if_all_its_bytes_are_there() -> None:
    link = DAG_CBOR + bytes(32)
    assert link_size(b"abc" + link + b"rest", 3) == len(link)
    assert link_size(b"abc" + link, 3) == len(link)
    assert link_size(b"abc" + link[:-1], 3) is None


def test_text_of_a_link_keeps_letters_at_its_end() -> None:
    link = b"\x01\x55\x00\x01\x17"
    assert is_link(link)
    assert cid_text(link) == str(CID.decode(link).encode("base32")) == "bafkqaaix"
