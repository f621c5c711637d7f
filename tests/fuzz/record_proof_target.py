"""Proofs that a record exists, against an obvious reader of the tree."""

from random import Random

from indexer.atproto.car import split_car
from indexer.atproto.commit import decode_commit
from indexer.atproto.limits import DEFAULT_LIMITS
from indexer.errors import UnavailableError, UpstreamError
from indexer.sync.verify import verify_record
from tests.fuzz.comparison import DifferenceError
from tests.fuzz.fuzz_target import FuzzTarget, MutateBytes, text_of
from tests.fuzz.mutation import mutate_export
from tests.fuzz.outcome_counts import OutcomeCounts
from tests.fuzz.seed_files import published_exports
from tests.fuzz.seeds import accounts, random_export, random_path
from tests.fuzz.slice_reference import Slice, entries, hides, is_tree


class RecordProofs(FuzzTarget):
    """A path in the first line, and a CAR file after it: the record is the one that the tree of the commit shows."""

    def __init__(self) -> None:
        self._owners = accounts()
        self.counts = OutcomeCounts("records", "absent", "incomplete", "refused")

    def seeds(self, random: Random, count: int) -> list[bytes]:
        """Return proofs of records that exist and that do not; some are whole exports, or of another record."""
        made = [b"app.bsky.feed.post/self\n" + car for car in published_exports(self._owners)][: count // 10]
        while len(made) < count:
            owner = random.choice(self._owners)
            export = random_export(owner, random)
            path, other = random.choices([*owner.repo.records, random_path(random)], k=2)
            proofs = (export, owner.repo.record_proof(path), owner.repo.record_proof(other))
            made.append(path.encode() + b"\n" + random.choices(proofs, (2, 7, 1))[0])
        return made

    def mutate(self, data: bytes, random: Random, mutate_bytes: MutateBytes) -> bytes:
        """Return another path, or a mutated CAR file."""
        path, _, car = data.partition(b"\n")
        if random.random() < 0.1:
            return random_path(random).encode() + b"\n" + car
        return path + b"\n" + mutate_export(car, random, mutate_bytes, self._owners)

    def compare(self, data: bytes) -> None:
        """Verify a proof. Raises `DifferenceError`."""
        self.counts.executions += 1
        path, _, car = data.partition(b"\n")
        owner = next((owner for owner in self._owners if owner.did.encode() in car), self._owners[0])
        try:
            found = verify_record(owner.did, text_of(path), car, owner.key.public, DEFAULT_LIMITS)
        except UpstreamError:
            self.counts.add("refused")
            return
        except UnavailableError:
            found, outcome = None, "incomplete"
        else:
            outcome = "absent" if found is None else "records"
        roots, blocks = split_car(car, DEFAULT_LIMITS, max_bytes=len(car))
        root = decode_commit(blocks[roots[0]], roots[0]).data
        if is_tree(blocks, root) and (outcome, found) != (expected := _shown(blocks, root, text_of(path).encode())):
            raise DifferenceError(f"reference: {expected!r}\nfound: {(outcome, found)!r}")
        self.counts.add(outcome)


def _shown(blocks: Slice, root: bytes, key: bytes) -> tuple[str, bytes | None]:
    """Return what a slice of a valid tree proves of a record, and its block."""
    cid = dict(entries(blocks, root)).get(key)
    if hides(blocks, root, key) or (cid is not None and cid not in blocks):
        return "incomplete", None
    return ("absent", None) if cid is None else ("records", blocks[cid])
