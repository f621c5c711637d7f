"""Decode content encodings in small pieces, so that a compressed body never expands in memory as a whole."""

import zlib
from collections.abc import Callable, Iterator
from typing import Any

from backports.zstd import DecompressionParameter, ZstdDecompressor, ZstdError

from indexer.errors import UnavailableError
from indexer.reasons import FetchFailure

ACCEPT_ENCODING = "gzip, zstd"
MAX_MEMBERS = 10_000
"""Gzip members or zstd frames in one body. Each costs about as much as 64 KiB of text, even an empty one."""

_KNOWN = frozenset({"br", "compress", "deflate", "gzip", "x-compress", "x-gzip", "zstd"})
_PIECE_BYTES = 65_536
_ZSTD_OPTIONS: dict[int, int] = {DecompressionParameter.window_log_max: 23}  # 8 MiB, the maximum in HTTP (RFC 9659)


class _GzipMember:
    """A decompressor of one gzip member with the interface of `ZstdDecompressor`."""

    def __init__(self) -> None:
        self._inflater = zlib.decompressobj(16 + zlib.MAX_WBITS)
        self.needs_input, self.eof, self.unused_data = True, False, b""

    def decompress(self, data: bytes, max_length: int) -> bytes:
        piece = self._inflater.decompress(self._inflater.unconsumed_tail + data, max_length)
        self.needs_input = len(piece) < max_length and not self._inflater.unconsumed_tail
        self.eof, self.unused_data = self._inflater.eof, self._inflater.unused_data
        return piece


_MEMBERS: dict[str, Callable[[], Any]] = {
    "gzip": _GzipMember,
    "x-gzip": _GzipMember,
    "zstd": lambda: ZstdDecompressor(options=_ZSTD_OPTIONS),
}


class Decoder:
    """Decodes one body: concatenated members (RFC 1952 §2.2, RFC 8878 §3.1). An empty body is valid.

    Call `feed` for each received chunk, then `close`.
    """

    def __init__(self, content_encoding: str) -> None:
        """Take the value of a `Content-Encoding` header.

        A value that names no encoding, such as `utf-8` or `none`, does not hide the body: undici, the client of Node,
        reads it as it is, too.

        Raises:
            UnavailableError: BAD_ANSWER for several encodings, and for one that is not in `ACCEPT_ENCODING`.
        """
        self._encoding = content_encoding.strip().lower()
        self._new_member = _MEMBERS.get(self._encoding)
        self._member: Any = None
        self._members = 0
        if self._new_member is None and not _KNOWN.isdisjoint(map(str.strip, self._encoding.split(","))):
            raise UnavailableError(FetchFailure.BAD_ANSWER, f"unsupported content encoding {self._encoding[:40]!r}")

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the decoded bytes of the next chunk in pieces, which may be empty, each in less than a millisecond.

        Raises:
            UnavailableError: BAD_ANSWER if the bytes are not valid in this encoding.
        """
        if self._new_member is None:
            yield data
            return
        while data or not (self._member is None or self._member.eof or self._member.needs_input):
            if self._member is None or self._member.eof:
                self._members += 1
                if self._members > MAX_MEMBERS:
                    detail = f"{self._encoding}: more than {MAX_MEMBERS} members"
                    raise UnavailableError(FetchFailure.BAD_ANSWER, detail)
                self._member = self._new_member()
            try:
                piece: bytes = self._member.decompress(data, _PIECE_BYTES)
            except (zlib.error, ZstdError) as error:
                raise UnavailableError(FetchFailure.BAD_ANSWER, f"{self._encoding}: {error}") from None
            data = self._member.unused_data
            yield piece  # also an empty one: thousands of empty members in a row must not block the event loop

    def close(self) -> None:
        """Check that the body is complete. Without an encoding, the HTTP framing shows that.

        Raises:
            UnavailableError: UNREACHABLE if the body was cut off.
        """
        if self._member is not None and not self._member.eof:
            raise UnavailableError(FetchFailure.UNREACHABLE, f"{self._encoding}: the body ends too early")
