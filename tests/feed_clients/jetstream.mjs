// Print what the client @skyware/jetstream receives, one JSON object in each line.
// Arguments: the endpoint, the options of the client as JSON. A line on stdin is a list with a payload of `updateOptions`.
import { createInterface } from "node:readline";
import { Jetstream } from "@skyware/jetstream";

const [endpoint, options] = process.argv.slice(2);
const jetstream = new Jetstream({ endpoint, ...JSON.parse(options) });
const print = (kind) => (event) => console.log(JSON.stringify({ kind, event, cursor: jetstream.cursor }));

for (const kind of ["open", "close", "account", "identity"]) jetstream.on(kind, print(kind));
for (const [kind, on] of Object.entries({ create: "onCreate", update: "onUpdate", delete: "onDelete" })) {
  for (const collection of ["app.bsky.feed.post", "app.bsky.feed.like"]) jetstream[on](collection, print(kind));
}
jetstream.on("error", (error) => console.error(String(error)));
createInterface({ input: process.stdin })
  .on("line", (line) => jetstream.updateOptions(...JSON.parse(line)))
  .on("close", () => process.exit(0));
jetstream.start();
