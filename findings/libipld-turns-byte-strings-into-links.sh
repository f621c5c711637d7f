#!/usr/bin/env bash
# libipld changes a byte string that looks like a CID into a link when a record is encoded again.
#
# libipld 3.5.0 (PyPI), on which the Python SDK atproto is built, gives links and byte strings back
# as the same type, bytes. When it encodes, it writes every byte string that parses as a CID as a
# link (tag 42). A record may contain such a byte string: a field of the type bytes that holds a
# content address, for example.
# Seen: decoding and encoding a valid record of 43 bytes gives other bytes, so also another CID.
# cbrrr 1.1.0, which has a type for links, gives the same bytes.
# Why it matters: whoever decodes a record or a commit and encodes it again to compute its CID or to
# verify its signature gets a wrong result for honest data, and only for data like this.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check libipld==3.5.0 cbrrr==1.1.0
cat > see.py << 'END'
from hashlib import sha256

import cbrrr
import libipld

content_address = bytes([1, 0x55, 0x12, 32]) + sha256(b"a photograph").digest()
record = bytes([0xA1, 0x63]) + b"key" + bytes([0x58, len(content_address)]) + content_address

for name, again in [
    ("libipld", libipld.encode_dag_cbor(libipld.decode_dag_cbor(record))),
    ("cbrrr", cbrrr.encode_dag_cbor(cbrrr.decode_dag_cbor(record))),
]:
    kind = {0x58: "a byte string", 0xD8: "a link"}[again[5]]
    print(f"{name}: the value becomes {kind}, {len(record)} bytes become {len(again)},", end=" ")
    print("same CID" if again == record else "another CID")
END
seen=$(venv/bin/python see.py)
printf '%s\n' "$seen"
[ "$seen" = "libipld: the value becomes a link, 43 bytes become 46, another CID
cbrrr: the value becomes a byte string, 43 bytes become 43, same CID" ] || {
    echo "CHANGED: libipld 3.5.0 no longer encodes a byte string like a CID as a link" >&2
    exit 1
}
