"""Syntax of identifiers: DID, handle, NSID, record key, TID, AT-URI and path (docs/protocol.md#limits)."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Self

from indexer.errors import UpstreamError
from indexer.reasons import Rejection

MAX_DID_CHARACTERS = 2_048
MAX_HANDLE_CHARACTERS = 253
MAX_NSID_CHARACTERS = 317
MAX_RECORD_KEY_CHARACTERS = 512
MAX_URI_CHARACTERS = 8_192
_MAX_URI_PARTS = 3

_RESERVED_TLDS = frozenset({"alt", "arpa", "example", "internal", "invalid", "local", "localhost", "onion"})

_TID_ALPHABET = "234567abcdefghijklmnopqrstuvwxyz"
_TID_VALUES = {character: value for value, character in enumerate(_TID_ALPHABET)}
_TID_CHARACTERS = 13
_CLOCK_ID_BITS = 10  # the lowest ones; the others are microseconds since the Unix epoch
MAX_CLOCK_ID = (1 << _CLOCK_ID_BITS) - 1
MAX_TID_MICROS = (1 << 54) - 1


def _matcher(pattern: str, max_characters: int) -> Callable[[str], bool]:
    """Return a function that returns True for a text of at most this length if all of it matches."""
    match = re.compile(pattern).fullmatch  # `$` would accept a newline at the end
    return lambda text: len(text) <= max_characters and match(text) is not None


_LABEL = "[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_LABEL_FROM_LETTER = "[a-zA-Z]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"

is_did = _matcher(r"did:[a-z]+:[a-zA-Z0-9._:%-]*[a-zA-Z0-9._-]", MAX_DID_CHARACTERS)
"""Returns True for a DID of any method. The rules of the method are not checked."""
is_account_did = _matcher(r"did:(plc:[a-z2-7]{24}|web:[a-zA-Z0-9.-]+(%3[Aa][0-9]{1,5})?)", MAX_DID_CHARACTERS)
"""Returns True for a DID that an account can have: a did:plc, or a did:web of a host without a path.

