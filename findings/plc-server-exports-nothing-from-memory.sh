#!/usr/bin/env bash
# The directory server from npm exports nothing from memory, and ignores `count` with Postgres.
#
# @did-plc/server 0.0.1, the only version on npm, is what test networks of the AT Protocol start. With
# Database.mock(), its database in memory, GET /export answers 200 with an empty body, whatever
# operations it has taken and serves by DID. With Postgres, it reads the parameter `count` from the
# wrong object, so each answer has up to 1,000 lines. Its documents have relative ids, too.
# Seen: five accounts are created; /export?count=2 gives 0 lines from memory and 5 with Postgres.
# Why it matters: the test of a mirror against this server finds an empty directory without an error,
# and never meets the end of a page.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
npm install --silent --no-audit --no-fund --ignore-scripts @did-plc/server@0.0.1 @did-plc/lib@0.0.4 \
    @atproto/crypto@0.1.0 @electric-sql/pglite@0.5.14 @electric-sql/pglite-socket@0.2.17
cat > see.mjs << 'END'
import net from "node:net";
import { createRequire } from "node:module";
import { PGlite } from "@electric-sql/pglite";
import { PGLiteSocketServer } from "@electric-sql/pglite-socket";

const require = createRequire(import.meta.url);
const { Secp256k1Keypair } = require("@atproto/crypto");
const { Client } = require("@did-plc/lib");
const { Database, PlcServer } = require("@did-plc/server");

const listen = net.Server.prototype.listen; // the server would listen on all addresses
net.Server.prototype.listen = function (first, ...rest) {
  const loopback = typeof first === "number" ? ["127.0.0.1", ...rest.filter((it) => typeof it !== "string")] : rest;
  return listen.call(this, first, ...loopback);
};
const postgres = async () => {
  const db = await PGlite.create();
  const server = new PGLiteSocketServer({ db, port: 0, host: "127.0.0.1", maxConnections: 9 });
  const address = new Promise((resolve) => server.addEventListener("listening", (event) => resolve(event.detail)));
  await server.start();
  const url = `postgres://postgres@127.0.0.1:${(await address).port}/postgres?sslmode=disable`;
  const database = Database.postgres({ url, poolSize: 1 });
  await database.migrateToLatestOrThrow();
  return database;
};
const signer = await Secp256k1Keypair.create();
for (const [name, db] of [["in memory", Database.mock()], ["Postgres", await postgres()]]) {
  const server = await PlcServer.create({ db, port: 0 }).start();
  const url = `http://127.0.0.1:${server.address().port}`;
  for (let number = 1; number <= 5; number++)
    await new Client(url).createDid({ signingKey: signer.did(), rotationKeys: [signer.did()],
      handle: `user${number}.example`, pds: "https://pds.example", signer });
  const response = await fetch(`${url}/export?count=2`);
  const lines = (await response.text()).split("\n").filter((line) => line);
  process.stderr.write(`${name}: status ${response.status}, ${lines.length} lines\n`);
}
process.exit();
END
seen=$(LOG_ENABLED=false timeout 90 node see.mjs 2>&1 >/dev/null)
printf '%s\n' "$seen"
[ "$seen" = "in memory: status 200, 0 lines
Postgres: status 200, 5 lines" ] || {
    echo "CHANGED: @did-plc/server 0.0.1 exports something else" >&2
    exit 1
}
