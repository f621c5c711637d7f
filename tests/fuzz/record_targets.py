"""Values of records and what they contain: DAG-CBOR, CIDs and links, and proofs that a record exists."""

import json
from base64 import b32decode, b32encode
from collections.abc import Iterator
from random import Random
from typing import Any

import orjson
from multiformats import CID

from indexer.atproto.car import split_car
from indexer.atproto.cbor import (
    CborError,
    Link,
    abridged,
    count_items,
    decode_canonical,
    decode_json,
    encode,
)
from indexer.atproto.cid import MAX_LINK_BYTES, cid_text, is_link, link_size, parse_cid
from indexer.atproto.commit import decode_commit
from indexer.atproto.limits import DEFAULT_LIMITS
from indexer.atproto.links import (
    BYTES_OF_LINK,
    MAX_LINKS,
    MAX_PATH_BYTES,
    MAX_TARGET_CHARACTERS,
    MIN_LINKS,
    RecordLink,
    links_of,
)
from indexer.atproto.record import decode_record
from indexer.errors import UnavailableError, UpstreamError
from indexer.sync.verify import verify_record
from tests.atproto.dag_cbor_oracle import Cid
from tests.atproto.dag_cbor_oracle import encode as reference_encode
from tests.fuzz import syntax_reference as reference
from tests.fuzz.comparison import DifferenceError
from tests.fuzz.examples import DID, HANDLE, NSID
from tests.fuzz.fuzz_target import FuzzTarget, MutateBytes, canonical, text_of
from tests.fuzz.json_mutation import mutate_json
from tests.fuzz.mutation import mutate_export
from tests.fuzz.outcome_counts import OutcomeCounts
from tests.fuzz.seed_files import published_exports, published_lines, seed_files, some_of
from tests.fuzz.seeds import LINK, accounts, random_export, random_path, random_record, random_value
from tests.fuzz.slice_reference import Slice, entries, hides, is_tree

COLLECTION = "com.example.record"
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


