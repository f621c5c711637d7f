"""The command `identities` and its subcommand `import`."""

from dataclasses import replace
from pathlib import Path
from time import monotonic, time

import click

from indexer.app.clients import make_plc_operations, open_outbound_client
from indexer.app.settings import Settings
from indexer.cli.command import CommandError, ExitCode, command, command_group, json_option
from indexer.cli.database import connect_database
from indexer.cli.output import CommandProgress, echo_result
from indexer.db.crawls import CrawlProgress
from indexer.db.shard_lock import OPERATIONS
from indexer.net.identity.plc_export import operations_in_file
from indexer.telemetry.conditions import Conditions
from indexer.telemetry.metrics import Metrics

FIRST_OPERATION = 1_668_643_200.0
"""The day of the first operation at plc.directory, in Unix seconds. The total for the progress is estimated from it."""


identities_command = command_group("identities", "Import the identities of accounts from a PLC directory.")


@command("import", identities_command)
@click.option(
    "--file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Read a file with the lines of the export (.gz: compressed).",
)
@click.option("--all", "everything", is_flag=True, help="Store all identities, not only those of tracked repos.")
@click.option("--again", is_flag=True, help="Begin with the first operation, for repos that were added later.")
@json_option
async def import_command(settings: Settings, *, file: Path | None, everything: bool, again: bool) -> None:
    """Verify the operations of the first PLC directory, and store keys, hosts and handles.

    Continues after the last import, or the last daemon with INDEXER_PLC_FOLLOW.
    """
    metrics = Metrics()
    async with (
        connect_database(settings, connections=2) as db,
        open_outbound_client(settings, metrics.outbound_request) as outbound,
        db.shard_locks.open(OPERATIONS) as lock,
    ):
        if not await lock.claim():
            owners = "; ".join(await db.shard_locks.owners(OPERATIONS))
            raise CommandError(f"another process reads the operations of the directory: {owners}", ExitCode.FAILED)
        reading = make_plc_operations(settings, db, outbound, Conditions(), metrics)
        begun = await reading.begin(everything=everything)
        if again or begun.cursor is None:
            begun = replace(begun, cursor=None, listed=0, found=0, finished_at=None)
            await db.crawls.begin_operations(begun)
        began = monotonic()
        with CommandProgress("operations", None) as progress:

            def show(now: CrawlProgress, read_until: float) -> None:
                rate = (now.listed - begun.listed) / max(monotonic() - began, 0.001)
                total = now.listed * (time() - FIRST_OPERATION) / max(read_until - FIRST_OPERATION, 1)
                progress.show(now.listed, total=total, note=f"{rate:,.0f} per second, {now.found:,} proven")

            pages = reading.export.pages if file is None else lambda cursor: operations_in_file(file, cursor)
            ended = await reading.read(begun, pages(begun.cursor), show)
    seconds, read, proven = monotonic() - began, ended.listed - begun.listed, ended.found - begun.found
    result = {"operations": read, "proven": proven, "position": ended.cursor, "seconds": round(seconds, 1)}
    text = f"operations: {read:,} read, {proven:,} proven, {read / max(seconds, 0.001):,.0f} per second"
    echo_result(result, text)
