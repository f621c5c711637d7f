"""The benchmarks run, and the database equals the world afterwards. What they measure is nobody's test."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow


def run(tmp_path: Path, module: str, *options: str) -> dict[str, Any]:
    ended = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{module}", "--json", *options],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-2_000:]
    report: dict[str, Any] = json.loads(ended.stdout)
    return report


@pytest.mark.parametrize("shards", ["1", "2"])
def test_live(tmp_path: Path, shards: str) -> None:
    parts = {"repos": 20, "records": 60, "fast": 1_500, "paced": 300, "rate": 1_000, "staged": 100, "bare": 100}
    options = [word for name, value in parts.items() for word in (f"--{name}", str(value))]
    report = run(tmp_path, "live", "--shards", shards, "--idle-repos", "50", "--idle-records", "70", *options)
    speed, floor, apart = report["as fast as it goes"], report["floor"], report["one after the other"]
    assert speed["commits/s, verified and durable"] > 0
    assert 0 < speed["commits a batch, median"] <= speed["commits a batch, most"] <= 1_500
    assert 0 < floor["our rate to the proof's on one core"] < 1
    assert sum(apart.values()) == pytest.approx(2 * apart["all, µs per commit"])
    latency = report["offered 1000 commits/s"]
    assert 0 < latency["p50, ms"] <= latency["p99, ms"] <= latency["most, ms"]


@pytest.mark.parametrize("stored", [False, True])
def test_resync(tmp_path: Path, stored: bool) -> None:
    report = run(tmp_path, "resync", "--repos", "20", "--records", "100", *["--stored"] * stored)
    assert report["resyncs"]["records/s"] > 0
    assert sum(report["share of a resync's time"].values()) == pytest.approx(100)
    assert 0 < report["floor"]["our rate to that of COPY"] < 1
