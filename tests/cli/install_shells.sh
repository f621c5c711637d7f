#!/bin/bash
# Install Debian's packages `zsh` and `fish` for the tests of shell completion.
# Without apt-get or the permission to use it, these tests are skipped; this script then says so and succeeds.
set -euo pipefail
if command -v zsh > /dev/null && command -v fish > /dev/null; then
    exit 0
fi
. "$(dirname "$0")/../apt_packages.sh"
install_or_skip "zsh or fish" "the tests of their completion" zsh fish
