"""Texts that name something: identifiers, AT-URIs and patterns of collections, each against an obvious reference."""

from random import Random

from indexer.atproto.syntax import (
    AtUri,
    CollectionFilter,
    is_did,
    is_handle,
    is_nsid,
    is_record_key,
    is_tid,
    normalize_account,
    normalize_nsid,
    split_path,
    tid_micros,
    tid_of,
)
from indexer.errors import UpstreamError
from indexer.sync.scope import covers
from tests.fuzz import syntax_reference as reference
from tests.fuzz.comparison import DifferenceError
from tests.fuzz.examples import DID, HANDLE, IDENTIFIERS, NSID, PATTERNS, TID
from tests.fuzz.fuzz_target import TextTarget, text_of
from tests.fuzz.outcome_counts import OutcomeCounts
from tests.fuzz.seed_files import published_lines, some_of


class Identifiers(TextTarget):
    """DIDs, handles, NSIDs, record keys, TIDs and paths: exactly those of the specification are accepted."""

    CHECKS = (
        ("DIDs", is_did, reference.is_did),
        ("handles", is_handle, reference.is_handle),
        ("NSIDs", is_nsid, reference.is_nsid),
        ("record keys", is_record_key, reference.is_record_key),
        ("TIDs", is_tid, reference.is_tid),
    )

    def __init__(self) -> None:
        self.counts = OutcomeCounts(*(name for name, _, _ in self.CHECKS), "paths", "none of these")

    def seeds(self, random: Random, count: int) -> list[bytes]:
        """Return published texts, a half if there are so many, and some of each kind."""
        made = some_of(published_lines("atproto-interop-tests/syntax/[adhnrt]*_syntax_*.txt"), random, count // 2)
        texts = [*IDENTIFIERS, f"{NSID}/{TID}"]
        return made + [texts[number % len(texts)].encode() for number in range(count - len(made))]

    def compare(self, data: bytes) -> None:
        """Check a text. Raises `DifferenceError`."""
        self.counts.executions += 1
        text = text_of(data)
        found = {name: check(text) for name, check, _ in self.CHECKS}
        expected = {name: check(text) for name, _, check in self.CHECKS}
        if found != expected:
            raise DifferenceError(f"reference: {expected}\nfound: {found}")
        for name, is_one in found.items():
            self.counts.add(name, is_one)
        if found["TIDs"]:
            low, high = (reference.TID_CHARACTERS.index(character) for character in (text[-1], text[-2]))
            if tid_of(tid_micros(text), (high * 32 + low) % 1_024) != text:
                raise DifferenceError(f"another TID than {text} for its own time")
        self._compare_account(text)
        self.counts.add("none of these", not (self._compare_path(text) or any(found.values())))

    def _compare_account(self, text: str) -> None:
        account = normalize_account(text)
        if account is not None and normalize_account(account) != account:
            raise DifferenceError(f"{account!r} is not normalized")

    def _compare_path(self, text: str) -> bool:
        """Return True if the text is the path of a record."""
        collection, _, rkey = text.partition("/")
        try:
            found = split_path(text)
        except UpstreamError:
            if reference.is_nsid(collection) and reference.is_record_key(rkey):
                raise
            return False
        if found != (collection, rkey) or not (reference.is_nsid(collection) and reference.is_record_key(rkey)):
            raise DifferenceError(f"the path of a record: {found}")
        self.counts.add("paths")
        return True


class AtUris(TextTarget):
    """AT-URIs: exactly those of the specification are accepted, and each one is the text of its parts."""

    def __init__(self) -> None:
        self.counts = OutcomeCounts("accounts", "collections", "records", "refused")

    def seeds(self, random: Random, count: int) -> list[bytes]:
        """Return published texts, a half if there are so many, and some with each number of parts."""
        made = some_of(published_lines("atproto-interop-tests/syntax/aturi_syntax_*.txt"), random, count // 2)
        texts = [
            f"at://{authority}{rest}"
            for authority in (DID, HANDLE, "ALICE.Test")
            for rest in ("", f"/{NSID}", f"/{NSID}/{TID}", "/COM.Example.Name/self", "/", f"/{NSID}?a#b")
        ]
        return made + [texts[number % len(texts)].encode() for number in range(count - len(made))]

    def compare(self, data: bytes) -> None:
        """Parse a text. Raises `DifferenceError`."""
        self.counts.executions += 1
        text = text_of(data)
        expected = reference.at_uri_parts(text)
        try:
            uri = AtUri.parse(text)
        except ValueError:
            if expected is not None:
                raise
            self.counts.add("refused")
            return
        parts = [part for part in (uri.authority, uri.collection, uri.rkey) if part is not None]
        if parts != expected or str(uri) != text:
            raise DifferenceError(f"reference: {expected}\nfound: {uri!r}")
        normalized = uri.normalized()
        if AtUri.parse(str(normalized)) != normalized or normalized.normalized() != normalized:
            raise DifferenceError(f"{normalized!r} is not normalized")
        self.counts.add(("accounts", "collections", "records")[len(parts) - 1])


class Patterns(TextTarget):
    """Patterns of collections in the first line, and NSIDs in the others: the filter selects what a pattern selects."""

    def __init__(self) -> None:
        self.counts = OutcomeCounts("refused", "selected", "not selected")

    def seeds(self, random: Random, count: int) -> list[bytes]:
        """Return one to three patterns, before NSIDs and other texts."""
        firsts = [",".join(random.sample(PATTERNS, random.randrange(1, 4))) for _ in range(count)]
        return ["\n".join((first, *random.sample(IDENTIFIERS, 3), NSID)).encode() for first in firsts]

    def compare(self, data: bytes) -> None:
        """Parse the patterns, and match the NSIDs. Raises `DifferenceError`."""
        self.counts.executions += 1
        first, *others = text_of(data).split("\n")
        patterns = first.split(",")
        valid = all(map(reference.is_pattern, patterns))
        try:
            selected = CollectionFilter(patterns)
        except ValueError:
            if valid:
                raise
            self.counts.add("refused")
            return
        if not valid or str(selected) != first or selected.matches_all != ("*" in patterns):
            raise DifferenceError(f"the filter {selected} from {first!r}")
        for nsid in filter(reference.is_nsid, others):
            by = {pattern: reference.matches(pattern, nsid) for pattern in patterns}
            if selected.matches(nsid) != any(by.values()) or normalize_nsid(nsid) != normalize_nsid(
                normalize_nsid(nsid)
            ):
                raise DifferenceError(f"{selected} selects {nsid}: {selected.matches(nsid)}")
            if any(by[inner] and not by[outer] and covers(outer, inner) for outer in patterns[:10] for inner in by):
                raise DifferenceError(f"a pattern in {patterns} does not cover another one, which selects {nsid}")
            self.counts.add("selected" if any(by.values()) else "not selected")
