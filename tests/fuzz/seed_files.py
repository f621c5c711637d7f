"""Published vectors as inputs to start from, read in place. Commits and exports are signed again with our keys."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import cycle
from random import Random
from typing import TypeVar

from indexer.atproto.car import split_car
from indexer.atproto.limits import DEFAULT_LIMITS
from indexer.errors import UpstreamError
from tests.fuzz.commit_parts import split, split_export
from tests.fuzz.corpus import MAX_BYTES
from tests.sync.signing_account import SigningAccount
from tests.vectors import ROOT

T = TypeVar("T")
REPOS = ("indigo/repos/*.car", "repos/**/*.car", "jetstream-corpus/*.car")
"""The patterns of published exports."""


def seed_files(*patterns: str) -> Iterator[bytes]:
    """Yield the files of the vectors with these patterns that are not too large, in a stable order."""
    for pattern in patterns:
        for path in sorted(ROOT.glob(pattern)):
            if path.is_file() and path.stat().st_size <= MAX_BYTES:
                yield path.read_bytes()


def some_of(published: Iterable[T], random: Random, most: int) -> list[T]:
    """Return `most` random inputs of these; all of them if there are fewer."""
    inputs = list(published)
    return random.sample(inputs, min(len(inputs), most))


def published_frames() -> Iterator[bytes]:
    """Yield the published messages of relays that are not too large."""
    yield from seed_files("proto_rune-frames/firehose/*.bin")
    path = ROOT / "jetstream-frames/frames.bin"
    data = path.read_bytes() if path.exists() else b""
    while data:
        size = int.from_bytes(data[:4], "little")
        if size <= MAX_BYTES:
            yield data[4 : 4 + size]
        data = data[4 + size :]


def published_lines(*patterns: str) -> Iterator[bytes]:
    """Yield the lines of text files, except for comments and empty ones."""
    for file in seed_files(*patterns):
        yield from (line for line in file.split(b"\n") if line and not line.startswith(b"#"))


def published_commits(owners: Sequence[SigningAccount]) -> Iterator[bytes]:
    """Yield the frames of published commits, as if these accounts had made them in turn."""
    for parts, owner in zip(filter(None, map(split, published_frames())), cycle(owners)):
        parts.move(owner.did, owner.key)
        yield parts.frame()


def published_exports(owners: Sequence[SigningAccount]) -> Iterator[bytes]:
    """Yield published exports, as if they were of these accounts in turn."""
    files = seed_files(*REPOS, "proto_rune-frames/sync/*.car")
    for parts, owner in zip(filter(None, map(split_export, files)), cycle(owners)):
        parts.move(owner.did, owner.key)
        yield parts.car()


def published_blocks(start: bytes) -> Iterator[bytes]:
    """Yield the blocks of published CAR files that begin with these bytes, in a stable order."""
    for file in seed_files(*REPOS):
        try:
            _, blocks = split_car(file, DEFAULT_LIMITS, max_bytes=len(file))
        except UpstreamError:
            continue
        yield from (block for block in blocks.values() if block.startswith(start))
