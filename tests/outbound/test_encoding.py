import gzip
import tracemalloc
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.errors import UnavailableError
from indexer.outbound.encoding import decoder_of
from indexer.reasons import FetchFailure


def decode(encoding: str, pieces: list[bytes]) -> bytes:
    decoder = decoder_of(encoding)
    decoded = b"".join(chunk for piece in pieces for chunk in decoder.feed(piece))
    decoder.close()
    return decoded


def cut_up(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[start:stop] for start, stop in pairwise(edges)]


bodies = st.binary(max_size=500) | st.builds(bytes.__mul__, st.binary(min_size=1, max_size=3), st.integers(0, 200_000))


@given(bodies, st.lists(st.integers(0, 1_000), max_size=5))
def test_gzip_cut_anywhere(body: bytes, cuts: list[int]) -> None:
    assert decode("GZip ", cut_up(gzip.compress(body), cuts)) == body


@given(st.binary(max_size=500))
def test_identity(body: bytes) -> None:
    assert decode("", [body]) == decode("identity", [body]) == body


@given(bodies, st.integers(0, 10_000))
def test_a_cut_body_is_never_taken_for_a_whole_one(body: bytes, cut: int) -> None:
    packed = gzip.compress(body)
    with pytest.raises(UnavailableError) as failure:
        decode("gzip", [packed[: 1 + cut % (len(packed) - 1)]])
    assert failure.value.reason is FetchFailure.UNREACHABLE
    assert decode("gzip", []) == b""


@given(st.binary(min_size=1, max_size=200))
def test_garbage(garbage: bytes) -> None:
    with pytest.raises(UnavailableError):
        decode("gzip", [b"x" + garbage])
    with pytest.raises(UnavailableError):
        decode("gzip", [gzip.compress(b"whole") + garbage])


@pytest.mark.parametrize("encoding", ["br", "zstd", "deflate", "gzip, gzip", "\x00"])
def test_encodings_that_were_not_asked_for(encoding: str) -> None:
    with pytest.raises(UnavailableError) as failure:
        decoder_of(encoding)
    assert failure.value.reason is FetchFailure.BAD_ANSWER


def test_a_bomb_is_inflated_in_small_pieces() -> None:
    bomb = gzip.compress(bytes(50_000_000))
    decoder = decoder_of("gzip")
    tracemalloc.start()
    try:
        assert sum(len(piece) for piece in decoder.feed(bomb)) == 50_000_000
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000
