"""The parts of the fuzzer: it starts from commits that both sides apply, and it finds a core that is wrong."""

import re
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any, NoReturn

import pytest

from indexer.atproto.crypto import PublicKey
from indexer.atproto.limits import Limits
from indexer.errors import UpstreamError
from indexer.pds.native_reader import NativeReader, ProvenExport, ReadyChunk
from indexer.reasons import Rejection
from indexer.sync.events import CommitEvent
from indexer.sync.frames import decode_frame
from indexer.sync.policy import Policy
from indexer.sync.shard import Shard
from indexer.sync.verify import VerifiedCommit, verify_commit
from tests.fuzz.commit_parts import split
from tests.fuzz.comparison import CONTEXTS, Comparison, Core, DecodeCommit, DifferenceError, Verification
from tests.fuzz.export_comparison import VARIANTS, ExportComparison
from tests.fuzz.mutation import mutate_export, mutate_frame
from tests.fuzz.seeds import accounts, key_of, random_export, random_record, seeds
from tests.native_module import native_core

OWNERS = accounts()
SEEDS = seeds(OWNERS, Random(1), 60)


class Results:
    """A verification with these results."""

    def __init__(self, results: list[VerifiedCommit | None]) -> None:
        self._results = results

    def results(self) -> list[VerifiedCommit | None]:
        return self._results


class WrongCore:
    """Verifies with the Python code, and passes what it accepts through `distort`."""

    def __init__(self, distort: Callable[[VerifiedCommit], VerifiedCommit]) -> None:
        self._distort = distort

    def commit_decoder(self, _limits: Limits, _shard: Shard) -> DecodeCommit:
        return lambda _frame: None

    def begin_verification(self, commits: Sequence[tuple[CommitEvent, PublicKey]], policy: Policy) -> Verification:
        return Results([self._distort(verify_commit(event, key, policy.limits)) for event, key in commits])


def flip_a_bit(data: bytes) -> bytes:
    """Change one byte in the middle: a simple mutation without the fuzzer."""
    middle = len(data) // 2
    return data[:middle] + bytes(byte ^ 1 for byte in data[middle : middle + 1]) + data[middle + 1 :]


def compare(core: Core, frames: Sequence[bytes]) -> Comparison:
    comparison = Comparison(core, OWNERS)
    for frame in frames:
        comparison.compare(frame)
    return comparison


def test_seeds_are_commits_with_a_valid_signature() -> None:
    for owner, frame in SEEDS:
        event = decode_frame(frame, CONTEXTS[0].policy.limits)
        assert isinstance(event, CommitEvent)
        assert verify_commit(event, owner.key.public, CONTEXTS[0].policy.limits).flaw is None


def test_native_core_verifies_the_seeds_with_the_same_plans() -> None:
    counts = compare(native_core(1), [frame for _, frame in SEEDS]).counts
    assert counts.executions == len(SEEDS)
    assert counts.decoded == len(SEEDS)
    assert counts.accepted > len(SEEDS) // 2  # the others are beyond the small limits of one of the policies


@pytest.mark.parametrize(
    "distort",
    [
        lambda commit: commit._replace(head=commit.head._replace(data=commit.prev_data)),
        lambda commit: commit._replace(changes=commit.changes[1:]),
        lambda commit: commit._replace(changes=tuple(change._replace(new=None) for change in commit.changes)),
    ],
    ids=["other root", "without a change", "deletes instead of writes"],
)
def test_core_that_is_wrong_is_found(distort: Callable[[VerifiedCommit], VerifiedCommit]) -> None:
    with pytest.raises(DifferenceError):
        compare(WrongCore(distort), [frame for _, frame in SEEDS])


class DecliningCore(WrongCore):
    """Leaves all frames and commits to the Python code."""

    def __init__(self) -> None:
        super().__init__(lambda commit: commit)

    def begin_verification(self, commits: Sequence[tuple[CommitEvent, PublicKey]], _policy: Policy) -> Verification:
        return Results([None for _ in commits])


def test_core_that_is_not_used_is_named_by_the_counts() -> None:
    frames = [frame for _, frame in SEEDS]
    assert compare(DecliningCore(), frames).counts.unused == ["decoded", "accepted"]
    assert compare(native_core(1), frames).counts.unused == []


class WrongDecoder(DecliningCore):
    """Decodes with the Python code, and passes what it decodes through `distort`."""

    def __init__(self, distort: Callable[[CommitEvent], Any]) -> None:
        super().__init__()
        self._distort_event = distort

    def commit_decoder(self, limits: Limits, shard: Shard) -> DecodeCommit:
        def decode(frame: bytes) -> Any:
            event = decode_frame(frame, limits, shard.owns)
            return self._distort_event(event) if isinstance(event, CommitEvent) else None

        return decode


