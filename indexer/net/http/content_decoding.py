"""Decode gzip in small pieces, so that a compressed body never expands in memory as a whole."""

import zlib
from collections.abc import Iterator
from typing import Any

from indexer.errors import UnavailableError
from indexer.reasons import FetchFailure

ACCEPT_ENCODING = "gzip"
MAX_MEMBERS = 10_000
"""Gzip members in one body. Each costs about as much as 64 KiB of text, even an empty one."""

_GZIP = frozenset({"gzip", "x-gzip"})
_KNOWN = _GZIP | {"br", "compress", "deflate", "x-compress", "zstd"}
_PIECE_BYTES = 65_536


class Decoder:
    """Decodes one body: concatenated members (RFC 1952 §2.2). An empty body is valid.

    Call `feed` for each received chunk, then `close`.
    """

    def __init__(self, content_encoding: str) -> None:
        """Take the value of a `Content-Encoding` header.

        A value that names no encoding, such as `utf-8` or `none`, does not hide the body: undici, the client of Node,
        reads it as it is, too.

        Raises:
            UnavailableError: BAD_ANSWER for several encodings, and for one that is not in `ACCEPT_ENCODING`.
        """
        encoding = content_encoding.strip().lower()
        self._is_gzip = encoding in _GZIP
        self._member: Any = None
        self._members = 0
        if not self._is_gzip and not _KNOWN.isdisjoint(map(str.strip, encoding.split(","))):
            raise UnavailableError(FetchFailure.BAD_ANSWER, f"unsupported content encoding {encoding[:40]!r}")

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the decoded bytes of the next chunk in pieces, which may be empty, each in less than a millisecond.

        Raises:
            UnavailableError: BAD_ANSWER if the bytes are not valid in this encoding.
        """
        if not self._is_gzip:
            yield data
            return
        has_more = False  # although all bytes were taken
        while data or has_more:
            if self._member is None or self._member.eof:
                self._members += 1
                if self._members > MAX_MEMBERS:
                    raise UnavailableError(FetchFailure.BAD_ANSWER, f"gzip: more than {MAX_MEMBERS} members")
                self._member = zlib.decompressobj(16 + zlib.MAX_WBITS)
            try:
                piece: bytes = self._member.decompress(data, _PIECE_BYTES)
            except zlib.error as error:
                raise UnavailableError(FetchFailure.BAD_ANSWER, f"gzip: {error}") from None
            data = self._member.unconsumed_tail or self._member.unused_data
            has_more = len(piece) == _PIECE_BYTES and not self._member.eof
            yield piece  # also an empty one: thousands of empty members in a row must not block the event loop

    def close(self) -> None:
        """Check that the body is complete. Without an encoding, the HTTP framing shows that.

        Raises:
            UnavailableError: UNREACHABLE if the body was cut off.
        """
        if self._member is not None and not self._member.eof:
            raise UnavailableError(FetchFailure.UNREACHABLE, "gzip: the body ends too early")
