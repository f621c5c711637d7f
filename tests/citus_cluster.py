"""A throw-away Citus cluster for the tests: a coordinator and two workers on this machine.

The project contains nothing of Citus, which has another license. `tests/citus/setup.sh` installs it. The program that
starts a cluster is in shared/citus beside the repository, or in the directory CITUS_DIRECTORY. Tests that need either
are skipped without it.
"""

import importlib.util
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, cast

import pytest

FOLDER = Path(os.environ.get("CITUS_DIRECTORY", Path(__file__).parents[2] / "shared" / "citus"))
PROGRAM = FOLDER / "cluster.py"
NOTICE = f"NO TEST RAN ON CITUS: {PROGRAM} or the installation of Citus is missing (tests/citus/setup.sh)"
COORDINATOR = "coordinator"
WORKERS = ("worker1", "worker2")
SETTINGS = {
    "max_worker_processes": 64,  # Citus has a maintenance process in each database
    "max_wal_size": "1GB",  # the directory may be in memory
    "citus.recover_2pc_interval": "1s",
    "citus.defer_shard_delete_interval": "-1",
    "restart_after_crash": "on",
}


class Cluster(Protocol):
    """The cluster as the program starts it. `names` are the nodes, the coordinator first."""

    names: list[str]
    dir: Path
    ports: dict[str, int]

    def url_of(self, name: str) -> str:
        """Return the URL of the database `postgres` of this node."""

    def kill(self, name: str, how: signal.Signals = signal.SIGKILL) -> None:
        """Kill all processes of this node."""

    def start(self, name: str) -> None:
        """Start a killed node, and wait until it answers."""

    def close(self) -> None:
        """Stop all nodes and remove their files."""


@contextmanager
def running_cluster(directory: Path, settings: Mapping[str, object] = MappingProxyType({})) -> Iterator[Cluster]:
    """Run a cluster in this directory, with more settings of its servers; skip the test if Citus is not installed."""
    program = _program()
    start = cast("Callable[..., Cluster]", program.Cluster)
    conf = "\n".join(f"{name} = '{value}'" for name, value in {**SETTINGS, **settings}.items())
    directory.chmod(0o711)  # as root, the servers run as another user
    with _temporary_files_in(directory):
        try:
            cluster = start(workers=len(WORKERS), conf=conf, shared_buffers=32)
        except program.NoCitusError as error:
            pytest.skip(f"{NOTICE}: {error}")
    try:
        yield cluster
    finally:
        cluster.close()


def _program() -> Any:
    """Import the program that starts clusters, without a cache of its bytecode: its folder is read-only."""
    if not PROGRAM.exists():
        pytest.skip(NOTICE)
    spec = importlib.util.spec_from_file_location("citus_cluster_program", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        spec.loader.exec_module(module)
    finally:
        sys.dont_write_bytecode = before
    return module


@contextmanager
def _temporary_files_in(directory: Path) -> Iterator[None]:
    before, tempfile.tempdir = tempfile.tempdir, str(directory)
    try:
        yield
    finally:
        tempfile.tempdir = before
