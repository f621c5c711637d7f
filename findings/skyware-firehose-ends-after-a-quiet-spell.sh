#!/usr/bin/env bash
# @skyware/firehose closes a connection that is quiet for five seconds, and never opens another one.
#
# The client is made for Bluesky's relay, which sends hundreds of events a second. After each message,
# version 0.5.2 starts a timer of five seconds. When it fires, the client closes its socket, adds its
# listeners to that same socket once more and emits `reconnect`. Nothing opens a new socket.
# Seen: with the default autoReconnect, a healthy server that sends one event gets its connection
# closed after five seconds; after that no connection comes, and no event but `reconnect` and `close`.
# Why it matters: read from a single PDS or a test network, where five quiet seconds are ordinary, the
# consumer stops, and its log says that it reconnected. Make a new client at `close`.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
npm install --silent --no-audit --no-fund --ignore-scripts \
    @skyware/firehose@0.5.2 @atproto/lex-cbor@0.1.6 ws@8.18.3
cat > see.mjs << 'END'
import { once } from "node:events";
import { setTimeout as sleep } from "node:timers/promises";
import { encode } from "@atproto/lex-cbor";
import { Firehose } from "@skyware/firehose";
import { WebSocket, WebSocketServer } from "ws";

const server = new WebSocketServer({ host: "127.0.0.1", port: 0 });
await once(server, "listening");
let connections = 0;
const closed = new Promise((resolve) => server.on("connection", (socket) => {
  connections += 1;
  socket.send(Buffer.concat([encode({ op: 1, t: "#identity" }), encode({
    seq: connections, did: "did:plc:aaaaaaaaaaaaaaaaaaaaaaaa", time: "2026-01-01T00:00:00.000Z" })]));
  socket.on("close", resolve);
}));
const client = new Firehose({ relay: `ws://127.0.0.1:${server.address().port}`, ws: WebSocket });
for (const name of ["open", "identity", "reconnect", "error"])
  client.on(name, () => console.log("event:", name));
client.start();
await closed;
console.log("the client closed the connection");
await sleep(15000);
console.log(`connections 15 seconds later: ${connections}`);
process.exit();
END
seen=$(timeout 60 node see.mjs)
printf '%s\n' "$seen"
[ "$seen" = "event: open
event: identity
event: reconnect
the client closed the connection
connections 15 seconds later: 1" ] || {
    echo "CHANGED: @skyware/firehose 0.5.2 treats a quiet connection differently" >&2
    exit 1
}
