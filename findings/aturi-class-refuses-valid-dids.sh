#!/usr/bin/env bash
# The class AtUri of the official library refuses AT-URIs that the same library calls valid.
#
# In @atproto/syntax 0.7.7, isValidDid and isValidAtUri accept a DID with an underscore, and one with
# both a dot and an escaped colon, as the syntax of DIDs allows. The class AtUri uses an expression of
# its own, which allows neither, and throws.
# Seen: of three valid DIDs, the class takes one. The functions for checks accept all three.
# Why it matters: code that checks an AT-URI and then parses it still throws. @atproto/sync makes such
# an object for each operation of a commit, so one such account gives errors instead of events. URIs
# inside records may name any DID.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
npm install --silent --no-audit --no-fund --ignore-scripts @atproto/syntax@0.7.7
cat > see.mjs << 'END'
import { AtUri, isValidAtUri, isValidDid } from "@atproto/syntax";

const attempt = (make) => {
  try { make(); return "ok"; } catch { return "refused"; }
};
for (const did of ["did:web:host.example", "did:example:first_part", "did:web:host.example%3A8080"]) {
  const uri = `at://${did}/com.example.thing/self`;
  console.log(did, `isValidDid ${isValidDid(did)}, isValidAtUri ${isValidAtUri(uri)},`,
    `new AtUri ${attempt(() => new AtUri(uri))},`,
    `AtUri.make ${attempt(() => AtUri.make(did, "com.example.thing", "self"))}`);
}
END
seen=$(node see.mjs)
printf '%s\n' "$seen"
[ "$seen" = "did:web:host.example isValidDid true, isValidAtUri true, new AtUri ok, AtUri.make ok
did:example:first_part isValidDid true, isValidAtUri true, new AtUri refused, AtUri.make refused
did:web:host.example%3A8080 isValidDid true, isValidAtUri true, new AtUri refused, AtUri.make refused" ] || {
    echo "CHANGED: AtUri of @atproto/syntax 0.7.7 treats these DIDs differently" >&2
    exit 1
}