class Cids(FuzzTarget):
    """CIDs as text and as bytes: the text has one form, and links are those that the reference decodes."""

    def __init__(self) -> None:
        self.counts = OutcomeCounts("texts", "links", "neither")

    def seeds(self, random: Random, count: int) -> list[bytes]:
        """Return published texts, a half if there are so many, and CIDs in both forms."""
        made = some_of(published_lines("atproto-interop-tests/syntax/cid_syntax_*.txt"), random, count // 2)
        links = (LINK, b"\x01\x55\x12\x20" + bytes(32), b"\x01\x71\x00\x00", b"\x01\xa9\x02\x13\x40" + bytes(64))
        forms = [form for link in links for form in (link, cid_text(link).encode())]
        return made + [forms[number % len(forms)] for number in range(count - len(made))]

    def mutate(self, data: bytes, random: Random, mutate_bytes: MutateBytes) -> bytes:
        """Return mutated bytes, or the text of mutated bytes of a CID."""
        try:
            cid = b32decode(data[1:].upper() + b"=" * (-len(data[1:]) % 8))
        except ValueError:
            return mutate_bytes(data)
        if random.random() < 0.5:
            return mutate_bytes(data)
        return b"b" + b32encode(mutate_bytes(cid)).rstrip(b"=").lower()

    def compare(self, data: bytes) -> None:
        """Read a text and bytes. Raises `DifferenceError`."""
        self.counts.executions += 1
        link, size = is_link(data), link_size(data)
        if link != isinstance(canonical(reference_encode(Cid(data))), Cid):
            raise DifferenceError(f"a link: {link}")
        if link and size != len(data):
            raise DifferenceError(f"{size} instead of {len(data)} bytes")
        if size is not None and size <= MAX_LINK_BYTES and not is_link(data[:size]):
            raise DifferenceError(f"the first {size} bytes are no link")
        text = text_of(data)
        try:
            cid = parse_cid(text)
        except ValueError:
            self.counts.add("links" if link else "neither")
            return
        if cid_text(cid) != text or bytes(CID.decode(text)) != cid:
            raise DifferenceError(f"{text} is read as {cid.hex()}")
        self.counts.add("texts")


class Links(FuzzTarget):
    """Links in the value of a record: those of a slow search, in any order of members."""

    def __init__(self) -> None:
        self.counts = OutcomeCounts("DIDs", "AT-URIs", "strong references", "more than the limit", "none", "no record")

    def seeds(self, _: Random, count: int) -> list[bytes]:
        """Return values with links at all kinds of places, one with too many links, and published lexicon data."""
        uri = f"at://{DID}/{NSID}/3l"
        strong = {"uri": uri, "cid": cid_text(LINK)}
        values: list[Any] = [
            {"subject": strong, "did": DID},
            {"facets": [{"features": [{"$type": "a.b.c#d", "did": DID}]}, [f"at://{HANDLE}", [DID]]]},
            {"embed": [strong, {"uri": uri}, {"uri": uri, "cid": 1}, {"cid": "", "uri": "at://a"}]},
            {f"{number}": DID for number in range(MAX_LINKS + 20)},
            {"é" * 120: {"long": DID}, "uri": "at://a.b/" + "x" * 900, "text": f"see {uri}"},
            [DID, {"$type": 3, "uri": uri}],
            {"text": "hello"},
        ]
        for text in seed_files("atproto-interop-tests/lexicon/record-data-*.json"):
            values += [case["data"] for case in json.loads(text)]
        return [json.dumps(values[number % len(values)]).encode() for number in range(count)]

    def mutate(self, data: bytes, random: Random, mutate_bytes: MutateBytes) -> bytes:
        """Return mutated JSON."""
        return mutate_json(data, random, mutate_bytes)

    def compare(self, data: bytes) -> None:
        """Find the links of a record, as it would be stored. Raises `DifferenceError`."""
        self.counts.executions += 1
        text = _stored(data)
        if text is None:
            self.counts.add("no record")
            return
        value, found = json.loads(text), links_of(text)
        expected = sorted(_links("", value), key=lambda link: (link[:2], link.kind == "strong-ref"))
        by_place = {link[:2]: link for link in expected}  # a strong reference counts more
        limit = min(MAX_LINKS, MIN_LINKS + len(orjson.dumps(value)) // BYTES_OF_LINK)
        if found != tuple(list(by_place.values())[:limit]):
            raise DifferenceError(f"reference: {by_place}\nfound: {found}")
        if links_of(orjson.dumps(_reversed(value)).decode()) != found:
            raise DifferenceError(f"other links in another order: {found}")
        kinds = {"did": "DIDs", "at-uri": "AT-URIs", "strong-ref": "strong references"}
        for link in found:
            self.counts.add(kinds[link.kind])
        self.counts.add("none", not found)
        self.counts.add("more than the limit", len(by_place) > limit)


def _stored(data: bytes) -> str | None:
    """Return the JSON that is stored for a record with this value; None if there is none."""
    try:
        block = encode(json.loads(data))
    except (TypeError, ValueError, RecursionError, OverflowError):  # a value that no record can have
        return None
    return decode_record(block, COLLECTION, DEFAULT_LIMITS).json


def _links(path: str, value: Any, strong: bool = False) -> Iterator[RecordLink]:
    """Yield the links of a value, with repetitions."""
    match value:
        case dict():
            for key, inner in value.items():
                yield from _links(f"{path}.{key}", inner, key == "uri" and isinstance(value.get("cid"), str))
        case list():
            for inner in value:
                name = inner.get("$type") if isinstance(inner, dict) else None
                yield from _links(f"{path}[{name if isinstance(name, str) else ''}]", inner)
        case str() if len(path.encode()) <= MAX_PATH_BYTES and len(value) <= MAX_TARGET_CHARACTERS:
            if reference.is_did(value):
                yield RecordLink(path, value, "did")
            elif reference.at_uri_parts(value):
                yield RecordLink(path, value, "strong-ref" if strong else "at-uri")


def _reversed(value: Any) -> Any:
    """Return the value with the members of all objects in the opposite order."""
    match value:
        case dict():
            return {key: _reversed(value[key]) for key in reversed(value)}
        case list():
            return list(map(_reversed, value))
        case _:
            return value


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
