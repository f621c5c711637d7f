"""The commands `run` and `migrate`."""

import click

from indexer.app.settings import Settings
from indexer.cli.arguments import WholeNumber
from indexer.cli.command import ExitCode, command, config_file, json_option
from indexer.cli.output import echo_result, show_progress
from indexer.cluster.tables import on_all_nodes


@command("run")
@click.option(
    "--no-migrate", is_flag=True, help="Do not upgrade the database schema; stop if this release cannot use it."
)
@click.option(
    "--processes",
    default=1,
    type=WholeNumber(1, 64),
    help="Number of daemon processes; each owns a range of buckets.",
)
async def run_command(settings: Settings, *, no_migrate: bool, processes: int) -> int:
    """Run the daemon: consume, verify, resync, serve health checks and metrics.

    On SIGTERM or SIGINT, the daemon stores the received messages and stops. A second signal stops at once.
    """
    from indexer.app.processes import run, run_several  # noqa: PLC0415 - `migrate` does not need it

    if processes == 1:
        return await run(settings, migrate_first=not no_migrate)
    return await run_several(settings, processes, config_file(), migrate_first=not no_migrate)


@command("migrate")
@json_option
async def migrate_command(settings: Settings, *, as_json: bool) -> int:
    """Upgrade the database schema to the version of this release."""
    from indexer.cli.database import open_database  # noqa: PLC0415 - loads the database drivers
    from indexer.db.migrate import migrate  # noqa: PLC0415
    from indexer.db.schema_version import schema_state  # noqa: PLC0415

    async with open_database(settings) as dsn:
        with show_progress("versions of the schema", None) as progress:
            await migrate(
                dsn,
                on_version=lambda applied, total: progress.update(applied, total=total),
                changing=on_all_nodes,
            )
        version = (await schema_state(dsn)).database
    echo_result({"version": version}, f"The database schema is current: version {version}.", as_json=as_json)
    return ExitCode.OK
