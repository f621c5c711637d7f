"""Content encodings, undone in small pieces: what a few bytes decompress to is never held at once."""

import zlib
from collections.abc import Callable, Iterator
from typing import Protocol

from backports.zstd import DecompressionParameter, ZstdDecompressor, ZstdError

from indexer.errors import UnavailableError
from indexer.reasons import FetchFailure

ACCEPTED = "gzip, zstd"
MOST_MEMBERS = 10_000  # each one costs about as much as 64 KiB of text, even an empty one
_PIECE = 65_536
_GZIP = 16 + zlib.MAX_WBITS
_ZSTD: dict[int, int] = {DecompressionParameter.window_log_max: 23}  # 8 MiB, all that HTTP allows (RFC 9659)


class Decoder(Protocol):
    def feed(self, data: bytes) -> Iterator[bytes]:
        """The decoded bytes of the next piece; raises `UnavailableError(BAD_ANSWER)`."""
        ...

    def close(self) -> None:
        """The body ends here; raises `UnavailableError(UNREACHABLE)` for one that was cut."""
        ...


class _Member(Protocol):
    """A decompressor of one gzip member or zstd frame, as the standard library has them for other formats."""

    @property
    def eof(self) -> bool: ...
    @property
    def needs_input(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, max_length: int) -> bytes: ...


class _GzipMember:
    def __init__(self) -> None:
        self._inflater = zlib.decompressobj(_GZIP)
        self.needs_input = True

    @property
    def eof(self) -> bool:
        return self._inflater.eof

    @property
    def unused_data(self) -> bytes:
        return self._inflater.unused_data

    def decompress(self, data: bytes, max_length: int) -> bytes:
        piece = self._inflater.decompress(self._inflater.unconsumed_tail + data, max_length)
        self.needs_input = len(piece) < max_length and not self._inflater.unconsumed_tail
        return piece


class _Identity:
    def feed(self, data: bytes) -> Iterator[bytes]:
        yield data

    def close(self) -> None:
        """A body that isn't encoded is whole when the connection says so."""


class _Compressed:
    """A body of members one behind the other (RFC 1952 §2.2, RFC 8878 §3.1); no bytes at all are an empty body, too."""

    def __init__(self, encoding: str, begin: Callable[[], _Member]) -> None:
        self._encoding = encoding
        self._begin = begin
        self._member: _Member | None = None
        self._members = 0

    def feed(self, data: bytes) -> Iterator[bytes]:
        member = self._member
        while data or not (member is None or member.eof or member.needs_input):
            if member is None or member.eof:
                member = self._next()
            try:
                piece = member.decompress(data, _PIECE)
            except (zlib.error, ZstdError) as error:
                raise UnavailableError(FetchFailure.BAD_ANSWER, f"{self._encoding}: {error}") from None
            data = member.unused_data
            if piece:
                yield piece

    def close(self) -> None:
        if self._member is not None and not self._member.eof:
            raise UnavailableError(FetchFailure.UNREACHABLE, f"{self._encoding}: cut before the end")

    def _next(self) -> _Member:
        self._members += 1
        if self._members > MOST_MEMBERS:
            raise UnavailableError(FetchFailure.BAD_ANSWER, f"{self._encoding}: over {MOST_MEMBERS} members")
        self._member = self._begin()
        return self._member


def decoder_of(content_encoding: str) -> Decoder:
    """For the value of a `Content-Encoding` header; raises `UnavailableError(BAD_ANSWER)` for one not asked for."""
    match content_encoding.strip().lower():
        case "" | "identity":
            return _Identity()
        case "gzip" | "x-gzip":
            return _Compressed("gzip", _GzipMember)
        case "zstd":
            return _Compressed("zstd", lambda: ZstdDecompressor(options=_ZSTD))
        case other:
            raise UnavailableError(FetchFailure.BAD_ANSWER, f"content encoding {other[:40]!r}")
