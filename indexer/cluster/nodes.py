"""The nodes of a Citus cluster, and what each of them must have before the tables are distributed over them."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from indexer.db.columns import Connection
from indexer.db.requirements import unsupported_version

OLDEST_CITUS = 12
"""The oldest major version that this program accepts. The tests run with 13.2."""

_NODES = """
    select nodeid, nodename || ':' || nodeport as name, groupid = 0 as is_coordinator, shouldhaveshards as holds_shards
    from pg_dist_node where noderole = 'primary' and isactive and nodecluster = current_setting('citus.cluster_name')
    order by groupid
"""
_FACTS = """
    select nodeid, success, result from run_command_on_all_nodes($command$
        select json_build_object(
            'postgres', current_setting('server_version_num')::int,
            'citus', (select extversion from pg_extension where extname = 'citus'),
            'connections', current_setting('max_connections')::int,
            'prepared', current_setting('max_prepared_transactions')::int,
            'is_owner', (select pg_has_role(datdba, 'usage') from pg_database where datname = current_database())
        )
    $command$)
"""


@dataclass(frozen=True, slots=True)
class ClusterNode:
    """A node of a cluster, with the columns of `_NODES` and the members of `_FACTS`.

    Attributes:
        postgres: `server_version_num`.
        is_owner: The role of this session owns the database there, or is a superuser.
    """

    id: int
    name: str
    is_coordinator: bool
    holds_shards: bool
    postgres: int
    citus: str
    connections: int
    prepared: int
    is_owner: bool


class UnsuitableClusterError(Exception):
    """The operator has to change something before the tables can be distributed. The message says what."""


async def load_nodes(connection: Connection) -> list[ClusterNode]:
    """Return the nodes of the cluster, the coordinator first.

    Raises:
        UnsuitableClusterError: There is no cluster, this is not its coordinator, or a node does not answer.
    """
    version = await connection.fetchval("select extversion from pg_extension where extname = 'citus'")
    if version is None:
        raise UnsuitableClusterError(
            "it is a plain Postgres database without the extension citus: there are no nodes to distribute it over, "
            "and it works as it is"
        )
    if _major(version) < OLDEST_CITUS:
        raise UnsuitableClusterError(f"it has Citus {version}; this program needs Citus {OLDEST_CITUS} or newer")
    if not await connection.fetchval("select groupid = 0 from pg_dist_local_group"):
        raise UnsuitableClusterError("it is a worker of the cluster; use the URL of the coordinator")
    nodes = await connection.fetch(_NODES)
    if not any(node["is_coordinator"] for node in nodes):
        raise UnsuitableClusterError(
            "the coordinator is not a node of its cluster; run there: "
            "select citus_set_coordinator_host('the address by which the workers reach it', its port)"
        )
    answers = {row["nodeid"]: row for row in await connection.fetch(_FACTS)}
    silent = [f"{node['name']} ({row['result']})" for node in nodes if not (row := answers[node["nodeid"]])["success"]]
    if silent:
        raise UnsuitableClusterError(f"these nodes do not answer the coordinator: {', '.join(silent)}")
    return [ClusterNode(*node, **json.loads(answers[node["nodeid"]]["result"])) for node in nodes]


def check_nodes(nodes: Sequence[ClusterNode]) -> None:
    """Check that the nodes can hold the tables.

    Each session of the coordinator has at most one connection and one prepared transaction on a node at the end of its
    transaction, so the nodes need at least as many of both as the coordinator has sessions.

    Raises:
        UnsuitableClusterError: They cannot. The message has everything that must be changed.
    """
    coordinator, problems = nodes[0], list[str]()
    if not any(node.holds_shards for node in nodes):
        problems.append("no node may hold shards; add a worker with citus_add_node")
    if not_owned := [node.name for node in nodes if not node.is_owner]:
        problems.append(
            f"the role must own the database on {', '.join(not_owned)}; let an administrator run on the coordinator: "
            "alter database … owner to …"
        )
    for node in nodes:
        if (problem := unsupported_version(node.postgres)) is not None:
            problems.append(f"{node.name}: {problem}")
        if _major(node.citus) != _major(coordinator.citus):
            problems.append(f"{node.name} has Citus {node.citus}, and the coordinator Citus {coordinator.citus}")
        needed = coordinator.connections
        for setting, value in (("max_connections", node.connections), ("max_prepared_transactions", node.prepared)):
            if value < needed:
                problems.append(f"{node.name} needs {setting} = {needed} or more; it has {value}")
    if problems:
        raise UnsuitableClusterError("; ".join(problems))


def _major(version: str) -> int:
    match = re.match(r"\d+", version)
    return int(match[0]) if match else 0
