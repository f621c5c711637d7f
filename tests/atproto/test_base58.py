"""base58btc, compared with the library `multiformats`."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from multiformats import multibase

from indexer.atproto.crypto import decode_base58btc, encode_base58btc
from indexer.errors import UpstreamError

BYTES = st.binary(max_size=80) | st.tuples(st.integers(0, 5), st.binary(max_size=40)).map(
    lambda parts: bytes(parts[0]) + parts[1]
)


@given(BYTES, st.text("123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz", max_size=80))
def test_same_text_and_bytes_as_the_library(data: bytes, text: str) -> None:
    assert encode_base58btc(data) == multibase.encode(data, "base58btc")
    assert decode_base58btc(encode_base58btc(data)) == data
    assert decode_base58btc("z" + text) == multibase.decode("z" + text)


@pytest.mark.parametrize("text", ["0", "O", "I", "l", "1+", " 1", "é"])
def test_other_characters_are_refused(text: str) -> None:
    with pytest.raises(UpstreamError, match="base58btc"):
        decode_base58btc("z" + text)
