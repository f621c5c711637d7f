#!/usr/bin/env bash
# The published library for did:plc rejects each valid log in which an account was recovered.
#
# An operation may be undone with a higher rotation key within 72 hours. @did-plc/lib 0.0.4, the newest
# version on npm, measures these hours from the operation to the moment of the check, not to the time
# of the recovery, for which assureValidNextOp has no argument.
# Seen: a recovery one hour after the operation passes while it is one day old, and is a
# LateRecoveryError when the same log is checked a year later.
# Why it matters: a mirror or an auditor that replays the directory's export with this library rejects
# honest accounts, and only those that had to be rescued. The library serves to make operations.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
npm install --silent --no-audit --no-fund --ignore-scripts \
    @did-plc/lib@0.0.4 @atproto/crypto@0.5.5 @atproto/lex-cbor@0.1.6
cat > see.mjs << 'END'
import { Secp256k1Keypair } from "@atproto/crypto";
import { cidForLex } from "@atproto/lex-cbor";
import { assureValidNextOp, atprotoOp, didForCreateOp, updateHandleOp } from "@did-plc/lib";

const [high, low] = await Promise.all([Secp256k1Keypair.create(), Secp256k1Keypair.create()]);
const created = await atprotoOp({ signingKey: low.did(), rotationKeys: [high.did(), low.did()],
  handle: "owner.example", pds: "https://pds.example", prev: null, signer: low });
const taken = await updateHandleOp(created, low, "thief.example");
const recovery = await updateHandleOp(created, high, "rescued.example");
const did = await didForCreateOp(created);
const hour = 3600 * 1000;
for (const [age, days] of [["one day old", 1], ["a year old", 365]]) {
  const recoveredAt = Date.now() - days * 24 * hour;
  const indexed = async (operation, hoursBefore) => ({ did, operation, cid: await cidForLex(operation),
    nullified: false, createdAt: new Date(recoveredAt - hoursBefore * hour) });
  const log = [await indexed(created, 2), await indexed(taken, 1)];
  const verdict = await assureValidNextOp(did, log, recovery).then(
    ({ nullified }) => `valid, undoes ${nullified.length} operation`, (error) => error.constructor.name);
  console.log(`recovery after one hour, log ${age}: ${verdict}`);
}
END
seen=$(node see.mjs)
printf '%s\n' "$seen"
[ "$seen" = "recovery after one hour, log one day old: valid, undoes 1 operation
recovery after one hour, log a year old: LateRecoveryError" ] || {
    echo "CHANGED: @did-plc/lib 0.0.4 judges recoveries differently" >&2
    exit 1
}
