"""Content encodings, undone in small pieces: what a few bytes decompress to is never held at once."""

import zlib
from collections.abc import Iterator
from typing import Protocol

from indexer.errors import UnavailableError
from indexer.reasons import FetchFailure

ACCEPTED = "gzip"
_PIECE = 65_536
_GZIP = 16 + zlib.MAX_WBITS


class Decoder(Protocol):
    def feed(self, data: bytes) -> Iterator[bytes]:
        """The decoded bytes of the next piece; raises `UnavailableError(BAD_ANSWER)`."""
        ...

    def close(self) -> None:
        """The body ends here; raises `UnavailableError(UNREACHABLE)` for one that was cut."""
        ...


class _Identity:
    def feed(self, data: bytes) -> Iterator[bytes]:
        yield data

    def close(self) -> None:
        """A body that isn't encoded is whole when the connection says so."""


class _Gzip:
    def __init__(self) -> None:
        self._inflater = zlib.decompressobj(_GZIP)
        self._begun = False

    def feed(self, data: bytes) -> Iterator[bytes]:
        self._begun = full = True
        while data or full:
            try:
                piece = self._inflater.decompress(data, _PIECE)
            except zlib.error as error:
                raise UnavailableError(FetchFailure.BAD_ANSWER, f"gzip: {error}") from None
            if self._inflater.unused_data:
                raise UnavailableError(FetchFailure.BAD_ANSWER, "gzip: bytes behind the end")
            data, full = self._inflater.unconsumed_tail, len(piece) == _PIECE
            if piece:
                yield piece

    def close(self) -> None:
        if self._begun and not self._inflater.eof:  # no bytes at all are an empty body in every encoding
            raise UnavailableError(FetchFailure.UNREACHABLE, "gzip: cut before the end")


def decoder_of(content_encoding: str) -> Decoder:
    """For the value of a `Content-Encoding` header; raises `UnavailableError(BAD_ANSWER)` for one not asked for."""
    match content_encoding.strip().lower():
        case "" | "identity":
            return _Identity()
        case "gzip" | "x-gzip":
            return _Gzip()
        case other:
            raise UnavailableError(FetchFailure.BAD_ANSWER, f"content encoding {other[:40]!r}")
