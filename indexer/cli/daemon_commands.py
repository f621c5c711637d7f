"""The commands `run`, `migrate` and `demo`."""

import click

from indexer.cli.command import ExitCode, command, config_file
from indexer.monitoring.log import configure_logging
from indexer.settings import Settings


@command("run")
@click.option("--no-migrate", is_flag=True, help="Do not upgrade the database schema; stop if it is not current.")
@click.option(
    "--processes",
    default=1,
    type=click.IntRange(1, 64),
    help="Number of daemon processes; each owns a range of buckets.",
)
async def run_command(settings: Settings, *, no_migrate: bool, processes: int) -> int:
    """Run the daemon: consume, verify, resync, serve health checks and metrics.

    On SIGTERM or SIGINT, the daemon stores the received messages and stops. A second signal stops at once.
    """
    if processes == 1:
        from indexer.daemon import run  # noqa: PLC0415 - `migrate` and `demo` do not need it

        return await run(settings, migrate_first=not no_migrate)
    from indexer.cli.supervisor import supervise  # noqa: PLC0415

    return await supervise(settings, processes, config_file(), migrate_first=not no_migrate)


@command("migrate")
async def migrate_command(settings: Settings) -> int:
    """Upgrade the database schema to the version of this release."""
    from indexer.cli.database import open_database  # noqa: PLC0415 - loads the database drivers
    from indexer.store.migrate import migrate  # noqa: PLC0415

    async with open_database(settings) as dsn:
        await migrate(dsn)
    click.echo("The database schema is current.")
    return ExitCode.OK


@command("demo")
@click.option(
    "--seconds",
    default=30.0,
    show_default=True,
    type=click.FloatRange(5, 3_600),
    help="Duration of the activity in the network, in seconds.",
)
async def demo_command(settings: Settings, *, seconds: float) -> int:
    """Run the daemon against a small local network.

    All commits of the network are really signed. At the end, database and network are compared. All data is temporary,
    and all hosts are on loopback. The exit code is 0 only if every repo is synchronized and equal.
    """
    from indexer.cli.demo import demo  # noqa: PLC0415 - loads the local network

    if "log_level" not in settings.model_fields_set:
        # The network causes warnings on purpose, and they would disturb the live table.
        configure_logging(settings.log_format, "error")
    return await demo(settings, seconds)
