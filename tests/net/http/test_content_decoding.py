import gzip
from collections.abc import Callable
from itertools import pairwise

import pytest
from backports import zstd
from hypothesis import given
from hypothesis import strategies as st

from indexer.errors import UnavailableError
from indexer.net.http.content_decoding import MAX_MEMBERS, Decoder
from indexer.reasons import FetchFailure

COMPRESS: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "zstd": zstd.compress}
both_encodings = pytest.mark.parametrize("encoding", ["gzip", "zstd"])


def decode(encoding: str, pieces: list[bytes]) -> bytes:
    decoder = Decoder(encoding)
    decoded = b"".join(chunk for piece in pieces for chunk in decoder.feed(piece))
    decoder.close()
    return decoded


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    limits = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[start:stop] for start, stop in pairwise(limits)]


bodies = st.binary(max_size=500) | st.builds(bytes.__mul__, st.binary(min_size=1, max_size=3), st.integers(0, 200_000))


@both_encodings
@given(st.lists(bodies, max_size=4), st.lists(st.integers(0, 1_000), max_size=5))
def test_concatenated_members_in_any_chunks(encoding: str, members: list[bytes], cuts: list[int]) -> None:
    compressed = b"".join(map(COMPRESS[encoding], members))
    assert decode(f"{encoding.title()} ", split(compressed, cuts)) == b"".join(members)


@given(st.binary(max_size=500))
def test_body_without_encoding_is_unchanged(body: bytes) -> None:
    assert decode("", [body]) == decode("identity", [body]) == body


@both_encodings
@given(bodies, st.integers(0, 10_000))
def test_truncated_body_is_an_error(encoding: str, body: bytes, cut: int) -> None:
    compressed = COMPRESS[encoding](body)
    for before in (b"", compressed):
        with pytest.raises(UnavailableError) as failure:
            decode(encoding, [before + compressed[: 1 + cut % (len(compressed) - 1)]])
        assert failure.value.reason is FetchFailure.UNREACHABLE
    assert decode(encoding, []) == b""


@both_encodings
@given(st.binary(min_size=1, max_size=200))
def test_malformed_body_is_an_error(encoding: str, garbage: bytes) -> None:
    with pytest.raises(UnavailableError):
        decode(encoding, [b"x" + garbage])
    with pytest.raises(UnavailableError):
        decode(encoding, [COMPRESS[encoding](b"whole") + b"x" + garbage])


@pytest.mark.parametrize("encoding", ["UTF-8", "none", "binary", "", "identity, none", "\x00"])
def test_value_that_names_no_encoding_does_not_hide_the_body(encoding: str) -> None:
    assert decode(encoding, [b"a", b"b"]) == b"ab"


def test_unsupported_encodings_are_refused() -> None:
    for encoding in ("br", "Deflate", "gzip, gzip", "gzip, zstd", "none,br"):
        with pytest.raises(UnavailableError) as failure:
            Decoder(encoding)
        assert failure.value.reason is FetchFailure.BAD_ANSWER


@both_encodings
def test_number_of_members_is_limited(encoding: str) -> None:
    empty = COMPRESS[encoding](b"")
    assert decode(encoding, [empty * 1_000] * (MAX_MEMBERS // 1_000)) == b""
    with pytest.raises(UnavailableError, match="members") as failure:
        decode(encoding, [empty * 1_000] * (MAX_MEMBERS // 1_000) + [empty])
    assert failure.value.reason is FetchFailure.BAD_ANSWER


def test_zstd_window_above_the_http_maximum_is_refused() -> None:
    parameter = zstd.CompressionParameter
    for log, allowed in ((23, True), (24, False)):
        compressor = zstd.ZstdCompressor(options={parameter.window_log: log})
        compressed = compressor.compress(bytes(100), compressor.FLUSH_BLOCK) + compressor.flush()
        if allowed:
            assert decode("zstd", [compressed]) == bytes(100)
            continue
        with pytest.raises(UnavailableError) as failure:
            decode("zstd", [compressed])
        assert failure.value.reason is FetchFailure.BAD_ANSWER


@both_encodings
def test_each_member_is_a_piece_even_if_it_is_empty(encoding: str) -> None:
    """The caller lets other tasks run after each piece. 7,000 empty members in one chunk take 0.1 seconds."""
    body = COMPRESS[encoding](b"") * 3_000
    assert list(Decoder(encoding).feed(body)) == [b""] * 3_000
