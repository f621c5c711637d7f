#!/usr/bin/env bash
# No two of four programs agree on which datetimes of the AT Protocol are valid.
#
# Compared: isValidDatetime of @atproto/syntax 0.7.7, ParseDatetime of Bluesky's Go code (indigo), the
# strict formats of the Python SDK atproto 0.0.73, and a cast to timestamptz in Postgres (@electric-
# sql/pglite 0.5.17). The specification asks for RFC 3339 with an offset, without naming a largest one.
# Seen: Postgres takes no offset of 16 hours or more and no year 0, Python no year 0, JavaScript no
# time whose year in UTC has five digits. JavaScript accepts 30 February, and reads it as 1 March.
# Why it matters: a datetime that one host accepted as valid breaks an insert, an index or a validator
# elsewhere. Keep the text; make the time a value that may be missing.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
npm install --silent --no-audit --no-fund --ignore-scripts @atproto/syntax@0.7.7 @electric-sql/pglite@0.5.17
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check atproto==0.0.73
go mod init example.com/see 2> log
go get github.com/bluesky-social/indigo/atproto/syntax@v0.0.0-20260605210604-af2fec94f34c 2> log
cat > texts << 'END'
2024-01-01T00:00:00+15:59
2024-01-01T00:00:00+16:00
0000-01-01T00:00:00Z
9999-12-31T23:59:59-01:00
2024-02-30T00:00:00Z
END
cat > see.mjs << 'END'
import { readFileSync } from "node:fs";
import { isValidDatetime } from "@atproto/syntax";
import { PGlite } from "@electric-sql/pglite";

const database = new PGlite();
for (const text of readFileSync("texts", "utf8").trim().split("\n")) {
  const stored = await database.query("select $1::text::timestamptz", [text]).then(() => "yes", () => "no");
  console.log(text, `JavaScript ${isValidDatetime(text) ? "yes" : "no"} Postgres ${stored}`);
}
process.exit();
END
cat > see.py << 'END'
import pathlib

import pydantic
from atproto_client.models import string_formats

check = pydantic.TypeAdapter(string_formats.DateTime)
for text in pathlib.Path("texts").read_text().split():
    try:
        check.validate_python(text, context={"strict_string_format": True})
        print("Python yes")
    except pydantic.ValidationError:
        print("Python no")
END
cat > see.go << 'END'
package main

import (
	"bufio"
	"fmt"
	"os"

	"github.com/bluesky-social/indigo/atproto/syntax"
)

func main() {
	texts := bufio.NewScanner(os.Stdin)
	for texts.Scan() {
		if _, err := syntax.ParseDatetime(texts.Text()); err == nil {
			fmt.Println("Go yes")
		} else {
			fmt.Println("Go no")
		}
	}
}
END
node see.mjs > javascript.out
venv/bin/python see.py > python.out
go run -mod=mod see.go < texts > go.out
seen=$(paste -d ' ' javascript.out python.out go.out)
printf '%s\n' "$seen"
[ "$seen" = "2024-01-01T00:00:00+15:59 JavaScript yes Postgres yes Python yes Go yes
2024-01-01T00:00:00+16:00 JavaScript yes Postgres no Python yes Go yes
0000-01-01T00:00:00Z JavaScript yes Postgres no Python no Go yes
9999-12-31T23:59:59-01:00 JavaScript no Postgres yes Python yes Go yes
2024-02-30T00:00:00Z JavaScript yes Postgres no Python no Go no" ] || {
    echo "CHANGED: the answers of these programs about datetimes are different" >&2
    exit 1
}
