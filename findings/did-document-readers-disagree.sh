#!/usr/bin/env bash
# Five libraries find three different handles in one DID document, and one of them finds no key.
#
# The document names two at:// URIs, of which only the second is a handle, and its key has a relative
# id (#atproto), as the DID specification allows and as @did-plc/server 0.0.1 writes it.
# Seen: @atproto/common-web 0.5.15 and, on PyPI, atproto 0.0.73 and arroba 3.1 return the first URI as
# it is, @atcute/identity 2.0.2 nothing, and Bluesky's Go code (indigo) the handle, as the
# specification says: the first one that is valid. arroba finds no key, for it compares only with the
# absolute id.
# Why it matters: the official libraries give a text as a handle that is none, so check it again; a
# reader with arroba cannot verify accounts of a directory or of a did:web host that writes short ids.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
npm install --silent --no-audit --no-fund --ignore-scripts @atproto/common-web@0.5.15 @atcute/identity@2.0.2
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check atproto==0.0.73 arroba==3.1
go mod init example.com/see 2> log
go get github.com/bluesky-social/indigo/atproto/identity@v0.0.0-20260605210604-af2fec94f34c 2> log
cat > document.json << 'END'
{
  "@context": ["https://www.w3.org/ns/did/v1"],
  "id": "did:plc:aaaaaaaaaaaaaaaaaaaaaaaa",
  "alsoKnownAs": ["at://team_account", "at://owner.example"],
  "verificationMethod": [{
    "id": "#atproto", "type": "Multikey", "controller": "did:plc:aaaaaaaaaaaaaaaaaaaaaaaa",
    "publicKeyMultibase": "zQ3shVc2UkAfJCdc1TR8E66J85h48P43r93q8jGPkPpjF9Ef9"
  }],
  "service": []
}
END
cat > see.mjs << 'END'
import { readFileSync } from "node:fs";
import { getAtprotoHandle, getAtprotoVerificationMaterial } from "@atcute/identity";
import { getHandle, getSigningKey } from "@atproto/common-web";

const document = JSON.parse(readFileSync("document.json", "utf8"));
const show = (name, handle, key) =>
  console.log(`${name}: handle ${handle ?? "none"}, key ${key ? "found" : "none"}`);
show("@atproto/common-web", getHandle(document), getSigningKey(document));
show("@atcute/identity", getAtprotoHandle(document), getAtprotoVerificationMaterial(document));
END
cat > see.py << 'END'
import json
import pathlib

import arroba.did
import atproto

document = json.loads(pathlib.Path("document.json").read_text())
sdk = atproto.DidDocument.from_dict(document)
for name, handle, key in [
    ("atproto", sdk.get_handle(), sdk.get_signing_key()),
    ("arroba", arroba.did.get_handle(document), arroba.did.get_signing_key(document)),
]:
    print(f"{name}: handle {handle or 'none'}, key {'found' if key else 'none'}")
END
cat > see.go << 'END'
package main

import (
	"encoding/json"
	"fmt"
	"os"

	"github.com/bluesky-social/indigo/atproto/identity"
)

func main() {
	text, err := os.ReadFile("document.json")
	if err != nil {
		panic(err)
	}
	var document identity.DIDDocument
	if err := json.Unmarshal(text, &document); err != nil {
		panic(err)
	}
	account := identity.ParseIdentity(&document)
	handle, err := account.DeclaredHandle()
	if err != nil {
		panic(err)
	}
	key := "found"
	if _, err := account.PublicKey(); err != nil {
		key = "none"
	}
	fmt.Printf("indigo: handle %s, key %s\n", handle, key)
}
END
seen=$(node see.mjs && venv/bin/python see.py && go run -mod=mod see.go)
printf '%s\n' "$seen"
[ "$seen" = "@atproto/common-web: handle team_account, key found
@atcute/identity: handle none, key found
atproto: handle team_account, key found
arroba: handle team_account, key none
indigo: handle owner.example, key found" ] || {
    echo "CHANGED: these libraries read the DID document differently" >&2
    exit 1
}
