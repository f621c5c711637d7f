"""The programs of Prometheus, for tests that are skipped without them."""

import shutil

import pytest

_NOTICE = "is not installed: run tests/serve/install_prometheus.sh"

needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason=f"promtool {_NOTICE}")
needs_prometheus = pytest.mark.skipif(shutil.which("prometheus") is None, reason=f"prometheus {_NOTICE}")
