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


def numbers(options: dict[str, int]) -> list[str]:
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


def stages(figures: dict[str, float], unit: str) -> set[str]:
    """Those that took any time, of a section that has a figure for each and one for all."""
    names = {name.removesuffix(f", µs per {unit}"): figure for name, figure in figures.items()}
    assert names.pop("all") == pytest.approx(sum(names.values()))
    return {name for name, figure in names.items() if figure > 0}


def compare(floor: dict[str, float], parts: dict[str, float], unit: str) -> None:
    """The ratio is one of CPU: all of the floor's to the daemon's and Postgres's."""
    least = [f"proof alone, one core, µs per {unit}"]
    least += [f"rows alone, CPU of {part}, µs per {unit}" for part in ("the script", "Postgres")]
    ours = sum(parts[f"CPU of the {part}, µs per {unit}"] for part in ("daemon", "Postgres"))
    ratio = floor["CPU of the floor to ours, Postgres included"]
    assert 0 < ratio == pytest.approx(sum(floor[name] for name in least) / ours)


@pytest.mark.parametrize("shards", [1, 2])
def test_live(tmp_path: Path, shards: int) -> None:
    parts = {"repos": 20, "records": 60, "fast": 1_500, "paced": 300, "rate": 1_000, "staged": 100, "bare": 100}
    beside = {"shards": shards, "known": 40, "idle-repos": 50, "idle-records": 70}
    report = run(tmp_path, "live", *numbers(parts | beside))
    speed = report["as fast as it goes"]
    assert speed["commits/s, verified and durable"] > 0
    assert 0 < speed["commits a batch, median"] <= speed["commits a batch, most"] <= 1_500
    assert speed["identities in the daemons' memory"] == 40 + 20
    assert speed["peak RSS of the daemon, MiB"] > 0
    assert {"load", "plan", "apply"} == stages(report["the daemon's own clocks"], "commit")
    named = {"socket", "decode", "split", "signature", "inversion", "plan", "client", "database"}
    assert named <= stages(report["one after the other"], "commit")
    compare(report["floor"], speed, "commit")
    latency = report["offered 1000 commits/s"]
    assert 0 < latency["p50, ms"] <= latency["p99, ms"] <= latency["most, ms"]


@pytest.mark.parametrize("stored", [False, True])
def test_resync(tmp_path: Path, stored: bool) -> None:
    sizes = {"repos": 20, "records": 200, "staged": 5, "idle-repos": 50, "idle-records": 70}
    report = run(tmp_path, "resync", *numbers(sizes), *["--stored"] * stored)
    speed, shares = report["resyncs"], report["share of a resync's time"]
    assert min(speed[f"{what}/s"] for what in ("repos", "records", "MB")) > 0
    assert 0 < speed["records a write, median"] <= speed["records a write, most"] <= 2_000
    assert speed["peak RSS of the daemon, MiB"] > 0
    named = {"fetch", "verify", "diff", "apply"}
    assert named <= {name.removesuffix(", %") for name, share in shares.items() if share > 0}
    assert sum(shares.values()) == pytest.approx(100)
    assert named <= stages(report["the daemon's own clocks"], "record")
    assert {*named, "database"} <= stages(report["one after the other"], "record")
    compare(report["floor"], speed, "record")
