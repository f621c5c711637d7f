"""The benchmarks run, and the database has the expected result at the end. The measured figures are not tested."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from benchmarks.guard import GROUPS
from benchmarks.peer_results import ONE_PROCESS, TAP, TAP_SQLITE, TWO_SHARDS
from benchmarks.tap import SHARED, find_tap
from indexer.store import embedded
from tests.native_module import native_module

pytestmark = pytest.mark.slow


def run(tmp_path: Path, module: str, *options: str, timeout: float = 100) -> dict[str, Any]:
    """Run a benchmark with `--json` and return its report."""
    ended = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{module}", "--json", *options],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-2_000:]
    report: dict[str, Any] = json.loads(ended.stdout)
    return report


def command_line(options: dict[str, int]) -> list[str]:
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


def measured_stages(figures: dict[str, float], unit: str) -> set[str]:
    """Return the stages of a section with a cost above 0, and check that the total is their sum."""
    costs = {name.removesuffix(f", µs per {unit}"): figure for name, figure in figures.items()}
    assert costs.pop("total") == pytest.approx(sum(costs.values()))
    return {name for name, cost in costs.items() if cost > 0}


def check_floor(floor: dict[str, float], speed: dict[str, float], unit: str) -> None:
    """Check that the main ratio is the CPU time of the floor divided by that of the daemon and Postgres."""
    parts = [f"verification only, one core, µs per {unit}"]
    parts += [f"bare script, {part} CPU, µs per {unit}" for part in ("script", "Postgres")]
    daemon = sum(speed[f"{part} CPU, µs per {unit}"] for part in ("daemon", "Postgres"))
    ratio = floor["floor CPU / daemon CPU, both with Postgres"]
    assert 0 < ratio == pytest.approx(sum(floor[part] for part in parts) / daemon)


def test_live_benchmark_with_two_processes(tmp_path: Path) -> None:
    parts = {"repos": 20, "records": 60, "fast": 2_500, "paced": 300, "rate": 1_000, "staged": 100}
    idle = {"shards": 2, "known": 40, "idle-repos": 50, "idle-records": 70}
    report = run(tmp_path, "live", *command_line(parts | idle))
    speed = report["maximum rate"]
    assert speed["commits/s, verified and durable"] > 0
    assert 0 < speed["commits per batch, median"] <= speed["commits per batch, maximum"] <= 1_500
    assert speed["identities in memory"] == 40 + 20
    assert speed["peak RSS of the daemon, MiB"] > 0
    assert {"load", "plan", "apply"} <= measured_stages(report["elapsed time by stage in the daemon"], "commit")
    stages = {"socket", "decode", "split", "signature", "inversion", "plan", "client", "database"}
    assert stages <= measured_stages(report["stages measured one by one"], "commit")
    check_floor(report["floor"], speed, "commit")
    latency = report["latency at 1000 commits/s"]
    assert 0 < latency["p50, ms"] <= latency["p99, ms"] <= latency["maximum, ms"]
    assert 0 <= latency["time with a slow processor, %"] <= 100
    if latency["commits at that time, %"] < 100:
        assert 0 < latency["p50 of the others, ms"] <= latency["p99 of the others, ms"] <= latency["maximum, ms"]


@pytest.mark.timeout(220)  # two daemons, each with a Postgres
def test_comparison_of_cores(tmp_path: Path) -> None:
    native_module()
    report = run(
        tmp_path, "cores", *command_line({"repos": 20, "records": 60, "parts": 2, "commits": 1_000}), timeout=200
    )
    native, python = (report[f"{core} core"] for core in ("native", "python"))
    for core, figures in (("native", native), ("python", python)):
        assert min(figures.values()) > 0
        check_floor(report[f"floor and {core} core"], figures, "commit")
    rate, ratios = "commits/s, verified and durable", report["native core / Python core"]
    assert ratios["rates of all parts"] == pytest.approx(native[rate] / python[rate])
    smallest, middle, largest = (ratios[f"rates of one part, {which}"] for which in ("smallest", "median", "largest"))
    assert 0 < smallest <= middle <= largest


async def test_live_benchmark_with_one_process_reuses_a_kept_database(tmp_path: Path) -> None:
    parts = {"repos": 20, "records": 60, "fast": 1_500, "paced": 100, "staged": 100}
    kept = tmp_path / "kept"
    for cache, idle in (("cold", 50), ("warm", 90)):
        options = command_line(parts | {"idle-repos": idle, "idle-records": idle})
        report = await asyncio.to_thread(run, tmp_path, "live", *options, "--cache", cache, "--keep", str(kept))
        assert report["maximum rate"]["commits/s, verified and durable"] > 0
    async with embedded.database(None, kept) as dsn:
        connection = await asyncpg.connect(dsn)
        assert await connection.fetchval("select count(*) from indexer.repo") == 20 + 50
        await connection.close()


@pytest.mark.parametrize("stored", [False, True])
def test_resync_benchmark(tmp_path: Path, stored: bool) -> None:
    sizes = {"repos": 20, "records": 200, "staged": 5, "idle-repos": 50, "idle-records": 70}
    report = run(tmp_path, "resync", *command_line(sizes), *["--stored"] * stored)
    speed, shares = report["resyncs"], report["share of the time of a resync"]
    assert min(speed[f"{what}/s"] for what in ("repos", "records", "MB")) > 0
    assert 0 < speed["records per write, median"] <= speed["records per write, maximum"] <= 2_000
    assert speed["peak RSS of the daemon, MiB"] > 0
    stages = {"fetch", "verify", "diff", "apply"}
    assert stages <= {name.removesuffix(", %") for name, share in shares.items() if share > 0}
    assert sum(shares.values()) == pytest.approx(100)
    assert stages <= measured_stages(report["elapsed time by stage in the daemon"], "record")
    assert {*stages, "database"} <= measured_stages(report["stages measured one by one"], "record")
    check_floor(report["floor"], speed, "record")


def test_feed_benchmark(tmp_path: Path) -> None:
    report = run(tmp_path, "feed", *command_line({"repos": 20, "records": 60, "commits": 1_500, "subscribers": 3}))
    feed = report["one process with 3 subscribers"]
    assert 0 < feed["events received by each subscriber, at least"] <= feed["record changes logged"]
    assert feed["process CPU, µs per logged change"] > 0
    for path in ("nobody subscribes", "with subscribers"):
        assert report[f"live path, {path}"]["commits/s, verified and durable"] > 0


@pytest.mark.timeout(320)  # two programs start one after the other, each with a Postgres
@pytest.mark.parametrize(
    ("scenario", "programs"),
    [("live", (TAP, TWO_SHARDS)), ("backfill", (TAP_SQLITE, ONE_PROCESS)), ("large", (TAP, ONE_PROCESS))],
)
def test_comparison_with_tap(tmp_path: Path, scenario: str, programs: tuple[str, ...]) -> None:
    if find_tap(tmp_path) is None:
        pytest.skip(f"no tap for this machine in {SHARED}")
    options = [word for program in programs for word in ("--program", program)]
    report = run(tmp_path, "peers", "--quick", "--scenario", scenario, *options, timeout=300)
    [figures] = [section for title, section in report.items() if title != "machine"]
    unit = "commit" if scenario == "live" else "record"
    for name in (f"{unit}s/s", f"program CPU, µs per {unit}", f"CPU with Postgres, µs per {unit}", "peak RSS, MiB"):
        assert min(figures[name][program] for program in programs) > 0
    tap, indexer = (figures[f"{unit}s/s"][program] for program in programs)
    assert indexer / tap in [pytest.approx(ratio) for ratio in figures[f"{unit}s/s"].values()]
    assert figures[f"{unit}s/s, acknowledged"].keys() == {programs[0]}


def test_guard_measures_every_stage(tmp_path: Path) -> None:
    report = run(tmp_path, "guard", "--smoke")
    assert {name: set(stages) for name, stages in report.items()} == {
        name: set(group.usual) for name, group in GROUPS.items()
    }
    for cost in (cost for stages in report.values() for cost in stages.values()):
        assert cost["ratio"] > 0
        assert cost["exceeded"] is (cost["ratio"] > cost["bound"])
