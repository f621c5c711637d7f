"""Records with links of any CIDv1 form, which the encoder of the local network does not write."""

from typing import Any

from indexer.demo import dag_cbor


class Link(bytes):
    """A CID of any CIDv1 form."""


def encode(value: Any) -> bytes:
    """Return the DAG-CBOR of a record with links of any form."""
    links: list[Link] = []

    def marked(item: Any) -> Any:
        if isinstance(item, Link):
            links.append(item)
            return b"link %d." % (len(links) - 1)
        if isinstance(item, dict):
            return {key: marked(one) for key, one in item.items()}
        return [marked(one) for one in item] if isinstance(item, list) else item

    block = dag_cbor.encode(marked(value))
    for number, link in enumerate(links):
        block = block.replace(dag_cbor.encode(b"link %d." % number), b"\xd8\x2a" + dag_cbor.encode(b"\0" + link))
    return block


def link(digest: bytes, *, codec: int = 0x55, function: int = 0x12) -> Link:
    return Link(bytes([1, *_varint(codec), *_varint(function), len(digest)]) + digest)


def _varint(number: int) -> list[int]:
    return [number] if number < 128 else [number & 127 | 128, *_varint(number >> 7)]
