"""Setup of a daemon process: signals, open files, processor cores, and the garbage collector."""

import asyncio
import ctypes
import gc
import math
import os
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from time import monotonic
from typing import NoReturn

import structlog

MAX_OPEN_FILES = 65_536
LOG_SECONDS = 1.0
"""Maximum time to write the last log line: the reader of stderr may hang."""
PARENT_ENDED = signal.SIGUSR1
"""The kernel sends it when the parent ends, once for each thread of the parent. So only the first one counts."""
CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""The quota of a container: microseconds of CPU time in each period, or `max`, and the length of the period."""
SIGNALS = (signal.SIGTERM, signal.SIGINT, PARENT_ENDED)
NO_SIGNAL = 0
DELAY_INTERVAL_SECONDS = 0.05
TRIM_SECONDS = 10.0
"""Pause before free memory is returned again, which takes one to two milliseconds."""

log = structlog.get_logger(__name__)


class StopRequest(asyncio.Event):
    """An event that is set when the process has to stop.

    Attributes:
        step: What the process does now. The last log line names it if the process does not end in time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.step = "start"


@contextmanager
def stop_on_signals(stop: StopRequest, timeout: float) -> Iterator[None]:
    """Set `stop` at the first signal, and bound the time from then to the end of the process.

    After `timeout` seconds, or at a second SIGTERM or SIGINT, the process ends at once with exit code 1, whatever it
    waits for.
    Once a signal was received, this holds until the process has ended, not only within the block.
    """
    loop = asyncio.get_running_loop()
    signals = SimpleQueue[int]()  # unlike other queues, it may be used in a signal handler
    received = list[int]()

    def on_signal(number: int, _frame: object) -> None:
        received.append(number)
        signals.put(number)

    def watch() -> None:
        """Wait for signals, and end the process after the second one or after the timeout."""
        if signals.get() == NO_SIGNAL:
            return
        loop.call_soon_threadsafe(stop.set)
        ends = monotonic() + timeout
        while True:
            try:
                number = signals.get(timeout=max(0.0, ends - monotonic()))
            except Empty:
                _end_process(partial(log.error, "daemon.stop-timeout", unfinished=stop.step, seconds=timeout))
            if number != PARENT_ENDED:
                _end_process(partial(log.warning, "daemon.stopped-at-once", unfinished=stop.step))

    # A thread, because the event loop may be blocked, and may end before the threads of the process.
    thread = threading.Thread(target=watch, name="signals", daemon=True)
    before = {number: signal.signal(number, on_signal) for number in SIGNALS}
    thread.start()
    try:
        yield
    finally:
        if not received:
            for number, handler in before.items():
                signal.signal(number, handler)
            signals.put(NO_SIGNAL)
            thread.join()


def _end_process(write_log_line: Callable[[], None]) -> NoReturn:
    """Write one log line, and end the process at once. Connections and threads are not waited for."""
    line = threading.Thread(target=write_log_line, daemon=True)
    line.start()
    line.join(LOG_SECONDS)
    os._exit(1)


def raise_file_limit() -> None:
    """Raise the limit of open files to `MAX_OPEN_FILES`, or as far as the system allows.

    Every connection is an open file, and many systems allow only about a thousand by default.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def available_cores(quota_file: Path = CPU_QUOTA) -> int:
    """Return the number of processor cores that this process may use: its affinity, and the quota of its container."""
    cores = len(os.sched_getaffinity(0))
    quota, _, period = quota_file.read_text().partition(" ") if quota_file.exists() else ("max", "", "")
    return cores if quota.strip() == "max" else max(1, min(cores, math.ceil(int(quota) / int(period))))


def tune_garbage_collector() -> None:
    """Exclude the objects that exist now from garbage collection, and collect the others less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


async def measure_delays(observe: Callable[[float], None]) -> NoReturn:
    """Call `observe` again and again with the seconds by which the event loop ran a timer too late.

    For this time, every other task waited, too.
    """
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + DELAY_INTERVAL_SECONDS
        await asyncio.sleep(DELAY_INTERVAL_SECONDS)
        observe(max(0.0, loop.time() - due))


async def collect_garbage(interval: float) -> NoReturn:
    """Collect all garbage every `interval` seconds, and return free memory every `TRIM_SECONDS`.

    The thresholds of the collector count objects. With little load, they are not reached for hours, and the few objects
    of a lost connection to the database hold megabytes.
    """
    collected_at = monotonic()
    while True:
        await asyncio.sleep(min(interval, TRIM_SECONDS))
        if monotonic() - collected_at >= interval:
            gc.collect()
            collected_at = monotonic()
        return_free_memory()


def return_free_memory() -> None:
    """Return the free pages of the C library's heap to the operating system.

    The C library itself returns only those at the end of its heap. So after a burst, it kept 50 of 190 MB in a soak,
    and 12 of 101 after a backfill.
    """
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc has it
        trim(0)