Specification: https://atproto.com/specs/did, "Blessed DID Methods".
"""
is_handle = _matcher(rf"({_LABEL}\.)+{_LABEL_FROM_LETTER}", MAX_HANDLE_CHARACTERS)
is_record_key = _matcher(r"(?!\.{1,2}\Z)[a-zA-Z0-9_~.:-]+", MAX_RECORD_KEY_CHARACTERS)
is_tid = _matcher("[2-7a-j][2-7a-z]{12}", _TID_CHARACTERS)
# The results are cached, because each record is checked, and there are only a few hundred collections.
_is_nsid = lru_cache(maxsize=4_096)(
    _matcher(rf"{_LABEL_FROM_LETTER}(\.{_LABEL})+\.[a-zA-Z][a-zA-Z0-9]{{0,62}}", MAX_NSID_CHARACTERS)
)


def is_nsid(text: str) -> bool:
    """Return True if the text is an NSID."""
    return len(text) <= MAX_NSID_CHARACTERS and _is_nsid(text)


def normalize_account(text: str) -> str | None:
    """Return a DID as it is, or a handle in lower case and without a leading @; None for anything else."""
    handle = text.removeprefix("@").lower()
    if is_did(text):
        return text
    return handle if is_handle(handle) else None


def is_resolvable(host: str, *, local: bool) -> bool:
    """Return True if a handle or the host of a did:web may be looked up (docs/protocol.md#handles).

    Names under `.test` may be looked up only in a local network (`local`).
    """
    tld = host.rpartition(".")[2].lower()
    return tld not in _RESERVED_TLDS and (local or tld != "test")


def normalize_nsid(nsid: str) -> str:
    """Return the NSID with its authority in lower case. The name, its last segment, is case-sensitive."""
    authority, _, name = nsid.rpartition(".")
    return f"{authority.lower()}.{name}"


def split_path(path: str) -> tuple[str, str]:
    """Return the collection and the record key of a path.

    The collection is not normalized, because paths are compared byte by byte (docs/protocol.md#merkle-search-tree).

    Raises:
        UpstreamError: With FIELD_INVALID, if this is not a valid path.
    """
    collection, slash, rkey = path.partition("/")
    if not (slash and is_nsid(collection) and is_record_key(rkey)):
        raise UpstreamError(Rejection.FIELD_INVALID, f"not the path of a record: {path[:100]!r}")
    return collection, rkey


def tid_micros(tid: str) -> int:
    """Return the microseconds since the Unix epoch in a valid TID."""
    value = 0
    for character in tid:
        value = value << 5 | _TID_VALUES[character]  # 32 characters: 5 bits each
    return value >> _CLOCK_ID_BITS


def tid_of(micros: int, clock_id: int = 0) -> str:
    """Return the TID of a time in microseconds since the Unix epoch, and a clock identifier of 10 bits."""
    value = micros << _CLOCK_ID_BITS | clock_id
    characters = []
    for _ in range(_TID_CHARACTERS):
        value, index = divmod(value, len(_TID_ALPHABET))
        characters.append(_TID_ALPHABET[index])
    return "".join(reversed(characters))


@dataclass(frozen=True, slots=True)
class AtUri:
    """An AT-URI: `at://authority[/collection[/rkey]]`, without query and fragment."""

    authority: str  # a DID or a handle
    collection: str | None = None
    rkey: str | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the parts of an AT-URI.

        Raises:
            ValueError: The text is not an AT-URI; the message says why.
        """
        parts = text.removeprefix("at://").split("/")
        if not text.startswith("at://") or len(parts) > _MAX_URI_PARTS or len(text) > MAX_URI_CHARACTERS:
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
        """Return the AT-URI with the case-insensitive parts in lower case: a handle, and the authority of the NSID."""
        return type(self)(
            self.authority if self.authority.startswith("did:") else self.authority.lower(),
            normalize_nsid(self.collection) if self.collection else None,
            self.rkey,
        )

    def __str__(self) -> str:
        return "at://" + "/".join(part for part in (self.authority, self.collection, self.rkey) if part)


class CollectionFilter:
    """Selects collections by patterns: an NSID, `prefix.*` on whole segments, or `*` for all.

    Attributes:
        excluded: Collections that are not selected, although a pattern may match them.
    """

    __slots__ = ("_exact", "_prefixes", "excluded", "patterns")

    def __init__(self, patterns: Iterable[str] = ("*",), excluded: Iterable[str] = ()) -> None:
        """Parse the patterns.

        Raises:
            ValueError: A pattern is invalid, or there is none; the message names it.
        """
        self.patterns = tuple(patterns)
        self.excluded = frozenset(excluded)
        exact, prefixes = set(), []
        for pattern in self.patterns:
            if pattern == "*":
                prefixes.append("")
            elif pattern.endswith(".*") and _is_prefix(pattern[:-2]):
                prefixes.append(pattern[:-1])
            elif is_nsid(pattern):
                exact.add(pattern)
            else:
                raise ValueError(f"{pattern!r} is neither an NSID, nor the beginning of one with '.*', nor '*'")
        if not self.patterns:
            raise ValueError("no collection is named; use '*' for all collections")
        self._exact = frozenset(exact)
        self._prefixes = tuple(prefixes)

    @property
    def matches_all(self) -> bool:
        """True if every collection that is not excluded is selected."""
        return "" in self._prefixes

    @property
    def with_excluded(self) -> list[str]:
        """The patterns, and the excluded collections after `!`, as the native core takes them."""
        return [*self.patterns, *(f"!{nsid}" for nsid in sorted(self.excluded))]

    def matches(self, nsid: str) -> bool:
        """Return True if one of the patterns matches the NSID, and it is not excluded."""
        return (nsid in self._exact or nsid.startswith(self._prefixes)) and nsid not in self.excluded

    def __str__(self) -> str:
        return ",".join(self.patterns)


def _is_prefix(text: str) -> bool:
    """Return True if the text becomes an NSID when segments are appended."""
    return is_nsid(f"{text}.a.a") or is_nsid(f"{text}.a")
