"""The parent process of an embedded server. It stops the server when no process uses it any more.

`cluster` runs this file as a script, with the standard library only. The process detaches from the one that started it,
because others may use the server longer. If this process is killed, the kernel sends SIGINT to the server.

Each user of the server has a connection to the socket `control`, which the kernel closes if the user is killed. The
parent sends `joined` to a new user, and `ended` with the exit code when the server has ended. A user that leaves shuts
down its side of the connection and waits until the parent closes the other one: at once if other users remain,
otherwise when the server has stopped.
"""

import ctypes
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

CONTROL = "control"
"""The file name of the socket."""
JOINED = b"joined\n"
ENDED = "ended"
PR_SET_PDEATHSIG = 1
STOP_SECONDS = ((signal.SIGINT, 60.0), (signal.SIGQUIT, 10.0), (signal.SIGKILL, None))
"""Signals that stop the server, and how long each one may take: fast shutdown, immediate shutdown, kill. After the last
two, the next start recovers from the write-ahead log, and no committed transaction is lost."""


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """Everything that the parent needs to run a server. It is JSON on the standard input of this script.

    Attributes:
        command: The command line of the server.
        environment: The environment of the server.
        account: User and group of the server; None if they are those of the parent.
        directory_fd: The locked directory of the cluster, which the server inherits.
        user_fd: The connection of the first user.
        locks: Open files whose locks last as long as the parent.
        log: The log file of the server.
        max_log_bytes: The log is rotated when it is larger.
        log_interval: Seconds between two checks of the size of the log.
        remove: Paths to remove after the server has ended.
    """

    command: Sequence[str]
    environment: dict[str, str]
    account: tuple[int, int] | None
    directory_fd: int
    user_fd: int
    locks: Sequence[int]
    log: str
    max_log_bytes: int
    log_interval: float
    remove: Sequence[str]


def control_path(directory_fd: int) -> str:
    """Return the path of the socket, which is short enough for a socket whatever the path of the directory is."""
    return f"/proc/self/fd/{directory_fd}/{CONTROL}"


def run(plan: ServerPlan) -> None:
    """Run a server until it ends, or until its last user leaves."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # only the users decide when the server stops
    listener = _listen(plan.directory_fd)
    wake_up = _wake_up_on_child_exit()
    server = _start(plan)
    users = [socket.socket(fileno=plan.user_fd)]
    _send(users[0], JOINED)
    try:
        _serve(plan, server, listener, wake_up, users)
        listener.close()  # later users wait for the lock of the owner, and then start a server
        code = _stop(server)
    finally:
        Path(control_path(plan.directory_fd)).unlink(missing_ok=True)
        for path in map(Path, plan.remove):
            if path.is_symlink():
                path.unlink()
            else:
                shutil.rmtree(path, ignore_errors=True)
    for user in users:
        _send(user, f"{ENDED} {code}\n".encode())


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


def _listen(directory_fd: int) -> socket.socket:
    path = control_path(directory_fd)
    Path(path).unlink(missing_ok=True)  # left by a parent that was killed
    listener = socket.socket(socket.AF_UNIX)
    mask = os.umask(0o177)  # only the same account may connect
    listener.bind(path)
    os.umask(mask)
    listener.listen()
    return listener


def _wake_up_on_child_exit() -> socket.socket:
    """Return a socket that becomes readable when a child process ends."""
    reader, writer = socket.socketpair()
    reader.setblocking(False)
    writer.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(writer.detach(), warn_on_full_buffer=False)
    return reader


def _start(plan: ServerPlan) -> "subprocess.Popen[bytes]":
    rotate_log(Path(plan.log), plan.max_log_bytes)
    user, group = plan.account or (None, None)
    return subprocess.Popen(  # noqa: S603 - the command is our own
        plan.command,
        stdin=subprocess.DEVNULL,
        env=plan.environment,
        pass_fds=[plan.directory_fd],
        user=user,
        group=group,
        extra_groups=None if plan.account is None else [],
        preexec_fn=lambda: end_with_parent(signal.SIGINT),  # noqa: PLW1509 - this process has one thread
    )


def _serve(
    plan: ServerPlan,
    server: "subprocess.Popen[bytes]",
    listener: socket.socket,
    wake_up: socket.socket,
    users: list[socket.socket],
) -> None:
    """Accept and dismiss users, until the server ends or the last user leaves. That user stays in the list."""
    with selectors.DefaultSelector() as selector:
        for readable in (listener, wake_up, *users):
            selector.register(readable, selectors.EVENT_READ)
        while server.poll() is None:
            for key, _ in selector.select(plan.log_interval):
                if key.fileobj is wake_up:
                    wake_up.recv(1024)
                elif key.fileobj is listener:
                    user, _ = listener.accept()
                    users.append(user)
                    selector.register(user, selectors.EVENT_READ)
                    _send(user, JOINED)
                elif len(users) == 1:
                    return
                else:
                    user = next(user for user in users if user is key.fileobj)
                    selector.unregister(user)
                    users.remove(user)
                    user.close()
            rotate_log(Path(plan.log), plan.max_log_bytes)


def _stop(server: "subprocess.Popen[bytes]") -> int:
    """Stop the server, and return its exit code."""
    for number, seconds in STOP_SECONDS:
        if server.poll() is None:
            server.send_signal(number)
            with suppress(subprocess.TimeoutExpired):
                server.wait(seconds)
    return server.wait()


def _send(user: socket.socket, line: bytes) -> None:
    with suppress(OSError):  # the user was killed
        user.sendall(line)


if __name__ == "__main__":
    given = ServerPlan(**json.load(sys.stdin))
    if os.fork() == 0:  # init adopts the child, which outlives the process that started it
        run(given)
