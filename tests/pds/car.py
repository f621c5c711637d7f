"""CAR files written out by the book."""

from collections.abc import Iterable

from indexer.atproto.cid import cid_of
from indexer.localnet.dag_cbor import encode


def varint(number: int) -> bytes:
    low, rest = number & 0x7F, number >> 7
    return bytes([low | 0x80]) + varint(rest) if rest else bytes([low])


def section(cid: bytes, block: bytes) -> bytes:
    return varint(len(cid) + len(block)) + cid + block


def header(root: bytes) -> bytes:
    head = encode({"version": 1, "roots": [root]})
    return varint(len(head)) + head


def car(blocks: Iterable[bytes], root: bytes | None = None) -> bytes:
    """A file of these blocks in this order; its root is the first of them if not told otherwise."""
    blocks = list(blocks)
    return header(root or cid_of(blocks[0])) + b"".join(section(cid_of(block), block) for block in blocks)
