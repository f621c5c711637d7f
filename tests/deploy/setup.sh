#!/bin/bash
# Install what the tests of the deployment files use if it is there: the loader of Docker Compose (built with Go, beside
# this script) and the schemas of Kubernetes (into the virtual environment, `VENV` or .venv).
set -euo pipefail
cd "$(dirname "$0")"
VENV=${VENV:-../../.venv}

"$VENV/bin/pip" install --quiet --disable-pip-version-check kubernetes-validate==1.37.0
if docker compose version > /dev/null 2>&1; then
    echo "Compose files are checked with docker compose"
elif command -v go > /dev/null; then
    (cd compose_config && go build -buildvcs=false -o compose-config .)
else
    echo "neither docker compose nor go: the test that loads the Compose files will be skipped"
fi
