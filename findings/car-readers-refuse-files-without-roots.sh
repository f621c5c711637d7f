#!/usr/bin/env bash
# Most CAR readers for the AT Protocol refuse a CAR file that has no root.
#
# The reference implementation writes such a file itself: blocksToCarFile(null, blocks) of
# @atproto/repo 0.10.14 gives a header with an empty list of roots, and com.atproto.sync.getBlocks
# answers with such files, because a set of blocks has no root.
# Seen: readCar of @atproto/repo and @ipld/car 5.4.7 read the file. readCarWithRoot of @atproto/repo,
# libipld 3.5.0 and with it CAR.from_bytes of the Python SDK atproto 0.0.73 refuse it, although the
# documentation of the SDK says that it reads the answers of all methods of the namespace sync.
# Why it matters: a client that fetches single blocks to complete a proof needs another reader than
# the one that it uses for exports, or it takes every good answer for a broken one.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
npm install --silent --no-audit --no-fund --ignore-scripts @atproto/repo@0.10.14 @ipld/car@5.4.7
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check libipld==3.5.0 atproto==0.0.73
cat > see.mjs << 'END'
import { writeFileSync } from "node:fs";
import { BlockMap, blocksToCarFile, readCar, readCarWithRoot } from "@atproto/repo";
import { CarReader } from "@ipld/car";

const blocks = new BlockMap();
await blocks.add({ text: "one block" });
const file = await blocksToCarFile(null, blocks);
writeFileSync("blocks.car", file);
const attempt = async (name, read) => {
  try { console.log(`${name}: ${await read()} block`); }
  catch (error) { console.log(`${name}: refused: ${error.message}`); }
};
await attempt("@atproto/repo readCar", async () => (await readCar(file)).blocks.size);
await attempt("@atproto/repo readCarWithRoot", async () => (await readCarWithRoot(file)).blocks.size);
await attempt("@ipld/car", async () => (await CarReader.fromBytes(file))._blocks.length);
END
cat > see.py << 'END'
import pathlib

import atproto
import libipld

file = pathlib.Path("blocks.car").read_bytes()
for name, read in [
    ("libipld", lambda: len(libipld.decode_car(file)[1])),
    ("atproto", lambda: len(atproto.CAR.from_bytes(file).blocks)),
]:
    try:
        print(f"{name}: {read()} block")
    except ValueError as error:
        print(f"{name}: refused: {error}")
END
seen=$(node see.mjs && venv/bin/python see.py)
printf '%s\n' "$seen"
[ "$seen" = "@atproto/repo readCar: 1 block
@atproto/repo readCarWithRoot: refused: Expected one root, got 0
@ipld/car: 1 block
libipld: refused: Failed to read CAR header. Roots is empty. Must be at least one
atproto: refused: Failed to read CAR header. Roots is empty. Must be at least one" ] || {
    echo "CHANGED: these readers treat a CAR file without roots differently" >&2
    exit 1
}
