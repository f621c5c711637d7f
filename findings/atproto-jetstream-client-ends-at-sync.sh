#!/usr/bin/env bash
# The Jetstream client of the Python SDK atproto ends with an error at any #sync, and cannot pass it.
#
# atproto 0.0.73 (PyPI): a #sync of network.bsky.jetstream.subscribeEvents has bytes, which JSON
# writes as {"$bytes": "…"}. The model of the client takes only a string, as from CBOR, and an event
# that does not fit its model ends the client, although it skips frames that it cannot decode.
# Seen: of a server that sends a commit, a #sync and a commit, it delivers the first one. Then
# `start` raises JetstreamError. The cursor stays before the #sync, so the next run fails again.
# Why it matters: a consumer that follows all kinds, which is the default, stops at the first #sync
# and stays there. Name the kinds without sync.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check atproto==0.0.73
cat > see.py << 'END'
import json
from contextlib import suppress
from threading import Thread

from atproto import JetstreamClient
from atproto_jetstream.exceptions import JetstreamError
from websockets.exceptions import ConnectionClosed
from websockets.sync.server import serve

NSID = "network.bsky.jetstream.subscribeEvents"


def frame(kind, seq, fields):
    common = {"seq": seq, "did": "did:plc:aaaaaaaaaaaaaaaaaaaaaaaa", "time": "2026-11-30T00:00:00.000000Z"}
    inner = {kind: common | fields} if kind == "sync" else fields
    return json.dumps({"$type": "message", "payload": {"$type": f"{NSID}#{kind}", **common, **inner}})


REV = {"rev": "3l3qo2vutsw2b"}
GONE = REV | {"operation": "delete", "collection": "com.example.note", "rkey": "a"}
FRAMES = [frame("commit", 1, GONE), frame("sync", 2, REV | {"blocks": {"$bytes": "AAAA"}}), frame("commit", 3, GONE)]


def send(connection):
    for text in FRAMES:
        connection.send(text)
    with suppress(ConnectionClosed):
        connection.recv()


with serve(send, "127.0.0.1", 0, subprotocols=["xrpc.v1.json"]) as server:
    Thread(target=server.serve_forever, daemon=True).start()
    uri = f"ws://127.0.0.1:{server.socket.getsockname()[1]}/xrpc"
    client, seen = JetstreamClient(base_uri=uri, compress=False), []
    try:
        client.start(lambda event: seen.append(event.seq))
        ended = "returned"
    except JetstreamError as error:
        ended = f"raised {type(error.__cause__).__name__}"
    print(f"delivered {seen}, {ended}, cursor {client.cursor}")
    server.shutdown()
END
seen=$(venv/bin/python see.py)
printf '%s\n' "$seen"
[ "$seen" = "delivered [1], raised ModelError, cursor 1" ] || {
    echo "CHANGED: the Jetstream client of atproto 0.0.73 no longer ends at a #sync" >&2
    exit 1
}
