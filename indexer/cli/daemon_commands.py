"""The commands `run`, `migrate` and `demo`."""

import click

from indexer.app.settings import DEMO_SETTINGS, Settings, load_from_environment
from indexer.cli.arguments import LISTEN_ADDRESS, Number, WholeNumber
from indexer.cli.command import ExitCode, command, config_file, json_option
from indexer.cli.output import echo_result, show_progress
from indexer.cluster.tables import on_all_nodes
from indexer.telemetry.log import configure_logging


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
    from indexer.app.processes import run, run_several  # noqa: PLC0415 - `migrate` and `demo` do not need it

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


@command("demo", load=lambda _: load_from_environment(*DEMO_SETTINGS))
@click.option(
    "--seconds",
    default=30.0,
    show_default=True,
    type=Number(5, 3_600),
    help="Duration of the activity in the network, in seconds.",
)
@click.option("--keep", is_flag=True, help="Continue to run after the comparison, until Ctrl-C.")
@click.option(
    "--serve",
    type=LISTEN_ADDRESS,
    metavar="HOST:PORT",
    help="Run no daemon: serve the network at this address and the next three ports until SIGTERM or SIGINT. "
    "Its accounts also write statuses of the example app Statusphere, and its PDSes accept records from everybody.",
)
@click.option(
    "--database",
    metavar="URL",
    help="Use this database instead of an embedded one: any without repos, for example on a Citus cluster. "
    "Delete it afterwards.",
)
async def demo_command(
    settings: Settings, *, seconds: float, keep: bool, serve: tuple[str, int] | None, database: str | None
) -> int:
    """Run the daemon against a small local network.

    All commits of the network are really signed. At the end, database and network are compared. All hosts are on
    loopback, and all data is temporary, except in a database that you name. Settings have no effect, except
    INDEXER_LOG_FORMAT, INDEXER_LOG_LEVEL, INDEXER_CORE and INDEXER_VERIFY_THREADS. The exit code is 0 only if every
    repo is synchronized and equal.
    """
    if serve is not None:
        from indexer.cli.demo_network import serve_network  # noqa: PLC0415 - loads the local network

        return await serve_network(*serve, seconds)
    from indexer.cli.demo import demo  # noqa: PLC0415

    if "log_level" not in settings.model_fields_set:
        # The network causes warnings on purpose, and they would disturb the live table.
        configure_logging(settings.log_format, "error")
    return await demo(settings, seconds, keep=keep, url=database)
