"""Decoders for DAG-CBOR, frames, CARs and trees that share no code with the indexer."""

from base64 import b32decode
from hashlib import sha256
from io import BytesIO
from typing import Any

import cbor2


def decode_all(data: bytes) -> list[Any]:
    """Return every DAG-CBOR item in `data`, with links as the bytes of their CIDs."""
    stream = BytesIO(data)
    decoder = cbor2.CBORDecoder(stream, tag_hook=lambda tag, *_: _link(tag), read_size=1)
    items = []
    while stream.tell() < len(data):
        items.append(decoder.decode())
    return items


def decode_frame(frame: bytes | str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return header and payload."""
    assert isinstance(frame, bytes)
    header, payload = decode_all(frame)
    return header, payload


def decode_car(data: bytes) -> tuple[bytes, dict[bytes, bytes]]:
    """Return the root, and the blocks in the order of the file. Compare the hash of each with its CID."""
    stream = BytesIO(data)
    (header,) = decode_all(stream.read(_varint(stream)))
    assert header["version"] == 1
    blocks = {}
    while stream.tell() < len(data):
        section = stream.read(_varint(stream))
        assert sha256(section[36:]).digest() == section[4:36]
        blocks[section[:36]] = section[36:]
    return header["roots"][0], blocks


def decode_records(blocks: dict[bytes, bytes], node_cid: bytes) -> dict[str, bytes]:
    """Return the records of the tree below a node: path to record CID."""
    (node,) = decode_all(blocks[node_cid])
    records = decode_records(blocks, node["l"]) if node["l"] else {}
    key = b""
    for entry in node["e"]:
        key = key[: entry["p"]] + entry["k"]
        records[key.decode()] = entry["v"]
        if entry["t"]:
            records |= decode_records(blocks, entry["t"])
    return records


def cid_from_text(text: str) -> bytes:
    return b32decode(text[1:].upper() + "======"[: -len(text[1:]) % 8])


def _link(tag: Any) -> bytes:
    assert tag.tag == 42
    assert tag.value[0] == 0
    link: bytes = tag.value[1:]
    return link


def _varint(stream: BytesIO) -> int:
    number = shift = 0
    while True:
        byte = stream.read(1)[0]
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number
        shift += 7
