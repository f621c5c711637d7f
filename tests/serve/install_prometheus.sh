#!/bin/bash
# Install Debian's package `prometheus`, with the programs prometheus and promtool, for the tests of the monitoring.
# Without apt-get or the permission to use it, these tests are skipped; this script then says so and succeeds.
set -euo pipefail
if command -v prometheus > /dev/null && command -v promtool > /dev/null; then
    exit 0
fi
. "$(dirname "$0")/../apt_packages.sh"
install_or_skip "Prometheus" "the tests of metrics, alerts and dashboards that need it" prometheus
# The tests start servers of their own.
"${as_root[@]}" systemctl disable --now prometheus 2> /dev/null || true
