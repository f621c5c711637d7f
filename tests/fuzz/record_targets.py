"""Values of records, and proofs that a record exists."""

import json
from random import Random
from typing import Any

from indexer.atproto.car import split_car
from indexer.atproto.cbor import (
    CborError,
    Link,
    abridged,
    count_items,
    decode_canonical,
    decode_json,
)
from indexer.atproto.commit import decode_commit
from indexer.atproto.limits import DEFAULT_LIMITS
from indexer.errors import UnavailableError, UpstreamError
from indexer.sync.verify import verify_record
from tests.atproto.dag_cbor_oracle import Cid
from tests.atproto.dag_cbor_oracle import encode as reference_encode
from tests.fuzz.comparison import DifferenceError
from tests.fuzz.fuzz_target import FuzzTarget, MutateBytes, canonical, text_of
from tests.fuzz.mutation import mutate_export
from tests.fuzz.outcome_counts import OutcomeCounts
from tests.fuzz.seed_files import published_exports, seed_files, some_of
from tests.fuzz.seeds import LINK, accounts, random_export, random_path, random_record, random_value
from tests.fuzz.slice_reference import Slice, entries, hides, is_tree

SHOWN_ITEMS = 1_000


class DagCbor(FuzzTarget):
    """DAG-CBOR: exactly the canonical objects are accepted, with the same value."""

    def __init__(self) -> None:
        self.counts = OutcomeCounts("canonical", "not canonical", "as JSON")

    def seeds(self, random: Random, count: int) -> list[bytes]:
        """Return published objects, a half if there are so many, and random records."""
        files = seed_files("cbor/**/*.dag-cbor", "cbor/**/*.cbor", "indigo/repos/*.cbor")
        published = some_of(files, random, count // 2)
        return published + [random_record(random) for _ in range(count - len(published))]

    def mutate(self, data: bytes, random: Random, mutate_bytes: MutateBytes) -> bytes:
        """Return mutated bytes, or a map with another value in it."""
        value = canonical(data)
        if not isinstance(value, dict) or random.random() < 0.6:
            return mutate_bytes(data)
        other: Any = random.choice(
            (random_value(random, 2), Cid(LINK), -(2**64), 2**64 - 1, [[[]]], 1.5, {"$link": "x"})
        )
        return reference_encode(value | {random.choice([*value, "$bytes", "é"]): other})

    def compare(self, data: bytes) -> None:
        """Decode an object. Raises `DifferenceError`."""
        self.counts.executions += 1
        try:
            found = decode_canonical(data)
        except CborError as error:
            if canonical(data) is not None or data == b"\xf6" or "\n" in str(error):
                raise
            self.counts.add("not canonical")
            return
        expected = canonical(data)
        if repr(_with_links(expected)) != repr(found):  # equal values may have other types
            raise DifferenceError(f"reference: {expected}\nfound: {found}")
        if count_items(data, SHOWN_ITEMS, 200) != (min(_items(expected), SHOWN_ITEMS + 1), False):
            raise DifferenceError(f"{_items(expected)} items instead of {count_items(data, SHOWN_ITEMS, 200)}")
        json.dumps(abridged(found))
        self.counts.add("canonical")
        self.counts.add("as JSON", decode_json(data) is not None)


def _with_links(value: Any) -> Any:
    """Return a value of the reference with links as the product has them."""
    match value:
        case Cid():
            return Link(value.data)
        case dict():
            return {key: _with_links(inner) for key, inner in value.items()}
        case list():
            return list(map(_with_links, value))
        case _:
            return value


def _items(value: Any) -> int:
    """Return the number of items: containers, keys, values and tags."""
    match value:
        case Cid():
            return 2
        case dict():
            return 1 + len(value) + sum(map(_items, value.values()))
        case list():
            return 1 + sum(map(_items, value))
        case _:
            return 1


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
