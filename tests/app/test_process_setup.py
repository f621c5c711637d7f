"""Setup of a daemon process: signals, the limit of open files, and processor cores."""

import os
import resource
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from indexer.app.process_setup import (
    MAX_OPEN_FILES,
    StopRequest,
    available_cores,
    raise_file_limit,
    stop_on_signals,
)


def test_file_limit_is_raised_as_far_as_the_system_allows() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    try:
        raise_file_limit()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert hard == before[1]
    assert soft == MAX_OPEN_FILES or soft == hard < MAX_OPEN_FILES


@pytest.mark.parametrize(
    ("quota", "cores"),
    [
        ("max 100000\n", 8),
        ("200000 100000\n", 2),
        ("150000 100000\n", 2),
        ("5000 100000\n", 1),
        ("900000 100000\n", 8),
    ],
)
def test_cores_are_those_of_the_affinity_and_of_the_quota_of_the_container(
    quota: str, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    (tmp_path / "cpu.max").write_text(quota)
    assert available_cores(tmp_path / "cpu.max") == cores


def test_cores_are_those_of_the_affinity_without_a_quota(tmp_path: Path) -> None:
    assert available_cores(tmp_path / "none") == len(os.sched_getaffinity(0))


async def test_handlers_are_restored_if_no_signal_was_received() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with stop_on_signals(StopRequest(), 60):
        assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] != before
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


PROGRAM = """
    import asyncio, sys, threading, time
    from indexer.app.process_setup import StopRequest, stop_on_signals

    async def main():
        stop = StopRequest()
        with stop_on_signals(stop, float(sys.argv[1])):
            print("ready", flush=True)
            await stop.wait()
            print("stopping", flush=True)
            {hang}

    asyncio.run(main())
    print("ended", flush=True)
"""
HANGS = {
    "a coroutine that cannot be cancelled": "await asyncio.shield(asyncio.to_thread(time.sleep, 600))",
    "a blocked event loop": "time.sleep(600)",
}


@contextmanager
def program(hang: str, timeout: float) -> Iterator[subprocess.Popen[str]]:
    script = textwrap.dedent(PROGRAM).format(hang=HANGS[hang])
    command = [sys.executable, "-c", script, str(timeout)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def read_until(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdout is not None
    assert line in map(str.strip, iter(process.stdout.readline, ""))


@pytest.mark.slow
@pytest.mark.parametrize("hang", HANGS)
def test_process_ends_after_the_timeout_or_at_a_second_signal_whatever_it_waits_for(hang: str) -> None:
    for timeout, event in ((2.0, "daemon.stop-timeout"), (600.0, "daemon.stopped-at-once")):
        with program(hang, timeout) as process:
            read_until(process, "ready")
            process.send_signal(signal.SIGTERM)
            read_until(process, "stopping")
            if timeout == 600:
                process.send_signal(signal.SIGINT)
            assert process.stdout is not None
            output = process.stdout.read()
            assert process.wait(10) == 1
            assert event in output
            assert "unfinished=start" in output


@pytest.mark.slow
def test_memory_between_objects_in_use_is_returned_to_the_system() -> None:
    script = """
        import resource
        from indexer.app.process_setup import return_free_memory

        def resident() -> int:
            with open("/proc/self/statm") as statm:
                return int(statm.read().split()[1]) * resource.getpagesize()

        used, large = [], []
        for _ in range(1_000):
            large.append(bytearray(100_000))
            used.append(bytearray(30_000))  # too large for a hole: it ends up behind the large one
        large.clear()
        before = resident()
        return_free_memory()
        print(before - resident())
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    returned = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert returned > 50_000_000
