"""The commands `backup` and `restore`."""

from pathlib import Path

import click

from indexer.app.settings import Settings
from indexer.cli.arguments import OUTPUT_FILE
from indexer.cli.command import ExitCode, command, json_option
from indexer.cli.database import open_database
from indexer.cli.output import echo_result, progress_console
from indexer.cli.progress_bars import show_progress
from indexer.db.dump import dump, restore
from indexer.db.schema_version import require_current_schema


@command("backup")
@click.argument("file", type=OUTPUT_FILE, metavar="FILE")
@json_option
async def backup_command(settings: Settings, *, file: Path, as_json: bool) -> int:
    """Write a backup of the database to a file.

    The file has the schemas indexer, atproto and lexicon as of one point in time; it does not have other schemas or
    roles. Its format is the custom one of pg_dump. A daemon may run meanwhile, except on a cluster, whose nodes do not
    read at the same moment. The file appears only when it is complete. pg_dump must not be older than the server; the
    one of the embedded Postgres is used, or the one in INDEXER_PG_BINDIR. If the server is older than Postgres 17, use
    the programs of its version: a newer pg_restore cannot restore into it.
    """
    async with open_database(settings) as dsn:
        await require_current_schema(dsn)
        with show_progress("bytes written", None, progress_console()) as progress:
            size = await dump(dsn, file, progress.update)
    echo_result({"file": str(file), "bytes": size}, f"{file}: {size:,} bytes", as_json=as_json)
    return ExitCode.OK


@command("restore")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE")
@json_option
async def restore_command(settings: Settings, *, file: Path, as_json: bool) -> int:
    """Restore a backup into an empty database.

    The file comes from `indexer backup` or from pg_dump in the custom format. The database must have none of the
    schemas `indexer`, `atproto` and `lexicon`. It is restored completely or not at all. The next `indexer run` upgrades
    the schema if necessary, and continues from the cursor in the backup (docs/runbook.md#back-up-and-restore). The
    backup of a cluster needs a cluster, and afterwards `indexer distribute`, before a daemon starts.
    """
    async with open_database(settings) as dsn:
        with show_progress("restore", None, progress_console()) as progress:
            await restore(dsn, file, lambda: progress.update(0))
    echo_result({"file": str(file)}, f"{file} is restored.", as_json=as_json)
    return ExitCode.OK
