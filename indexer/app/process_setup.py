"""Setup of a daemon process: signals, open files, processor cores, disk space, and the garbage collector."""

import asyncio
import ctypes
import gc
import math
import os
import resource
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, SimpleQueue
from time import monotonic
from typing import NamedTuple, NoReturn

import structlog

MAX_OPEN_FILES = 65_536
LOG_SECONDS = 1.0
"""Maximum time to write the last log line: the reader of stderr may hang."""
PARENT_ENDED = signal.SIGUSR1
"""The kernel sends it when the parent ends, once for each thread of the parent. So only the first one counts."""
CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""The quota of a container: microseconds of CPU time in each period, or `max`, and the length of the period."""
SIGNALS = (signal.SIGTERM, signal.SIGINT, PARENT_ENDED)

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
    watch = _SignalWatch(stop, timeout)
    before = {number: signal.signal(number, watch.on_signal) for number in SIGNALS}
    watch.start()
    try:
        yield
    finally:
        if not watch.signalled:
            for number, handler in before.items():
                signal.signal(number, handler)
            watch.end()


class _SignalWatch:
    """A thread that waits for signals: the event loop may be blocked, and may end before the threads of the process."""

    def __init__(self, stop: StopRequest, timeout: float) -> None:
        self._stop = stop
        self._timeout = timeout
        self._loop = asyncio.get_running_loop()
        self._signals = SimpleQueue[int]()  # unlike other queues, it may be used in a signal handler
        self._thread = threading.Thread(target=self._wait, name="signals", daemon=True)
        self.signalled = False

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        """End the thread, which has received no signal."""
        self._signals.put(0)
        self._thread.join()

    def on_signal(self, number: int, _frame: object) -> None:
        self.signalled = True
        self._signals.put(number)

    def _wait(self) -> None:
        """Wait for signals, and end the process after the second one or after the timeout."""
        if not self._signals.get():
            return
        self._loop.call_soon_threadsafe(self._stop.set)
        began = monotonic()
        while True:
            try:
                number = self._signals.get(timeout=max(0.0, began + self._timeout - monotonic()))
            except Empty:
                _end_process(self._log_timeout)
            if number != PARENT_ENDED:
                _end_process(self._log_second_signal)

    def _log_timeout(self) -> None:
        log.error("daemon.stop-timeout", unfinished=self._stop.step, seconds=self._timeout)

    def _log_second_signal(self) -> None:
        log.warning("daemon.stopped-at-once", unfinished=self._stop.step)


def _end_process(write_log_line: Callable[[], None]) -> None:
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


class DiskSpace(NamedTuple):
    """Free and total bytes of a file system; NaN if the system does not say it."""

    free: float
    size: float


def disk_space(directory: Path) -> DiskSpace:
    """Return the space for `directory`, or for its nearest parent if it does not exist yet."""
    path = directory.absolute()
    try:
        usage = shutil.disk_usage(next(place for place in (path, *path.parents) if place.exists()))
    except OSError:  # for example, a network file system that has gone
        return DiskSpace(math.nan, math.nan)
    return DiskSpace(usage.free, usage.total)


def tune_garbage_collector() -> None:
    """Exclude the objects that exist now from garbage collection, and collect the others less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


async def collect_garbage(interval: float) -> NoReturn:
    """Collect all garbage every `interval` seconds, and return the free memory to the operating system.

    The thresholds of the collector count objects. With little load, they are not reached for hours, and the few objects
    of a lost connection to the database hold megabytes.
    """
    while True:
        await asyncio.sleep(interval)
        gc.collect()
        return_free_memory()


def return_free_memory() -> None:
    """Return the free pages of the C library's heap to the operating system.

    The C library itself returns only those at the end of its heap. So after a burst, it kept 50 of 190 MB in a soak.
    """
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc has it
        trim(0)