WRONG_EVENTS: dict[str, Callable[[CommitEvent], Any]] = {
    "number": lambda event: event._replace(seq=event.seq + 1),
    "float": lambda event: event._replace(seq=float(event.seq)),  # type: ignore[arg-type]
    "bytearray": lambda event: event._replace(blocks=bytearray(event.blocks)),  # type: ignore[arg-type]
    "tuple": tuple,
    "tuples in ops": lambda event: event._replace(ops=tuple(map(tuple, event.ops))),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("wrong", WRONG_EVENTS)
def test_decoder_that_is_wrong_is_found(wrong: str) -> None:
    frame = next(frame for _, frame in SEEDS if b"create" in frame)
    assert compare(WrongDecoder(lambda event: event), [frame]).counts.decoded == 1
    with pytest.raises(DifferenceError):
        compare(WrongDecoder(WRONG_EVENTS[wrong]), [frame])


def test_replaced_record_is_below_a_right_root_and_a_valid_signature() -> None:
    owner, frame = next(seed for seed in SEEDS if b"create" in seed.frame)
    parts = split(frame)
    assert parts is not None
    cid = next(op["cid"] for op in parts.ops() if op["cid"])
    record = random_record(Random(2))
    parts.replace(cid, record)
    parts.sign(key_of(parts.did, OWNERS))
    event = decode_frame(parts.frame(), CONTEXTS[0].policy.limits)
    assert isinstance(event, CommitEvent)
    verified = verify_commit(event, owner.key.public, CONTEXTS[0].policy.limits)
    assert record in {change.block for change in verified.changes}
    assert verified.flaw is None


def test_mutations_reach_both_valid_and_invalid_commits() -> None:
    random, valid, invalid = Random(3), 0, 0
    for number in range(400):
        frame = mutate_frame(SEEDS[number % len(SEEDS)].frame, random, flip_a_bit, OWNERS)
        event = decode_frame(frame, CONTEXTS[0].policy.limits)
        if isinstance(event, CommitEvent):
            try:
                flaw = verify_commit(event, key_of(event.did, OWNERS).public, CONTEXTS[0].policy.limits).flaw
            except UpstreamError:
                invalid += 1
            else:
                valid += flaw is None
    assert valid > 40
    assert invalid > 20


EXPORTS = [random_export(OWNERS[number % len(OWNERS)], Random(number)) for number in range(40)]
LARGE_EXPORT = next(data for data in EXPORTS if len(data) > 1_000 and len(data) % len(VARIANTS) == 0)
"""One with records, which is read with the default limits."""


def test_native_core_verifies_the_exports_to_start_from() -> None:
    comparison = ExportComparison(native_core(1), OWNERS)
    for data in EXPORTS:
        comparison.compare(data)
    counts = comparison.counts
    assert counts.executions == len(EXPORTS)
    assert counts.proven == counts.valid > len(EXPORTS) // 2  # the others are beyond the small limits
    assert counts.ready > 0


@pytest.mark.slow
def test_mutated_exports_are_valid_and_invalid_and_agree() -> None:
    comparison, random = ExportComparison(native_core(1), OWNERS), Random(4)
    for number in range(200):
        comparison.compare(mutate_export(EXPORTS[number % len(EXPORTS)], random, flip_a_bit, OWNERS))
    assert 20 < comparison.counts.valid < 180


def fail_verification() -> NoReturn:
    raise UpstreamError(Rejection.SIGNATURE_INVALID)


BUCKET_AND_CID = re.compile(rb"(\0\0\0\x02)..(\0\0\0\x24\x01\x71\x12\x20)", re.DOTALL)
"""These two columns of a row. The size of a field comes before it."""


def other_bucket(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the rows of records with another bucket."""
    for piece in pieces:
        yield BUCKET_AND_CID.sub(lambda found: found[1] + b"\xff\xff" + found[2], piece)


CHUNK_ROWS = ReadyChunk.record_rows
WRONG_READERS: dict[str, tuple[type, str, Any]] = {
    "verify": (NativeReader, "verify", lambda *_: fail_verification()),
    "size": (NativeReader, "size", 1),
    "block": (ProvenExport, "block_of", lambda *_: b""),
    "changes": (ReadyChunk, "changes", lambda _: []),
    "missing": (ReadyChunk, "missing", 1),
    "count": (ReadyChunk, "count", property(lambda _: 1, lambda *_: None)),
    "change_rows": (ReadyChunk, "change_rows", lambda *_: b""),
    "record_rows": (ReadyChunk, "record_rows", property(lambda chunk: other_bucket(CHUNK_ROWS.__get__(chunk)))),
}
"""The class, the attribute and the wrong value."""


@pytest.mark.parametrize("wrong", WRONG_READERS)
def test_reader_that_is_wrong_is_found(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    comparison = ExportComparison(native_core(1), OWNERS)
    comparison.compare(LARGE_EXPORT)
    assert comparison.counts.unused == []
    monkeypatch.setattr(*WRONG_READERS[wrong], raising=False)
    with pytest.raises(DifferenceError):
        comparison.compare(LARGE_EXPORT)


def test_exports_that_the_native_core_leaves_to_the_python_code_are_counted() -> None:
    comparison = ExportComparison(native_core(1), OWNERS)
    comparison.compare(b"no export")
    assert comparison.counts.unused == ["proven", "ready"]
