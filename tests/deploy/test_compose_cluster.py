"""The settings, the steps and the daemons of docker-compose.citus.yml, on a cluster without containers.

The image, the network of the containers and the password are not tested here.
"""

import asyncio
import re
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from urllib.parse import urlsplit

import asyncpg
import pytest

from indexer.localnet.local_network import LocalNetwork
from indexer.localnet.scenario import Scenario
from tests.citus.own_cluster import own_cluster
from tests.citus.test_several_machines import Machines, wait_until_equal
from tests.citus_cluster import COORDINATOR, Cluster
from tests.cli.command_line import run_indexer
from tests.daemon_forks import start_fork_server
from tests.database_checks import assert_change_log_consistent
from tests.deploy.files import compose
from tests.deploy.test_compose import CITUS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

STEPS = 60
DAEMONS = ("indexer0", "indexer1")


@pytest.fixture(scope="module", autouse=True)
def fork_server() -> None:
    start_fork_server()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Run the nodes with the settings of the file, and the user and the database that the image creates."""
    words = compose(CITUS)["services"][COORDINATOR]["command"]
    settings = dict(word.split("=") for word in words[1::2])
    with own_cluster(tmp_path_factory, settings) as cluster:
        yield cluster


async def create_database(cluster: Cluster, user: str, name: str) -> None:
    for node in cluster.names:
        connection = await asyncpg.connect(cluster.url_of(node))
        await connection.execute("set citus.enable_create_role_propagation = off")
        await connection.execute(f"create role {user} superuser login")
        await connection.execute(f"create database {name} owner {user}")
        await connection.close()
        connection = await asyncpg.connect(with_node(f"postgresql://{user}@{node}:5432/{name}", cluster))
        await connection.execute("create extension citus")
        await connection.close()


def with_node(text: str, cluster: Cluster) -> str:
    """Replace the names of the containers by the addresses of the nodes."""
    for node in cluster.names:
        text = text.replace(f"{node}:5432", f"127.0.0.1:{cluster.ports[node]}")
        text = text.replace(f"'{node}', 5432", f"'127.0.0.1', {cluster.ports[node]}")
    return text


async def run_setup(cluster: Cluster, dsn: str) -> list[str]:
    """Do what `docker compose run distribute` does; return the output of each step of the indexer."""
    services = compose(CITUS)["services"]
    statements = [word.partition("=")[2] for word in services["nodes"]["command"] if word.startswith("--command=")]
    connection = await asyncpg.connect(dsn)
    for statement in statements:
        await connection.execute(with_node(statement, cluster))
    nodes = await connection.fetch("select nodeport from pg_dist_node")
    await connection.close()
    assert {port for (port,) in nodes} == set(cluster.ports.values())
    output = []
    for service in ("migrate", "distribute"):
        done = await asyncio.to_thread(run_indexer, *services[service]["command"], INDEXER_DATABASE_URL=dsn)
        assert done.returncode == 0, done.stderr
        output.append(done.stdout)
    return output


async def test_the_steps_and_daemons_of_the_file_index_a_network(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.waiting.TIMEOUT", 200.0)
    services = compose(CITUS)["services"]
    environment = services[COORDINATOR]["environment"]
    await create_database(cluster, environment["POSTGRES_USER"], environment["POSTGRES_DB"])
    dsn = with_node(services["indexer0"]["environment"]["INDEXER_DATABASE_URL"], cluster)
    assert urlsplit(dsn).port == cluster.ports[COORDINATOR]
    _, first = await run_setup(cluster, dsn)
    assert re.match(r"Distributed .*4 shards on 2 nodes", first)
    _, second = await run_setup(cluster, dsn)
    assert second.startswith("Every table is distributed already."), "repeated, the steps change nothing"
    async with LocalNetwork() as network, AsyncExitStack() as stack:
        scenario = Scenario(network, seed=6)
        machines = Machines(network, dsn, tmp_path)
        for name in DAEMONS:
            shard = services[name]["environment"]["INDEXER_SHARD"]
            await stack.enter_async_context(machines.daemon(shard=shard).supervised())
        for step in range(STEPS):
            scenario.perform(step, STEPS)
        await wait_until_equal(machines, network, dsn, shards=len(DAEMONS))
    await assert_change_log_consistent(dsn)
