"""Setup of a daemon process: signals, the limit of open files, and the garbage collector."""

import asyncio
import gc
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import structlog

MAX_OPEN_FILES = 65_536

log = structlog.get_logger(__name__)


@contextmanager
def stop_on_signals(stop: asyncio.Event) -> Iterator[None]:
    """Set `stop` at SIGTERM or SIGINT, within the block. A second signal cancels the present task."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()

    def on_signal() -> None:
        if stop.is_set() and task is not None:
            log.warning("daemon.stopped-at-once")
            task.cancel()
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


def raise_file_limit() -> None:
    """Raise the limit of open files to `MAX_OPEN_FILES`, or as far as the system allows.

    Every connection is an open file, and many systems allow only about a thousand by default.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def tune_garbage_collector() -> None:
    """Exclude the objects that exist now from garbage collection, and collect the others less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
