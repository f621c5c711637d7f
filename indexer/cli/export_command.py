"""The command `export`."""

import sys
from pathlib import Path
from typing import Literal

import click

from indexer.app.clients import stored_policy
from indexer.app.settings import Settings
from indexer.cli.arguments import NSID, OUTPUT_FILE
from indexer.cli.command import ExitCode, command, report_error
from indexer.cli.database import open_store
from indexer.cli.export_files import export, require_library
from indexer.db import Store


@command("export")
@click.option("--collection", required=True, metavar="NSID", type=NSID, help="Export the records of this collection.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["jsonl", "parquet"]),
    default="jsonl",
    show_default=True,
    help="Format of the file.",
)
@click.option("--output", "-o", type=OUTPUT_FILE, help="Write to this file. Default: stdout.")
async def export_command(
    settings: Settings, *, collection: str, form: Literal["jsonl", "parquet"], output: Path | None
) -> int:
    """Write all visible records of a collection to a file.

    The file has the records of one point in time, as JSON lines or Parquet. Parquet needs the library pyarrow,
    which the extra `parquet` of the package installs. The file appears only when it is complete. The memory use does
    not depend on the number of records. The exit code is 4 if no record of the collection is stored, and neither the
    scope nor a stored lexicon names it.
    """
    if form == "parquet" and output is None and sys.stdout.isatty():
        raise click.UsageError("Parquet cannot be written to a terminal. Give --output.")
    require_library(form)
    async with open_store(settings) as store:
        if not await _is_known(settings, store, collection):
            text = "no record of it is stored, and neither the scope nor a lexicon names it"
            return report_error(f"{collection} is unknown: {text}", ExitCode.UNKNOWN)
        count = await export(store, collection, form, output)
    click.echo(f"records: {count:,}", err=True)
    return ExitCode.OK


async def _is_known(settings: Settings, store: Store, collection: str) -> bool:
    """Return False if the name is probably misspelled: the file would be empty."""
    scope = (await stored_policy(settings, store)).scope
    return (
        collection in scope.collections.patterns
        or await store.has_records(collection)
        or collection in await store.lexicons()
    )
