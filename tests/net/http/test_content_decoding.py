import gzip
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.errors import UnavailableError
from indexer.net.http.content_decoding import MAX_MEMBERS, Decoder
from indexer.reasons import FetchFailure


def decode(encoding: str, pieces: list[bytes]) -> bytes:
    decoder = Decoder(encoding)
    decoded = b"".join(chunk for piece in pieces for chunk in decoder.feed(piece))
    decoder.close()
    return decoded


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    limits = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[start:stop] for start, stop in pairwise(limits)]


bodies = st.binary(max_size=500) | st.builds(bytes.__mul__, st.binary(min_size=1, max_size=3), st.integers(0, 200_000))


@given(st.lists(bodies, max_size=4), st.lists(st.integers(0, 1_000), max_size=5))
def test_concatenated_members_in_any_chunks(members: list[bytes], cuts: list[int]) -> None:
    compressed = b"".join(map(gzip.compress, members))
    assert decode("Gzip ", split(compressed, cuts)) == b"".join(members)


@given(st.binary(max_size=500))
def test_body_without_encoding_is_unchanged(body: bytes) -> None:
    assert decode("", [body]) == decode("identity", [body]) == body


@given(bodies, st.integers(0, 10_000))
def test_truncated_body_is_an_error(body: bytes, cut: int) -> None:
    compressed = gzip.compress(body)
    for before in (b"", compressed):
        with pytest.raises(UnavailableError) as failure:
            decode("gzip", [before + compressed[: 1 + cut % (len(compressed) - 1)]])
        assert failure.value.reason is FetchFailure.UNREACHABLE
    assert decode("gzip", []) == b""


@given(st.binary(min_size=1, max_size=200))
def test_malformed_body_is_an_error(garbage: bytes) -> None:
    with pytest.raises(UnavailableError):
        decode("gzip", [b"x" + garbage])
    with pytest.raises(UnavailableError):
        decode("gzip", [gzip.compress(b"whole") + b"x" + garbage])


@pytest.mark.parametrize("encoding", ["UTF-8", "none", "binary", "", "identity, none", "\x00"])
def test_value_that_names_no_encoding_does_not_hide_the_body(encoding: str) -> None:
    assert decode(encoding, [b"a", b"b"]) == b"ab"


def test_unsupported_encodings_are_refused() -> None:
    for encoding in ("br", "Deflate", "gzip, gzip", "zstd", "none,br"):
        with pytest.raises(UnavailableError) as failure:
            Decoder(encoding)
        assert failure.value.reason is FetchFailure.BAD_ANSWER


def test_number_of_members_is_limited() -> None:
    empty = gzip.compress(b"")
    assert decode("gzip", [empty * 1_000] * (MAX_MEMBERS // 1_000)) == b""
    with pytest.raises(UnavailableError, match="members") as failure:
        decode("gzip", [empty * 1_000] * (MAX_MEMBERS // 1_000) + [empty])
    assert failure.value.reason is FetchFailure.BAD_ANSWER


def test_each_member_is_a_piece_even_if_it_is_empty() -> None:
    """The caller lets other tasks run after each piece. 7,000 empty members in one chunk take 0.1 seconds."""
    body = gzip.compress(b"") * 3_000
    assert list(Decoder("gzip").feed(body)) == [b""] * 3_000
