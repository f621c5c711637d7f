"""The commands `add`, `resync` and `discover`."""

from contextlib import aclosing
from itertools import islice
from typing import IO

import click

from indexer.app.clients import http_origin, open_identities, open_outbound_client, stored_policy
from indexer.app.settings import Settings
from indexer.cli.arguments import given_dids, parse_did, parse_new_did, parse_nsid, parse_origin
from indexer.cli.command import CommandError, ExitCode, command, json_lines_option, json_option
from indexer.cli.database import connect_database
from indexer.cli.output import CommandProgress, echo_result
from indexer.db import Database
from indexer.db.crawls import CrawlProgress
from indexer.db.gaps import OpenGaps
from indexer.db.scope import CurrentScope
from indexer.errors import UnavailableError
from indexer.sync.shard import Shard
from indexer.tasks.discover import Discovery
from indexer.tasks.hosts import LOOKUP_SHARE, HostCrawl, HostSettings
from indexer.tasks.reconcile import Reconciliation, ReconciliationSettings
from indexer.telemetry.conditions import Conditions
from indexer.telemetry.log import printable
from indexer.telemetry.metrics import Metrics

ADD_BATCH_SIZE = 10_000


@command("add")
@click.argument("dids", nargs=-1, metavar="DID…|-")
@click.option("--file", "-f", type=click.File(errors="replace"), help="Read DIDs from a file, one per line.")
@json_option
async def add_command(settings: Settings, *, dids: tuple[str, ...], file: IO[str] | None) -> None:
    """Start tracking repos.

    The daemon fetches each repo and follows it from then on. With `-`, read DIDs from standard input, one per line.
    Empty lines and lines that start with # are skipped.
    """
    given = given_dids(dids, file, parse_new_did)
    added = count = redacted = 0
    async with connect_database(settings) as db:
        with CommandProgress("repos", None) as progress:
            while batch := list(islice(given, ADD_BATCH_SIZE)):
                count += len(batch)
                added += await db.scope.track(batch)
                redacted += sum([row["action"] == "redact" for row in await db.removals.of(*batch)])
                progress.show(count, note=f"{added:,} added")
    result = {"added": added, "already_tracked": count - added - redacted, "redacted": redacted}
    refused = f", {redacted} redacted" if redacted else ""
    text = f"repos: {added} added, {result['already_tracked']} already tracked{refused}"
    echo_result(result, text)


@command("resync")
@click.argument("dids", nargs=-1, metavar="DID…", type=parse_did)
@click.option("--errored", is_flag=True, help="Request a resync of every repo whose last resync failed.")
@click.option("--all", "everything", is_flag=True, help="Request a resync of every repo.")
@click.option("--behind", is_flag=True, help="Request a resync of every repo that is behind the relay's repo list.")
@json_option
async def resync_command(
    settings: Settings, *, dids: tuple[str, ...], errored: bool, everything: bool, behind: bool
) -> None:
    """Request a resync of repos.

    The records stay visible in the meantime.

    With --behind, a repo that seems to be behind is compared again after half a minute. If the scope is `all` repos,
    unknown ones become tracked. The daemon does the same every INDEXER_SWEEP_INTERVAL, and while a gap is open.
    """
    if bool(dids) + errored + everything + behind != 1:
        raise click.UsageError("Give DIDs, or --errored, or --all, or --behind.")
    given = sorted(set(dids))
    async with connect_database(settings) as db:
        if given:
            requested = await db.repos.request_resyncs(given)
        elif behind:
            requested = (await _reconcile(settings, db)).found
        else:
            with CommandProgress("repos", await db.repos.estimate_count()) as progress:
                requested = seen = 0
                async with aclosing(db.repos.request_resyncs_of_all(errored=errored)) as pages:
                    async for read, requests in pages:
                        requested, seen = requested + requests, seen + read
                        progress.show(seen, note=f"{requested:,} requested")
    echo_result({"requested": requested}, f"resyncs: {requested} requested")
    if requested < len(given):
        raise CommandError(f"{len(given) - requested} of the DIDs are not in the database", ExitCode.UNKNOWN)


