"""The parent process of an embedded server. It stops the server when no process uses it any more.

`cluster` runs this file as a script, with the standard library only. The process detaches from the one that started it,
because others may use the server longer. If this process is killed, the kernel sends SIGINT to the server.
"""

import ctypes
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

PR_SET_PDEATHSIG = 1
STOP_SECONDS = ((signal.SIGINT, 60.0), (signal.SIGQUIT, 10.0), (signal.SIGKILL, 0.0))
"""Signals that stop the server, and how long each one may take: fast shutdown, immediate shutdown, kill. After the last
two, the next start recovers from the write-ahead log, and no committed transaction is lost."""


def run(
    command: Sequence[str],
    environment: Mapping[str, str],
    account: tuple[int, int] | None,
    directory_fd: int,
    users: str,
    log: str,
    max_log_bytes: int,
    log_interval: float,
) -> None:
    """Run a server until it ends, or until no process uses it.

    It runs as `account` (user and group; None: as this process), and inherits the locked directory of the cluster.
    Each of its users has locked the file `users`. Its log is checked every `log_interval` seconds, and rotated when it
    is larger than `max_log_bytes`.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # only the users decide when the server stops
    rotate_log(Path(log), max_log_bytes)
    user, group = account or (None, None)
    server = subprocess.Popen(  # noqa: S603 - the command is our own
        command,
        stdin=subprocess.DEVNULL,
        env=environment,
        pass_fds=[directory_fd],
        user=user,
        group=group,
        extra_groups=None if account is None else [],
        preexec_fn=lambda: end_with_parent(signal.SIGINT),  # noqa: PLW1509 - no other thread runs yet
    )
    threading.Thread(target=_stop_when_unused, args=(users, server), daemon=True).start()
    threading.Thread(target=_limit_log, args=(Path(log), max_log_bytes, log_interval), daemon=True).start()
    server.wait()


def rotate_log(log: Path, max_bytes: int) -> None:
    """Copy and truncate the log if it is too large. The server opened it for appending and continues in it.

    If that fails, for example because the disk is full, the log grows until the next call.
    """
    with suppress(OSError):
        if log.stat().st_size > max_bytes:
            with log.open("rb") as source, open_log(log.with_suffix(".log.1")) as copy:
                copy.truncate(0)
                shutil.copyfileobj(source, copy)
            os.truncate(log, 0)


def open_log(log: Path) -> BinaryIO:
    """Open a log file for appending. Only its owner may read it: it contains statements and their values."""
    log.touch(mode=0o600)
    log.chmod(0o600)
    return log.open("ab")


def end_with_parent(signal_number: signal.Signals) -> None:
    """Let the kernel send this signal to the calling process when its parent ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal_number)


def _stop_when_unused(users: str, server: "subprocess.Popen[bytes]") -> None:
    """Stop the server as soon as no user has its file locked. Until this process ends, nobody can lock it again."""
    fcntl.flock(os.open(users, os.O_RDWR), fcntl.LOCK_EX)
    for number, seconds in STOP_SECONDS:
        server.send_signal(number)
        time.sleep(seconds)


def _limit_log(log: Path, max_bytes: int, interval: float) -> None:
    while True:
        time.sleep(interval)
        rotate_log(log, max_bytes)


if __name__ == "__main__":
    given = json.load(sys.stdin)
    if os.fork() == 0:  # init adopts the child, which outlives the process that started it
        run(**given)
