#!/usr/bin/env bash
# Install Chromium from the distribution, for the tests of the status page and docs/make_screenshots.py.
# Without root or apt-get nothing is installed: then these tests are skipped with a notice that names this script.
set -euo pipefail

if command -v chromium > /dev/null; then
    echo "Chromium is installed: $(chromium --version --no-sandbox)"
    exit
fi
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get > /dev/null; then
    echo "CHROMIUM IS NOT INSTALLED: this needs root and apt-get. The tests of the status page will be skipped." >&2
    exit
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
# The fonts are needed for readable screenshots.
apt-get install -qq --no-install-recommends -o DPkg::Lock::Timeout=300 chromium fonts-dejavu-core > /dev/null
echo "Installed $(chromium --version --no-sandbox)"
