"""The syntax of identifiers in its most obvious form: by splitting, and without regular expressions."""

from string import ascii_letters, ascii_lowercase, digits

LETTERS, ALPHANUMERIC = frozenset(ascii_letters), frozenset(ascii_letters + digits)
TID_CHARACTERS = "234567abcdefghijklmnopqrstuvwxyz"


def is_did(text: str) -> bool:
    """Return True if the text is a DID."""
    parts = text.split(":", 2)
    if len(text) > 2_048 or len(parts) != 3 or parts[0] != "did" or not parts[1] or not parts[2]:
        return False
    return (
        set(parts[1]) <= set(ascii_lowercase) and set(parts[2]) <= ALPHANUMERIC | set("._:%-") and text[-1] not in ":%"
    )


def is_handle(text: str) -> bool:
    """Return True if the text is a handle."""
    labels = text.split(".")
    return len(text) <= 253 and len(labels) > 1 and all(map(_is_label, labels)) and labels[-1][0] in LETTERS


def is_nsid(text: str) -> bool:
    """Return True if the text is an NSID."""
    *authority, name = text.split(".")
    if len(text) > 317 or len(authority) < 2 or not all(map(_is_label, authority)) or authority[0][0] not in LETTERS:
        return False
    return 0 < len(name) <= 63 and set(name) <= ALPHANUMERIC and name[0] in LETTERS


def is_record_key(text: str) -> bool:
    """Return True if the text is a record key."""
    return 0 < len(text) <= 512 and set(text) <= ALPHANUMERIC | set("_~.:-") and text not in (".", "..")


def is_tid(text: str) -> bool:
    """Return True if the text is a TID."""
    return len(text) == 13 and set(text) <= set(TID_CHARACTERS) and text[0] in TID_CHARACTERS[:16]


def is_pattern(text: str) -> bool:
    """Return True if the text selects collections: an NSID, the first segments of one before `.*`, or `*`."""
    first = text.removesuffix(".*")
    return text == "*" or is_nsid(text) or (first != text and (is_nsid(f"{first}.a") or is_nsid(f"{first}.a.a")))


def matches(pattern: str, nsid: str) -> bool:
    """Return True if a valid pattern selects the collection."""
    return pattern in ("*", nsid) or (pattern.endswith(".*") and nsid.startswith(pattern[:-1]))


def at_uri_parts(text: str) -> list[str] | None:
    """Return the authority, the collection and the record key of an AT-URI, as many as it has; None for other text."""
    scheme, _, rest = text.partition("//")
    parts = rest.split("/")
    checks = (_is_account, is_nsid, is_record_key)
    if scheme != "at:" or len(text) > 8_192 or len(parts) > len(checks):
        return None
    return parts if all(check(part) for check, part in zip(checks, parts, strict=False)) else None


def _is_account(text: str) -> bool:
    return is_did(text) or is_handle(text)


def _is_label(text: str) -> bool:
    return 0 < len(text) <= 63 and set(text) <= ALPHANUMERIC | {"-"} and text[0] != "-" and text[-1] != "-"
