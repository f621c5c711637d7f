"""CIDs as the protocol uses them: version 1, SHA-256, dag-cbor or raw; 36 binary bytes (spec §3.3)."""

from base64 import b32decode, b32encode
from binascii import Error
from hashlib import sha256

DAG_CBOR = b"\x01\x71\x12\x20"
RAW = b"\x01\x55\x12\x20"
SIZE = 36

_TEXT_CHARACTERS = 59


def cid_of(block: bytes) -> bytes:
    """The CID of a DAG-CBOR block."""
    return DAG_CBOR + sha256(block).digest()


def is_cid(data: bytes) -> bool:
    """Whether these are the bytes of a CID of the protocol's kind."""
    return len(data) == SIZE and data.startswith((DAG_CBOR, RAW))


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
