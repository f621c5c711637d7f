"""A throw-away Citus cluster on this machine: a coordinator and workers, for tests and benchmarks.

Nothing of Citus is in this repository. It has to be installed in a Postgres of the machine, which is found by the file
`citus.control`. Tests on a cluster are skipped without it.
"""

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import asyncpg
import pytest

from tests.database_server import dsn_of
from tests.free_ports import free_ports

NOTICE = (
    "no Citus on this machine: install it in a Postgres whose pg_config is on the PATH or in /usr/lib/postgresql, "
    "or name that pg_config in INDEXER_TEST_PG_CONFIG"
)
COORDINATOR = "coordinator"
WORKERS = ("worker1", "worker2")
NO_SETTINGS = MappingProxyType[str, object]({})
SETTINGS: Mapping[str, object] = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "shared_preload_libraries": "citus",
    "wal_level": "logical",  # shards are moved by replication
    "max_connections": 300,
    "max_prepared_transactions": 300,
    "max_worker_processes": 64,  # Citus has a maintenance process in each database
    "max_wal_size": "1GB",  # the directory may be in memory
    "shared_buffers": "32MB",
    "fsync": "off",  # tests kill processes, not the machine
    "citus.node_conninfo": "sslmode=disable",
    "citus.recover_2pc_interval": "1s",
    "citus.defer_shard_delete_interval": -1,
}
ACCOUNTS = ("postgres", "nobody")
"""Postgres refuses to run as root, so root runs it as the first of these that exists."""
POLL_SECONDS = 0.02


def find_citus() -> Path | None:
    """Return the programs of the newest Postgres that has Citus; None if there is none."""
    installed = sorted(Path("/usr/lib/postgresql").glob("*/bin/pg_config"), key=lambda path: path.parts[4].zfill(3))
    named, on_path = os.environ.get("INDEXER_TEST_PG_CONFIG"), shutil.which("pg_config")
    for program in [named] if named else [on_path, *reversed(installed)]:
        with suppress(OSError, subprocess.CalledProcessError):
            command = [program or "", "--sharedir", "--bindir"]
            shared, binaries = map(Path, subprocess.check_output(command, text=True).splitlines())
            if (shared / "extension/citus.control").exists() and (binaries / "initdb").exists():
                return binaries
    return None


class Cluster:
    """The nodes, each a server of its own, which can be killed and started again.

    Attributes:
        names: The names of the nodes, the coordinator first.
        dir: The directory with the files of each node, which belongs to the account of the servers.
        ports: The port of each node on 127.0.0.1.
        binaries: The directory of the programs of Postgres.
    """

    def __init__(self, directory: Path, binaries: Path, workers: int, settings: Mapping[str, object]) -> None:
        """Create the files of the nodes in this empty directory."""
        self.names = [COORDINATOR, *(f"worker{number}" for number in range(1, workers + 1))]
        self.dir, self.binaries = directory, binaries
        first = free_ports(len(self.names))
        self.ports = {name: first + number for number, name in enumerate(self.names)}
        self._account: dict[str, Any] = {}
        if os.geteuid() == 0:
            account = next(entry for name in ACCOUNTS for entry in pwd.getpwall() if entry.pw_name == name)
            self._account = {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}
            os.chown(directory, account.pw_uid, account.pw_gid)
        for name in self.names:
            self.run("initdb", "-D", name, "-U", "postgres", "--auth=trust", "-E", "UTF8", "--locale=C", "--no-sync")
            own = {**SETTINGS, **settings, "port": self.ports[name]}
            with (directory / name / "postgresql.conf").open("a") as file:
                file.writelines(f"{key} = '{value}'\n" for key, value in own.items())

    def run(self, program: str, *arguments: str) -> None:
        """Run a program of Postgres as the account of the servers, in the directory. Raises `CalledProcessError`."""
        subprocess.run(
            [self.binaries / program, *arguments],
            cwd=self.dir,
            env={"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"},
            check=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            **self._account,
        )

    def url_of(self, name: str) -> str:
        """Return the URL of the database `postgres` of this node."""
        return f"postgresql://postgres@127.0.0.1:{self.ports[name]}/postgres"

    def pid_of(self, name: str) -> int | None:
        """Return the ID of the main process of this node; None if it does not run."""
        with suppress(OSError):
            pid = int((self.dir / name / "postmaster.pid").read_text().split("\n", 1)[0])
            if Path(f"/proc/{pid}/cwd").readlink() == self.dir / name:  # not another process with the ID of a dead one
                return pid
        return None

    def start(self, name: str) -> None:
        """Start a node, and wait until it answers."""
        self.run("pg_ctl", "start", "-w", "-t", "120", "-D", name, "-l", f"{name}.log")

    def kill(self, name: str) -> None:
        """Kill all processes of a node with SIGKILL, and wait until they have ended."""
        main = self.pid_of(name)
        if main is None:
            return
        os.kill(main, signal.SIGSTOP)  # so that it starts no more processes
        pids = [main, *map(int, Path(f"/proc/{main}/task/{main}/children").read_text().split())]
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        while any(map(_is_running, pids)):
            time.sleep(POLL_SECONDS)
        (self.dir / name / "postmaster.pid").unlink()  # its process may stay a zombie, which counts as running

    def kill_and_start(self, names: Sequence[str]) -> None:
        """Kill these nodes, and then start them again, the last one first."""
        for name in names:
            self.kill(name)
        for name in reversed(names):
            self.start(name)

    async def introduce(self, database: str = "postgres", workers: Sequence[str] = WORKERS) -> None:
        """Create the extension in a database of each node, and tell the coordinator the addresses of these workers."""
        for name in self.names:
            await _execute(dsn_of(self.url_of(name), database), "create extension citus")
        for name in (COORDINATOR, *workers):
            function = "citus_set_coordinator_host" if name == COORDINATOR else "citus_add_node"
            statement = f"select {function}('127.0.0.1', {self.ports[name]})"
            await _execute(dsn_of(self.url_of(COORDINATOR), database), statement)


@contextmanager
def new_cluster(directory: Path, binaries: Path, workers: int, settings: Mapping[str, object]) -> Iterator[Cluster]:
    """Run a cluster in this empty directory, with more settings of its servers. No database knows the nodes yet."""
    cluster = Cluster(directory, binaries, workers, settings)
    try:
        for name in cluster.names:
            cluster.start(name)
        yield cluster
    finally:
        for name in cluster.names:
            cluster.kill(name)


@contextmanager
def running_cluster(directory: Path, settings: Mapping[str, object] = NO_SETTINGS) -> Iterator[Cluster]:
    """Run a cluster with two workers for a test; skip it if there is no Citus."""
    binaries = find_citus()
    if binaries is None:
        pytest.skip(NOTICE)
    directory.chmod(0o711)  # as root, the servers run as another user
    is_reachable = all(parent.stat().st_mode & 0o001 for parent in directory.parents)
    with (
        tempfile.TemporaryDirectory(prefix="indexer-cluster-", dir=directory if is_reachable else None) as created,
        new_cluster(Path(created), binaries, len(WORKERS), settings) as cluster,
    ):
        yield cluster


async def _execute(dsn: str, statement: str) -> None:
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute(statement)
    finally:
        await connection.close()


def _is_running(pid: int) -> bool:
    """Return True if the process has not ended; one that is a zombie has."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False
