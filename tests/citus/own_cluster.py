"""Clusters with settings of their own, or whose nodes a test kills."""

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

import pytest

from indexer.cluster.distribute import distribute
from indexer.db.migrate import migrate
from tests.citus_cluster import COORDINATOR, Cluster, running_cluster
from tests.citus_server import SHARDS
from tests.database_server import memory_directory

NO_SETTINGS = MappingProxyType[str, object]({})


@contextmanager
def own_cluster(directories: pytest.TempPathFactory, settings: Mapping[str, object] = NO_SETTINGS) -> Iterator[Cluster]:
    """Run a cluster with more settings of its servers, in memory if there is enough."""
    with (
        memory_directory() as directory,
        running_cluster(directory or directories.mktemp("citus"), settings) as cluster,
    ):
        asyncio.run(cluster.introduce())
        yield cluster


@contextmanager
def own_distributed_cluster(
    directories: pytest.TempPathFactory, settings: Mapping[str, object] = NO_SETTINGS
) -> Iterator[Cluster]:
    """Run a cluster whose database `postgres` has the latest schema and is distributed."""
    with own_cluster(directories, settings) as cluster:
        asyncio.run(distribute_new_schema(cluster.url_of(COORDINATOR)))
        yield cluster


async def distribute_new_schema(dsn: str) -> None:
    """Create the latest schema and distribute its tables."""
    await migrate(dsn)
    await distribute(dsn, SHARDS, lambda *_: None)
