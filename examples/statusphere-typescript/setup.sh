#!/bin/bash
# Check the version of Node.js, and install the npm packages of the example, pinned, unless they are installed.
set -euo pipefail
cd "$(dirname "$0")"

if ! node -e 'const [major, minor] = process.versions.node.split(".").map(Number)
              process.exit(major > 22 || (major === 22 && minor >= 18) ? 0 : 1)'; then
    echo "Node.js 22.18 or newer is needed. To get one for one command: npx --yes --package=node@22 COMMAND" >&2
    exit 1
fi
cmp -s node_modules/.installed package-lock.json && exit 0
npm ci --ignore-scripts --no-audit --no-fund
cp package-lock.json node_modules/.installed
