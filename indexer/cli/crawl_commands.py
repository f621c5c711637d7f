"""The command `discover`, and the reconciliation of `resync --behind`: both read the repo list of a host."""

from collections.abc import Callable

import click

from indexer.app.clients import http_origin, open_identities, open_outbound_client, stored_policy
from indexer.app.settings import Settings
from indexer.cli.arguments import NSID, ORIGIN
from indexer.cli.command import ExitCode, command, json_lines_option
from indexer.cli.database import connect_database
from indexer.cli.output import echo_result, show_progress
from indexer.db import Database
from indexer.db.crawls import CrawlProgress
from indexer.db.current_scope import CurrentScope
from indexer.db.open_gaps import OpenGaps
from indexer.errors import UnavailableError
from indexer.net.http import OutboundClient
from indexer.sync.shard import Shard
from indexer.tasks.discover import Discovery
from indexer.tasks.reconcile import Reconciliation, ReconciliationSettings
from indexer.telemetry.log import printable
from indexer.telemetry.metrics import Metrics


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
@json_lines_option
async def discover_command(
    settings: Settings, *, collections: tuple[str, ...], relay: str | None, pds: str | None, as_json: bool
) -> int:
    """List the accounts of a host and start tracking the unknown ones.

    The daemon fetches each repo and follows it from then on. An interrupted discovery continues where it stopped. Only
    a few hosts besides relays can list accounts by collection.
    """
    if relay and pds:
        raise click.UsageError("Give either --relay or --pds, not both.")
    source = relay or pds or http_origin(settings.relays[0])
    async with connect_database(settings) as db, open_outbound_client(settings) as outbound:
        discovery = Discovery(db, outbound)
        for collection in collections or ("",):
            progress = await discovery.begin(source, collection)
            name = f"{collection or 'all accounts'} of {source}"
            if progress.cursor is not None:
                click.echo(f"{name}: continuing; accounts listed before: {progress.listed:,}", err=True)
            with show_progress(name, discovery.expected) as shown:
                progress = await discovery.run(
                    progress, lambda now: shown.update(now.listed, note=f"{now.found:,} added")
                )
            counts = {"listed": progress.listed, "added": progress.found}
            result = {"source": source, "collection": collection or None, **counts}
            echo_result(result, f"{name}: {progress.listed} listed, {progress.found} added", as_json=as_json)
    if discovery.invalid_entries:
        click.echo(f"entries of the list that are not valid: {discovery.invalid_entries}", err=True)
    return ExitCode.OK


async def reconcile(settings: Settings, db: Database) -> CrawlProgress:
    """Reconcile all shards with the first relay that answers, and show the progress.

    Raises:
        UnavailableError: No relay answers, or the database is unavailable.
    """
    known = sum((await db.reports.counts()).statuses.values())
    async with open_outbound_client(settings) as outbound:
        with show_progress("accounts listed by the relay", known) as shown:
            return await _reconcile_with_first_available(
                settings, db, outbound, lambda now: shown.update(now.listed, note=f"{now.found:,} different")
            )


async def _reconcile_with_first_available(
    settings: Settings, db: Database, outbound: OutboundClient, on_progress: Callable[[CrawlProgress], None]
) -> CrawlProgress:
    metrics, shard = Metrics(), Shard()
    gaps = OpenGaps(db, shard, metrics)
    scope = CurrentScope(db, await stored_policy(settings, db))
    reconciliation_settings = ReconciliationSettings(shard, settings.sweep_interval)
    async with open_identities(settings, db, outbound, metrics) as identities:
        reconciliation = Reconciliation(
            db,
            outbound,
            metrics,
            gaps,
            tuple,
            lambda _source: None,
            scope,
            reconciliation_settings,
            identities,
            sources_are_hosts=settings.upstream == "pds",
        )
        *others, last = map(http_origin, settings.relays)
        for relay in others:
            try:
                return await reconciliation.reconcile(relay, on_progress)
            except UnavailableError as error:
                click.echo(printable(f"{relay}: {error}; asking the next relay"), err=True)
        return await reconciliation.reconcile(last, on_progress)
