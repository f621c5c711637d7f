"""CIDs as the protocol uses them: version 1, SHA-256, dag-cbor or raw; 36 binary bytes (spec §3.3)."""

import re
from base64 import b32decode, b32encode
from binascii import Error
from hashlib import sha256

DAG_CBOR = b"\x01\x71\x12\x20"
RAW = b"\x01\x55\x12\x20"
SIZE = 36
LINK_BYTES = 100  # data model guide

_TEXT_CHARACTERS = 59
_VARINT = rb"(?:[\x80-\xff]{0,8}[\x01-\x7f]|\x00)"  # in its shortest form
_LINK = re.compile(rb"\x01" + _VARINT + _VARINT + rb"([\x00-\x7f])")  # codec, hash function, digest size


def cid_of(block: bytes) -> bytes:
    """The CID of a DAG-CBOR block."""
    return DAG_CBOR + sha256(block).digest()


def is_cid(data: bytes) -> bool:
    """Whether these are the bytes of a CID of the protocol's kind."""
    return len(data) == SIZE and data.startswith((DAG_CBOR, RAW))


def link_size(data: bytes, at: int = 0) -> int | None:
    """How many bytes at `at` are a CID of version 1, whatever its codec and hash; None if none are."""
    found = _LINK.match(data, at)
    if found is None or len(data) - found.end() < found[1][0]:
        return None
    return found.end() + found[1][0] - at


def is_link(data: bytes) -> bool:
    """Whether these are the bytes of any CID of version 1: all that a link needs."""
    return len(data) <= LINK_BYTES and link_size(data) == len(data)


def cid_text(cid: bytes) -> str:
    """The string form: `b` and base32 in lower case without padding."""
    return "b" + b32encode(cid).decode().rstrip("=").lower()


def parse_cid(text: str) -> bytes:
    """The bytes of a CID's string form; raises ValueError for anything else than the protocol's form."""
    if len(text) != _TEXT_CHARACTERS or not text.startswith("b") or not text.islower():
        raise ValueError(f"not a CID: {text[:80]!r}")
    try:
        cid = b32decode(text[1:].upper() + "======")
    except (Error, ValueError):
        raise ValueError(f"not a CID: {text!r}") from None
    if not is_cid(cid) or cid_text(cid) != text:
        raise ValueError(f"not a CID of the protocol's kind: {text}")
    return cid
