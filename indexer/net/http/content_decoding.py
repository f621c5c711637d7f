"""Decode content encodings in small pieces, so that a compressed body never expands in memory as a whole."""

import zlib
from collections.abc import Callable, Iterator
from typing import Protocol

from backports.zstd import DecompressionParameter, ZstdDecompressor, ZstdError

from indexer.errors import UnavailableError
from indexer.reasons import FetchFailure

ACCEPT_ENCODING = "gzip, zstd"
MAX_MEMBERS = 10_000
"""Gzip members or zstd frames in one body. Each costs about as much as 64 KiB of text, even an empty one."""

_KNOWN = frozenset({"br", "compress", "deflate", "gzip", "x-compress", "x-gzip", "zstd"})
_PIECE_BYTES = 65_536
_GZIP_WBITS = 16 + zlib.MAX_WBITS
_ZSTD_OPTIONS: dict[int, int] = {DecompressionParameter.window_log_max: 23}  # 8 MiB, the maximum in HTTP (RFC 9659)


class Decoder(Protocol):
    """Decodes one body. Call `feed` for each received chunk, then `close`."""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the decoded bytes of the next chunk in pieces, which may be empty, each in less than a millisecond.

        Raises:
            UnavailableError: BAD_ANSWER if the bytes are not valid in this encoding.
        """
        ...

    def close(self) -> None:
        """Check that the body is complete.

        Raises:
            UnavailableError: UNREACHABLE if the body was cut off.
        """
        ...


class _Member(Protocol):
    """A decompressor of one gzip member or zstd frame, with the interface of the standard library's decompressors."""

    @property
    def eof(self) -> bool: ...
    @property
    def needs_input(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, max_length: int) -> bytes: ...


class _GzipMember:
    def __init__(self) -> None:
        self._inflater = zlib.decompressobj(_GZIP_WBITS)
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
        """Do nothing: the HTTP framing shows where a body without encoding ends."""


class _Compressed:
    """A body of concatenated members (RFC 1952 §2.2, RFC 8878 §3.1). An empty body is valid."""

    def __init__(self, encoding: str, new_member: Callable[[], _Member]) -> None:
        self._encoding = encoding
        self._new_member = new_member
        self._member: _Member | None = None
        self._members = 0

    def feed(self, data: bytes) -> Iterator[bytes]:
        member = self._member
        while data or not (member is None or member.eof or member.needs_input):
            if member is None or member.eof:
                member = self._next_member()
            try:
                piece = member.decompress(data, _PIECE_BYTES)
            except (zlib.error, ZstdError) as error:
                raise UnavailableError(FetchFailure.BAD_ANSWER, f"{self._encoding}: {error}") from None
            data = member.unused_data
            yield piece  # also an empty one: thousands of empty members in a row must not block the event loop

    def close(self) -> None:
        if self._member is not None and not self._member.eof:
            raise UnavailableError(FetchFailure.UNREACHABLE, f"{self._encoding}: the body ends too early")

    def _next_member(self) -> _Member:
        self._members += 1
        if self._members > MAX_MEMBERS:
            raise UnavailableError(FetchFailure.BAD_ANSWER, f"{self._encoding}: more than {MAX_MEMBERS} members")
        self._member = self._new_member()
        return self._member


def make_decoder(content_encoding: str) -> Decoder:
    """Return a decoder for the value of a `Content-Encoding` header.

    A value that names no encoding, such as `utf-8` or `none`, does not hide the body: undici, the client of Node, reads
    it as it is, too.

    Raises:
        UnavailableError: BAD_ANSWER for several encodings, and for one that is not in `ACCEPT_ENCODING`.
    """
    match content_encoding.strip().lower():
        case "" | "identity":
            return _Identity()
        case "gzip" | "x-gzip":
            return _Compressed("gzip", _GzipMember)
        case "zstd":
            return _Compressed("zstd", lambda: ZstdDecompressor(options=_ZSTD_OPTIONS))
        case other if _KNOWN.isdisjoint(coding.strip() for coding in other.split(",")):
            return _Identity()
        case other:
            raise UnavailableError(FetchFailure.BAD_ANSWER, f"unsupported content encoding {other[:40]!r}")
