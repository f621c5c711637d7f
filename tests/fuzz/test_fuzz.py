"""The parts of the fuzzer: it starts from commits that both sides apply, and it finds a core that is wrong."""

from collections.abc import Callable, Sequence
from random import Random
from typing import NoReturn

import pytest

from indexer.atproto.crypto import PublicKey
from indexer.atproto.limits import Limits
from indexer.errors import UpstreamError
from indexer.pds.native_reader import NativeReader, ProvenExport
from indexer.reasons import Rejection
from indexer.sync.events import CommitEvent, OtherShardEvent
from indexer.sync.frames import decode_frame
from indexer.sync.policy import Policy
from indexer.sync.shard import Shard
from indexer.sync.verify import VerifiedCommit, verify_commit
from tests.fuzz.commit_parts import split
from tests.fuzz.comparison import CONTEXTS, Comparison, Core, DecodeCommit, DifferenceError
from tests.fuzz.export_comparison import VARIANTS, ExportComparison
from tests.fuzz.mutation import mutate_export, mutate_frame
from tests.fuzz.seeds import accounts, key_of, random_export, random_record, seeds
from tests.native_module import native_core

OWNERS = accounts()
SEEDS = seeds(OWNERS, Random(1), 60)


class WrongCore:
    """Verifies with the Python code, and passes what it accepts through `distort`."""

    def __init__(self, distort: Callable[[VerifiedCommit], VerifiedCommit]) -> None:
        self._distort = distort

    def commit_decoder(self, _limits: Limits, _shard: Shard) -> DecodeCommit:
        return lambda _frame: None

    def verify_commits(
        self, commits: Sequence[tuple[CommitEvent, PublicKey]], policy: Policy
    ) -> list[VerifiedCommit | None]:
        return [self._distort(verify_commit(event, key, policy.limits)) for event, key in commits]


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


class WrongDecoder(WrongCore):
    """Decodes with the Python code, and returns another sequence number."""

    def __init__(self) -> None:
        super().__init__(lambda commit: commit)

    def commit_decoder(self, limits: Limits, shard: Shard) -> DecodeCommit:
        def decode(frame: bytes) -> CommitEvent | OtherShardEvent | None:
            event = decode_frame(frame, limits, shard.owns)
            assert isinstance(event, CommitEvent | OtherShardEvent)
            return event._replace(seq=event.seq + 1)

        return decode


def test_decoder_that_is_wrong_is_found() -> None:
    with pytest.raises(DifferenceError):
        compare(WrongDecoder(), [SEEDS[0].frame])


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


def test_mutated_exports_are_valid_and_invalid_and_agree() -> None:
    comparison, random = ExportComparison(native_core(1), OWNERS), Random(4)
    for number in range(400):
        comparison.compare(mutate_export(EXPORTS[number % len(EXPORTS)], random, flip_a_bit, OWNERS))
    assert 40 < comparison.counts.valid < 360


@pytest.mark.parametrize("wrong", ["block", "verify", "size"])
def test_reader_that_is_wrong_is_found(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    comparison = ExportComparison(native_core(1), OWNERS)
    if wrong == "verify":
        monkeypatch.setattr(NativeReader, "verify", lambda *_: fail_verification())
    elif wrong == "size":
        monkeypatch.setattr(NativeReader, "size", 1)
    else:
        monkeypatch.setattr(ProvenExport, "block_of", lambda *_: b"")
    with pytest.raises(DifferenceError):
        comparison.compare(LARGE_EXPORT)


def fail_verification() -> NoReturn:
    raise UpstreamError(Rejection.SIGNATURE_INVALID)
