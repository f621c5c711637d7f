"""The commands `discover` and `sweep`, which read the repo list of a host."""

import click

from indexer.cli.arguments import NSID, ORIGIN
from indexer.cli.command import ExitCode, command
from indexer.cli.database import open_store
from indexer.cli.output import progress_console
from indexer.cli.progress_bars import crawl_progress_bar
from indexer.clients import http_origin, open_outbound_client
from indexer.monitoring.metrics import Metrics
from indexer.service.crawl.discover import Discovery
from indexer.settings import Settings


@command("discover")
@click.option(
    "--collection",
    "collections",
    multiple=True,
    metavar="NSID",
    type=NSID,
    help="Add only accounts that have records of this collection. May be repeated.",
)
@click.option("--relay", metavar="URL", type=ORIGIN, help="Ask this relay. Default: the first of INDEXER_RELAYS.")
@click.option("--pds", metavar="URL", type=ORIGIN, help="Ask this PDS instead of a relay.")
async def discover_command(
    settings: Settings, *, collections: tuple[str, ...], relay: str | None, pds: str | None
) -> int:
    """List the accounts of a host and start to track the unknown ones.

    The daemon fetches each repo and follows it from then on. An interrupted discovery continues where it stopped. Only
    a few hosts besides relays can list accounts by collection.
    """
    if relay and pds:
        raise click.UsageError("Give either --relay or --pds, not both.")
    source = relay or pds or http_origin(settings.relays[0])
    async with open_store(settings) as store, open_outbound_client(settings) as outbound:
        discovery = Discovery(store, outbound)
        for collection in collections or ("",):
            progress = await discovery.begin(source, collection)
            name = f"{collection or 'all accounts'} of {source}"
            if progress.cursor is not None:
                click.echo(f"{name}: continuing after {progress.listed:,} accounts", err=True)
            with crawl_progress_bar(name, None, progress_console()) as on_progress:
                progress = await discovery.run(progress, on_progress)
            click.echo(f"{name}: {progress.listed} listed, {progress.found} added")
    if discovery.invalid_entries:
        click.echo(
            f"entries of the list that are not valid accounts and were skipped: {discovery.invalid_entries}", err=True
        )
    return ExitCode.OK


@command("sweep")
async def sweep_command(settings: Settings) -> int:
    """Compare the relay's repo list with the database.

    Request a resync for repos that are behind. A repo that seems behind is checked again after half a minute, because
    the stream may still deliver its commits. The daemon does the same every INDEXER_SWEEP_INTERVAL, and whenever the
    relay reports a gap.
    """
    from indexer.daemon import make_reconciliation  # noqa: PLC0415 - `discover` does not need it

    async with open_store(settings) as store, open_outbound_client(settings) as outbound:
        known = sum((await store.counts()).statuses.values())
        with crawl_progress_bar("accounts listed by the relay", known, progress_console()) as on_progress:
            progress = await make_reconciliation(settings, store, outbound, Metrics()).reconcile(on_progress)
    click.echo(f"accounts: {progress.listed} listed, {progress.found} different (resync requested)")
    return ExitCode.OK
