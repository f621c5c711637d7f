"""The syntax of identifiers: DID, handle, NSID, record key, TID, AT-URI, repo path (spec §3.9, §5.6, §6.6)."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Self

from indexer.errors import UpstreamError
from indexer.reasons import Rejection

DID_CHARACTERS = 2_048
HANDLE_CHARACTERS = 253
NSID_CHARACTERS = 317
URI_CHARACTERS = 8_192
_URI_PARTS = 3

_RESERVED_TLDS = frozenset({"alt", "arpa", "example", "internal", "invalid", "local", "localhost", "onion"})

TID_ALPHABET = "234567abcdefghijklmnopqrstuvwxyz"
_TID_VALUES = {letter: value for value, letter in enumerate(TID_ALPHABET)}
_CLOCK_BITS = 10

# fullmatch everywhere: `$` would accept a newline behind the end
_DID = re.compile(r"did:[a-z]+:[a-zA-Z0-9._:%-]*[a-zA-Z0-9._-]").fullmatch
_HANDLE = re.compile(
    r"([a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?\.)+[a-zA-Z]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
).fullmatch
_NSID = re.compile(
    r"[a-zA-Z]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?(\.[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?)+"
    r"\.[a-zA-Z][a-zA-Z0-9]{0,62}"
).fullmatch
_RECORD_KEY = re.compile(r"[a-zA-Z0-9_~.:-]{1,512}").fullmatch
_TID = re.compile(r"[234567abcdefghij][234567abcdefghijklmnopqrstuvwxyz]{12}").fullmatch


def is_did(text: str) -> bool:
    """A DID of any method, whether or not that method would give out such a one."""
    return len(text) <= DID_CHARACTERS and _DID(text) is not None


def is_handle(text: str) -> bool:
    return len(text) <= HANDLE_CHARACTERS and _HANDLE(text) is not None


def is_resolvable(host: str, *, local: bool) -> bool:
    """Whether a handle or a did:web's host may be asked for at all (spec §5.6); `.test` only on a local network."""
    tld = host.rpartition(".")[2].lower()
    return tld not in _RESERVED_TLDS and (local or tld != "test")


def is_nsid(text: str) -> bool:
    return len(text) <= NSID_CHARACTERS and _is_nsid(text)


@lru_cache(maxsize=4_096)  # asked for each record, of a few hundred collections
def _is_nsid(text: str) -> bool:
    return _NSID(text) is not None


def is_record_key(text: str) -> bool:
    return _RECORD_KEY(text) is not None and text not in {".", ".."}


def is_tid(text: str) -> bool:
    return _TID(text) is not None


def normalize_nsid(nsid: str) -> str:
    """The authority in lower case; the name as it is, since its case matters."""
    authority, _, name = nsid.rpartition(".")
    return f"{authority.lower()}.{name}"


def split_path(path: str) -> tuple[str, str]:
    """A repo path, `collection/rkey`; raises `UpstreamError`.

    Hosts let collections through whose authority isn't in lower case, and so do we: the path is a key, byte for byte.
    """
    collection, slash, rkey = path.partition("/")
    if not (slash and is_nsid(collection) and is_record_key(rkey)):
        raise UpstreamError(Rejection.FIELD_INVALID, f"not a record's path: {path[:100]!r}")
    return collection, rkey


def tid_micros(tid: str) -> int:
    """Microseconds since the Unix epoch of a valid TID."""
    value = 0
    for letter in tid:
        value = value << 5 | _TID_VALUES[letter]
    return value >> _CLOCK_BITS


def tid_of(micros: int, clock: int = 0) -> str:
    """The TID of a time in microseconds and a clock identifier of ten bits."""
    value = micros << _CLOCK_BITS | clock
    return "".join(TID_ALPHABET[value >> shift & 31] for shift in range(60, -1, -5))


@dataclass(frozen=True, slots=True)
class AtUri:
    """`at://authority[/collection[/rkey]]`, without query and fragment. The authority is a DID or a handle."""

    authority: str
    collection: str | None = None
    rkey: str | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises ValueError with a sentence that says what is wrong."""
        parts = text.removeprefix("at://").split("/")
        if not text.startswith("at://") or len(parts) > _URI_PARTS or len(text) > URI_CHARACTERS:
            raise ValueError(f"not at://DID-or-handle[/collection[/rkey]]: {text[:80]!r}")
        uri = cls(*parts)
        if not (is_did(uri.authority) or is_handle(uri.authority)):
            raise ValueError(f"neither a DID nor a handle: {uri.authority[:80]!r}")
        if uri.collection is not None and not is_nsid(uri.collection):
            raise ValueError(f"not an NSID: {uri.collection[:80]!r}")
        if uri.rkey is not None and not is_record_key(uri.rkey):
            raise ValueError(f"not a record key: {uri.rkey[:80]!r}")
        return uri

    def normalized(self) -> Self:
        """A handle and the NSID's authority in lower case; DIDs, names and record keys as they are."""
        return type(self)(
            self.authority if self.authority.startswith("did:") else self.authority.lower(),
            normalize_nsid(self.collection) if self.collection else None,
            self.rkey,
        )

    def __str__(self) -> str:
        return "at://" + "/".join(part for part in (self.authority, self.collection, self.rkey) if part)


class CollectionFilter:
    """Which collections are stored: NSIDs, `prefix.*` on whole segments, or `*` for all."""

    __slots__ = ("_exact", "_prefixes", "patterns")

    def __init__(self, patterns: Iterable[str] = ("*",)) -> None:
        """Raises ValueError with a sentence that names the pattern."""
        self.patterns = tuple(patterns)
        exact, prefixes = set(), []
        for pattern in self.patterns:
            if pattern == "*":
                prefixes.append("")
            elif pattern.endswith(".*") and _is_prefix(pattern[:-2]):
                prefixes.append(pattern[:-1])
            elif is_nsid(pattern):
                exact.add(pattern)
            else:
                raise ValueError(f"{pattern!r} is neither an NSID, nor one's beginning and '.*', nor '*'")
        if not self.patterns:
            raise ValueError("no collection is named; '*' stands for all")
        self._exact = frozenset(exact)
        self._prefixes = tuple(prefixes)

    def matches(self, nsid: str) -> bool:
        return nsid in self._exact or nsid.startswith(self._prefixes)

    def __str__(self) -> str:
        return ",".join(self.patterns)


def _is_prefix(text: str) -> bool:
    """Whether more segments make an NSID of it."""
    return is_nsid(f"{text}.a.a") or is_nsid(f"{text}.a")
