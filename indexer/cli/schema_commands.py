"""The commands `migrate` and `distribute`."""

from dataclasses import asdict

import click

from indexer.app.settings import Settings
from indexer.cli.command import command, json_option
from indexer.cli.database import open_database
from indexer.cli.output import CommandProgress, echo_result
from indexer.cluster.distribute import Distribution, distribute
from indexer.cluster.tables import on_all_nodes
from indexer.db.migrate import migrate
from indexer.db.requirements import opened, schema_state
from indexer.sync.shard import BUCKETS


@command("migrate")
@json_option
async def migrate_command(settings: Settings) -> None:
    """Upgrade the database schema to the version of this release."""
    async with open_database(settings) as dsn:
        await migrate(dsn, on_all_nodes)
        async with opened(dsn) as connection:
            version = (await schema_state(connection)).database
    echo_result({"version": version}, f"The database schema is current: version {version}.")


@command("distribute")
@click.option(
    "--shards",
    type=click.Choice([1 << bit for bit in range(BUCKETS.bit_length())]),
    metavar="N",
    help="Number of shards of each table, a power of two. At most as many nodes can share the rows. A larger number "
    "than before splits the shards. Default: at least two for each node.",
)
@json_option
async def distribute_command(settings: Settings, *, shards: int | None) -> None:
    """Distribute the tables over the nodes of a Citus cluster.

    INDEXER_DATABASE_URL names the coordinator, whose database was migrated. Its role must own the database. Stop all
    daemons first. If the command is interrupted, run it again. On a distributed database, it changes nothing, unless
    --shards is larger than before. There is no way back, except to a new database (docs/scaling.md).
    """
    async with open_database(settings) as dsn:
        with CommandProgress("tables or shards", None) as progress:
            result = await distribute(
                dsn, shards, lambda table, done, total: progress.show(done, total=total, note=table)
            )
    for notice in result.notices:
        click.echo(notice, err=True)
    echo_result(asdict(result), _text(result))


def _text(result: Distribution) -> str:
    did = f"Distributed {', '.join(result.tables)}." if result.tables else "Every table is distributed already."
    return f"{did} Each table has {result.shards} shards on {len(result.nodes)} nodes: {', '.join(result.nodes)}."
