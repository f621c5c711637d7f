"""Published vectors as inputs to start from, read in place."""

from collections.abc import Iterator

from tests.vectors import ROOT

MAX_BYTES = 16_384
"""The size of the largest input."""


def seed_files(*patterns: str) -> Iterator[bytes]:
    """Yield the files of the vectors with these patterns that are not too large, in a stable order."""
    for pattern in patterns:
        for path in sorted(ROOT.glob(pattern)):
            if path.is_file() and path.stat().st_size <= MAX_BYTES:
                yield path.read_bytes()
