"""Strategies for CBOR: valid objects, links that are none, and broken bytes."""

from itertools import count

from hypothesis import strategies as st

from tests.atproto import dag_cbor_oracle as oracle
from tests.atproto.dag_cbor_oracle import Cid, Pairs

LINK = b"\xd8\x2a"
CID = b"\x01\x71\x12\x20" + bytes(range(32))
NOT_LINKS = [
    LINK + b"\x40",
    LINK + b"\x41\x00",
    LINK + b"\x43\x00\x01\x02",
    LINK + b"\x58\x24" + CID,
    LINK + b"\x58\x23\x00" + CID[2:],  # CIDv0
    LINK + b"\x58\x24\x00" + CID[:-1],
    LINK + b"\x58\x26\x00" + CID + b"\x00",
    LINK + b"\x58\x86\x00\x01\x71\x13\x81\x01" + bytes(128),
    LINK + b"\x61a",
    LINK + b"\x78\x25\x00" + CID,
    b"\xd8\x2b\x58\x25\x00" + CID,
]
PIECES = st.sampled_from(
    [*NOT_LINKS, LINK, LINK + b"\x58\x25\x00" + CID, b"\x58\x25\x00", CID, b"\x42" + LINK, b"\x82"]
)
CIDS = st.builds(
    lambda prefix, data: Cid(prefix + data),
    st.sampled_from([b"\1\x71\x12\x20", b"\1\x55\x12\x20"]),
    st.binary(min_size=32, max_size=32),
) | st.builds(
    lambda prefix, data: Cid(prefix + bytes([len(data)]) + data),
    st.sampled_from([b"\1\x55\0", b"\1\xb0\1\x13", b"\1\x71\x81\0", b"\0\x71\x12", b"\x12"]),
    st.binary(max_size=70),
)
KEYS = st.text(max_size=3) | st.sampled_from(["$link", "$bytes", "$type"])
ITEMS = st.recursive(
    st.sampled_from([None, False, True, 0, 23, 24, 255, 256, 2**63, 2**64 - 1, -(2**63), -(2**63) - 1, -(2**64)])
    | st.floats(allow_nan=True)
    | st.text(max_size=5)
    | st.binary(max_size=5)
    | CIDS
    | CIDS.map(lambda cid: cid.data),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.lists(st.tuples(KEYS | inner, inner), max_size=3).map(lambda pairs: Pairs(tuple(pairs)))
    ),
    max_leaves=8,
)


@st.composite
def encodings(draw: st.DrawFn) -> bytes:
    """Draw CBOR that may break one of the rules: long numbers, unsorted or repeated keys, changed bytes."""
    wide = draw(st.none() | st.integers(0, 10))  # the number that is longer than necessary
    numbers = count()
    size = draw(st.sampled_from([1, 2, 4, 8]))
    data = oracle.encode(draw(ITEMS), lambda _: size if next(numbers) == wide else 0)
    match draw(st.sampled_from(["unchanged", "unchanged", "flip", "cut", "append"])):
        case "flip":
            at = draw(st.integers(0, len(data) - 1))
            return data[:at] + bytes([data[at] ^ 1 << draw(st.integers(0, 7))]) + data[at + 1 :]
        case "cut":
            return data[: draw(st.integers(0, len(data)))]
        case "append":
            return data + draw(st.binary(max_size=3))
    return data


DATA = encodings() | st.lists(PIECES | st.binary(max_size=4), max_size=6).map(lambda parts: b"\x81" + b"".join(parts))