@command("discover")
@click.option(
    "--collection",
    "collections",
    multiple=True,
    metavar="NSID",
    type=parse_nsid,
    help="Add only accounts that have records of this collection. May be repeated.",
)
@click.option("--relay", metavar="URL", type=parse_origin, help="Ask this relay. Default: the first of INDEXER_RELAYS.")
@click.option("--pds", metavar="URL", type=parse_origin, help="Ask this PDS instead of a relay.")
@click.option("--hosts", is_flag=True, help="Ask each host that the relays of INDEXER_RELAYS list.")
@json_lines_option
async def discover_command(
    settings: Settings, *, collections: tuple[str, ...], relay: str | None, pds: str | None, hosts: bool
) -> None:
    """List the accounts of a host and start tracking the unknown ones.

    An interrupted discovery continues where it stopped. Only a few hosts besides relays can list accounts by
    collection.

    With --hosts, an account is added only if the scope wants it and its identity names the host that lists it. The
    daemon does the same every INDEXER_HOSTS_INTERVAL.
    """
    if bool(relay) + bool(pds) + hosts > 1 or (hosts and collections):
        raise click.UsageError("Give only one of --relay, --pds and --hosts, and no collection with --hosts.")
    if hosts:
        await _discover_hosts(settings)
        return
    source = relay or pds or http_origin(settings.relays[0])
    async with connect_database(settings) as db, open_outbound_client(settings) as outbound:
        discovery = Discovery(db, outbound)
        for collection in collections or ("",):
            progress = await discovery.begin(source, collection)
            name = f"{collection or 'all accounts'} of {source}"
            if progress.cursor is not None:
                click.echo(f"{name}: continuing; accounts listed before: {progress.listed:,}", err=True)
            with CommandProgress(name, discovery.expected) as shown:
                progress = await discovery.run(
                    progress, lambda now: shown.show(now.listed, note=f"{now.found:,} added")
                )
            counts = {"listed": progress.listed, "added": progress.found}
            result = {"source": source, "collection": collection or None, **counts}
            echo_result(result, f"{name}: {progress.listed} listed, {progress.found} added")
    if discovery.invalid_entries:
        click.echo(f"entries of the list that are not valid: {discovery.invalid_entries}", err=True)


async def _discover_hosts(settings: Settings) -> None:
    """Read the repo lists of all hosts once, and show the progress."""
    metrics = Metrics()
    relays = {relay: http_origin(relay) for relay in settings.relays}
    async with connect_database(settings) as db, open_identities(settings, db, metrics) as (outbound, identities):
        crawl = HostCrawl(
            db,
            outbound,
            identities,
            metrics,
            Conditions(),
            CurrentScope(db.scope, await stored_policy(settings, db)),
            relays,
            lambda: next(iter(relays.values())),
            lambda _source: None,
            HostSettings(poll=1.0),
            settings.new_accounts_per_host,
            settings.plc_rate * LOOKUP_SHARE,
        )
        with CommandProgress("repo lists of hosts", None) as shown:
            progress = await crawl.read_all(
                lambda read, total: shown.show(read, total=total, note=f"{crawl.added:,} accounts added")
            )
    result = {"hosts": progress.listed, "failed": progress.found, "added": crawl.added}
    text = f"hosts: {progress.listed} listed, {progress.found} failed, {crawl.added} accounts added"
    echo_result(result, text)


async def _reconcile(settings: Settings, db: Database) -> CrawlProgress:
    """Reconcile all shards with the first relay that answers, and show the progress.

    Raises:
        UnavailableError: No relay answers, or the database is unavailable.
    """
    metrics, shard = Metrics(), Shard()
    known = sum((await db.reports.counts()).statuses.values())
    async with open_identities(settings, db, metrics) as (outbound, identities):
        reconciliation = Reconciliation(
            db,
            outbound,
            metrics,
            OpenGaps(db.gaps, shard, metrics),
            list,
            lambda _source: None,
            CurrentScope(db.scope, await stored_policy(settings, db)),
            ReconciliationSettings(shard, settings.continuing(await db.gaps.cursors()).comparison_interval),
            identities,
            sources_are_hosts=settings.upstream == "pds",
        )
        *others, last = map(http_origin, settings.relays)
        with CommandProgress("accounts listed by the relay", known) as progress:

            def show(now: CrawlProgress) -> None:
                progress.show(now.listed, note=f"{now.found:,} different")

            for relay in others:
                try:
                    return await reconciliation.reconcile(relay, show)
                except UnavailableError as error:
                    click.echo(printable(f"{relay}: {error}; asking the next relay"), err=True)
            return await reconciliation.reconcile(last, show)
