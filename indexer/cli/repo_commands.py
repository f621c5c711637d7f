"""The commands `add`, `resync` and `takedown`."""

from contextlib import aclosing
from itertools import islice
from typing import IO

import click

from indexer.app.settings import Settings
from indexer.cli.arguments import DID, NEW_DID_OR_STDIN, given_dids, parse_new_did
from indexer.cli.command import ExitCode, command, json_option, report_error
from indexer.cli.crawl_commands import reconcile
from indexer.cli.database import connect_database
from indexer.cli.output import echo_result, show_progress

ADD_BATCH_SIZE = 10_000


@command("add")
@click.argument("dids", nargs=-1, metavar="DID…|-", type=NEW_DID_OR_STDIN)
@click.option("--file", "-f", type=click.File(errors="replace"), help="Read DIDs from a file, one per line.")
@json_option
async def add_command(settings: Settings, *, dids: tuple[str, ...], file: IO[str] | None, as_json: bool) -> int:
    """Start tracking repos.

    The daemon fetches each repo and follows it from then on. With `-`, read DIDs from standard input, one per line.
    Empty lines and lines that start with # are skipped.
    """
    given = given_dids(dids, file, parse_new_did)
    added = count = 0
    async with connect_database(settings) as db:
        with show_progress("repos", None) as progress:
            while batch := list(islice(given, ADD_BATCH_SIZE)):
                count += len(batch)
                added += await db.scope.track(batch)
                progress.update(count, note=f"{added:,} added")
    result = {"added": added, "already_tracked": count - added}
    echo_result(result, f"repos: {added} added, {count - added} already tracked", as_json=as_json)
    return ExitCode.OK


@command("resync")
@click.argument("dids", nargs=-1, metavar="DID…", type=DID)
@click.option("--errored", is_flag=True, help="Request a resync of every repo whose last resync failed.")
@click.option("--all", "everything", is_flag=True, help="Request a resync of every repo.")
@click.option("--behind", is_flag=True, help="Request a resync of every repo that is behind the relay's repo list.")
@json_option
async def resync_command(
    settings: Settings, *, dids: tuple[str, ...], errored: bool, everything: bool, behind: bool, as_json: bool
) -> int:
    """Request a resync of repos.

    The daemon fetches the repos again and compares them with the database. The records stay visible in the meantime.

    With --behind, a repo that seems to be behind is compared again after half a minute, because the stream may still
    deliver its commits. If the scope is `all` repos, unknown ones become tracked. The daemon does the same every
    INDEXER_SWEEP_INTERVAL, and whenever messages of the relay may have been missed. Only the daemon closes gaps.
    """
    if bool(dids) + errored + everything + behind != 1:
        raise click.UsageError("Give DIDs, or --errored, or --all, or --behind.")
    given = sorted(set(dids))
    async with connect_database(settings) as db:
        if given:
            requested = await db.repos.request_resyncs(given)
        elif behind:
            requested = (await reconcile(settings, db)).found
        else:
            with show_progress("repos", await db.repos.estimate_count()) as progress:
                requested = seen = 0
                async with aclosing(db.repos.request_resyncs_of_all(errored=errored)) as pages:
                    async for page in pages:
                        requested, seen = requested + page.requested, seen + page.repos
                        progress.update(seen, note=f"{requested:,} requested")
    echo_result({"requested": requested}, f"resyncs: {requested} requested", as_json=as_json)
    if requested < len(given):
        return report_error(f"{len(given) - requested} of the DIDs are not in the database", ExitCode.UNKNOWN)
    return ExitCode.OK


@command("takedown")
@click.argument("did", metavar="DID", type=DID)
@click.option("--reverse", is_flag=True, help="Make the repo visible again.")
@json_option
async def takedown_command(settings: Settings, *, did: str, reverse: bool, as_json: bool) -> int:
    """Hide a repo from the public views.

    It stays hidden whatever its hosting status is. The daemon still keeps it up to date.
    """
    async with connect_database(settings) as db:
        known = await db.repos.set_takedown(did, on=not reverse)
    if not known:
        return report_error(f"{did} is not in the database", ExitCode.UNKNOWN)
    text = f"{did} is {'no longer taken down' if reverse else 'taken down'}"
    echo_result({"did": did, "takedown": not reverse}, text, as_json=as_json)
    return ExitCode.OK
