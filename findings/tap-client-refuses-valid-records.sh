#!/usr/bin/env bash
# The client of tap never acknowledges some valid records.
#
# @atproto/tap 0.3.12 parses each event strictly before it calls the handler. It refuses an integer
# above 2^53-1 (the data model allows 64 bits), a field named __proto__ (any text is a valid name)
# and a link whose text is longer than 128 characters. A refused event reaches only the handler of
# errors, as "Failed to parse message", without the id of the event; no acknowledgement is sent.
# Seen: of five events, the first and the last are acknowledged, the three between them are not.
# Why it matters: tap sends an event again until it is acknowledged, and holds back what follows of
# the same account. A server must leave such values out, and must end the repetition itself.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
npm install --silent --no-audit --no-fund --ignore-scripts \
    @atproto/tap@0.3.12 @atproto/lex@0.3.12 @atproto/lex-json@0.1.7 @atproto/lex-data@0.1.8 ws@8.18.3
cat > see.mjs << 'END'
import { once } from "node:events";
import { SimpleIndexer, TapChannel } from "@atproto/tap";
import { WebSocketServer } from "ws";

const base32 = (bytes) => {
  const bits = [...bytes].map((byte) => byte.toString(2).padStart(8, "0")).join("");
  const groups = bits.match(/.{1,5}/g).map((group) => parseInt(group.padEnd(5, "0"), 2));
  return groups.map((value) => "abcdefghijklmnopqrstuvwxyz234567"[value]).join("");
};
// CIDv1, raw, sha2-512 by its code, with a digest of 76 bytes: 129 characters.
const longLink = "b" + base32([1, 0x55, 0x13, 76, ...new Uint8Array(76)]);

const values = {
  1: ["an ordinary record", '{"n": 1}'],
  2: ["an integer above 2^53-1", '{"n": 9007199254740993}'],
  3: ["a field named __proto__", '{"__proto__": "text"}'],
  4: [`a link of ${longLink.length} characters`, `{"link": {"$link": "${longLink}"}}`],
  5: ["an ordinary record", '{"n": 5}'],
};
const event = (id, value) => `{"id": ${id}, "type": "record", "record": {
  "did": "did:plc:aaaaaaaaaaaaaaaaaaaaaaaa", "rev": "3l6oveex3ii2l", "action": "create", "live": true,
  "collection": "com.example.thing", "rkey": "key${id}", "record": ${value},
  "cid": "bafyreiaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"}}`;

const server = new WebSocketServer({ host: "127.0.0.1", port: 0 });
await once(server, "listening");
const acknowledged = new Set();
const refused = [];
const allAnswered = new Promise((resolve) => {
  const check = () => acknowledged.size + refused.length === 5 && resolve();
  server.on("connection", (socket) => {
    socket.on("message", (text) => { acknowledged.add(JSON.parse(text).id); check(); });
    for (const [id, [, value]] of Object.entries(values)) socket.send(event(id, value));
  });
  const indexer = new SimpleIndexer().record(() => {}).error((error) => { refused.push(error); check(); });
  new TapChannel(`ws://127.0.0.1:${server.address().port}/channel`, indexer).start();
});
await allAnswered;
for (const [id, [name]] of Object.entries(values))
  console.log(`${acknowledged.has(Number(id)) ? "acknowledged    " : "not acknowledged"}  ${name}`);
for (const error of refused) console.log(`error: ${error.message}: ${error.cause.message}`);
process.exit();
END
seen=$(timeout 60 node see.mjs)
printf '%s\n' "$seen"
[ "$seen" = "acknowledged      an ordinary record
not acknowledged  an integer above 2^53-1
not acknowledged  a field named __proto__
not acknowledged  a link of 129 characters
acknowledged      an ordinary record
error: Failed to parse message: Invalid non-integer number: 9007199254740992
error: Failed to parse message: Invalid key: __proto__
error: Failed to parse message: Invalid \$link object" ] || {
    echo "CHANGED: @atproto/tap 0.3.12 no longer refuses exactly these records" >&2
    exit 1
}
