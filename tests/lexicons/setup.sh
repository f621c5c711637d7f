#!/bin/bash
# Install the lexicons of Bluesky's package @atproto/api into node_modules/lexicons, one JSON file each. Needs npm.
set -euo pipefail
cd "$(dirname "$0")"
[ -e node_modules/.lexicons-ok ] && cmp -s node_modules/.lexicons-ok package-lock.json && exit 0

npm ci --ignore-scripts --no-audit --no-fund --loglevel=error # the package asks for a newer Node.js than this file needs
node write_lexicons.mjs node_modules/lexicons
cp package-lock.json node_modules/.lexicons-ok
