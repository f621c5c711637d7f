from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.atproto.cbor import decode_canonical
from indexer.atproto.cid import DAG_CBOR, RAW
from indexer.demo.dag_cbor import encode

CIDS = st.builds(
    lambda head, digest: head + digest, st.sampled_from([DAG_CBOR, RAW]), st.binary(min_size=32, max_size=32)
)
SCALARS = st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text() | st.binary() | CIDS
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20)


@given(VALUES)
def test_strict_decoder_returns_encoded_value(value: Any) -> None:
    assert decode_canonical(encode(value)) == value


@pytest.mark.parametrize(
    "text", ["01b562eaaea6d8", "0171122000", "0155122000", "1220" + "00" * 32, "01711220" + "00" * 33]
)
def test_bytes_of_other_form_are_encoded_as_byte_string(text: str) -> None:
    assert type(decode_canonical(encode(bytes.fromhex(text)))) is bytes


@pytest.mark.parametrize("value", [1.5, {1}, 2**64])
def test_unsupported_value_is_refused(value: object) -> None:
    with pytest.raises((TypeError, OverflowError)):
        encode(value)
