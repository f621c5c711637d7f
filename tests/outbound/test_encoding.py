import gzip
import tracemalloc
from collections.abc import Callable
from itertools import pairwise

import pytest
from backports import zstd
from hypothesis import given
from hypothesis import strategies as st

from indexer.errors import UnavailableError
from indexer.outbound.encoding import MOST_MEMBERS, decoder_of
from indexer.reasons import FetchFailure

PACK: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "zstd": zstd.compress}
both = pytest.mark.parametrize("encoding", ["gzip", "zstd"])


def decode(encoding: str, pieces: list[bytes]) -> bytes:
    decoder = decoder_of(encoding)
    decoded = b"".join(chunk for piece in pieces for chunk in decoder.feed(piece))
    decoder.close()
    return decoded


def cut_up(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[start:stop] for start, stop in pairwise(edges)]


bodies = st.binary(max_size=500) | st.builds(bytes.__mul__, st.binary(min_size=1, max_size=3), st.integers(0, 200_000))


@both
@given(st.lists(bodies, max_size=4), st.lists(st.integers(0, 1_000), max_size=5))
def test_members_one_behind_the_other_cut_anywhere(encoding: str, members: list[bytes], cuts: list[int]) -> None:
    packed = b"".join(map(PACK[encoding], members))
    assert decode(f"{encoding.title()} ", cut_up(packed, cuts)) == b"".join(members)


@given(st.binary(max_size=500))
def test_identity(body: bytes) -> None:
    assert decode("", [body]) == decode("identity", [body]) == body


@both
@given(bodies, st.integers(0, 10_000))
def test_a_cut_body_is_never_taken_for_a_whole_one(encoding: str, body: bytes, cut: int) -> None:
    packed = PACK[encoding](body)
    for before in (b"", packed):
        with pytest.raises(UnavailableError) as failure:
            decode(encoding, [before + packed[: 1 + cut % (len(packed) - 1)]])
        assert failure.value.reason is FetchFailure.UNREACHABLE
    assert decode(encoding, []) == b""


@both
@given(st.binary(min_size=1, max_size=200))
def test_garbage(encoding: str, garbage: bytes) -> None:
    with pytest.raises(UnavailableError):
        decode(encoding, [b"x" + garbage])
    with pytest.raises(UnavailableError):
        decode(encoding, [PACK[encoding](b"whole") + b"x" + garbage])


@pytest.mark.parametrize("encoding", ["br", "zlib", "deflate", "gzip, gzip", "gzip, zstd", "\x00"])
def test_encodings_that_were_not_asked_for(encoding: str) -> None:
    with pytest.raises(UnavailableError) as failure:
        decoder_of(encoding)
    assert failure.value.reason is FetchFailure.BAD_ANSWER


@both
def test_a_bomb_is_decompressed_in_small_pieces(encoding: str) -> None:
    bomb = PACK[encoding](bytes(50_000_000))
    assert len(bomb) < 60_000
    decoder = decoder_of(encoding)
    tracemalloc.start()
    try:
        assert sum(len(piece) for piece in decoder.feed(bomb)) == 50_000_000
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000


@both
def test_members_without_end(encoding: str) -> None:
    empty = PACK[encoding](b"")
    assert decode(encoding, [empty * 1_000] * (MOST_MEMBERS // 1_000)) == b""
    with pytest.raises(UnavailableError, match="members") as failure:
        decode(encoding, [empty * 1_000] * (MOST_MEMBERS // 1_000) + [empty])
    assert failure.value.reason is FetchFailure.BAD_ANSWER


def test_a_zstd_window_beyond_what_http_allows() -> None:
    parameter = zstd.CompressionParameter
    for log, allowed in ((23, True), (24, False)):
        packer = zstd.ZstdCompressor(options={parameter.window_log: log})
        packed = packer.compress(bytes(100), packer.FLUSH_BLOCK) + packer.flush()
        if allowed:
            assert decode("zstd", [packed]) == bytes(100)
            continue
        with pytest.raises(UnavailableError) as failure:
            decode("zstd", [packed])
        assert failure.value.reason is FetchFailure.BAD_ANSWER
