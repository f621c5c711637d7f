"""The commands `redact` and `takedown`."""

import asyncio
from math import inf

import click

from indexer.app.settings import Settings
from indexer.cli.arguments import Target, parse_target
from indexer.cli.command import CommandError, ExitCode, command, confirm, json_option, report_error, yes_option
from indexer.cli.database import connect_database
from indexer.cli.output import echo_result
from indexer.db import Database
from indexer.db.removals import RETRY_SECONDS
from indexer.sync.scope import Scope, covers
from indexer.sync.shard import bucket_of

LINKS_SECONDS = 30.0
"""Time for which the command waits for the process that keeps links."""
NOT_DELETED = (
    "Not deleted: backups; WAL and dead rows, until VACUUM has run and the server has reused the space; copies that "
    "consumers have; exported files."
)

reason_option = click.option("--reason", metavar="TEXT", help="Store this reason in indexer.removal.")


@command("redact")
@click.argument("target", metavar="AT-URI|DID|COLLECTION", type=parse_target)
@reason_option
@yes_option
@json_option
async def redact_command(settings: Settings, *, target: Target, reason: str | None) -> None:
    """Delete a record, an account or a collection, and never store it again.

    This is irreversible. The command returns when the content is deleted from the database. It asks for confirmation,
    and needs --yes if there is no terminal. An account becomes untracked, a collection leaves the scope. A collection
    without a record must be named in the scope.
    """
    async with connect_database(settings) as db:
        if target[0] is None and (owner := await db.identities.did_of_handle(target[1] or "")):
            raise CommandError(f"{target[1]} is a handle: name the account by its DID, {owner}", ExitCode.BAD_ARGUMENT)
        name, (did, collection, rkey) = await _find(db, target)
        confirm(f"Delete {name if did else f'the collection {name}'}, and never store it again?")
        wanted = Scope(removed={did: frozenset({f"{collection}/{rkey}".encode()})} if did and rkey else {})
        stored = [keys async for keys in db.removals.stored(wanted, [bucket_of(did or "")])]
        await db.removals.add(name, "redact", reason)
        records = await (_delete_records(db, did, collection, rkey) if collection else _erase(db, did or ""))
        dead_letters = await db.removals.delete_messages(did, collection, rkey)
        links = await db.links.catch_up(LINKS_SECONDS)
    done = f"{records:,} records (besides those that a daemon deleted) and {dead_letters:,} dead letters deleted"
    text = f"{name} is redacted: {done}\n{NOT_DELETED}"
    result = {"target": name, "records": records, "dead_letters": dead_letters, "links_deleted": links}
    echo_result(result, text)
    if rkey and not (stored or records):
        report_error("no such record was stored; it will not be stored in future", ExitCode.OK)
    if not links:
        raise CommandError("the process that keeps links is behind, and deletes the links later", ExitCode.FAILED)


@command("takedown")
@click.argument("target", metavar="DID|AT-URI", type=parse_target)
@click.option("--reverse", is_flag=True, help="Show it again.")
@reason_option
@json_option
async def takedown_command(settings: Settings, *, target: Target, reverse: bool, reason: str | None) -> None:
    """Hide a repo or a record from the public views.

    A repo stays hidden whatever its hosting status is, and is kept up to date. A record is deleted, and not stored
    again; --reverse fetches its repo again.
    """
    if target[0] is None:
        raise click.UsageError("Give a DID or the AT-URI of a record: a collection is hidden by `indexer scope set`.")
    async with connect_database(settings) as db:
        name, (did, collection, rkey) = await _find(db, target)
        if not await db.repos.set_takedown(name, on=not reverse, reason=reason):
            raise CommandError(f"{name} is not in the database", ExitCode.UNKNOWN)
        if collection and not reverse:
            await _delete_records(db, did, collection, rkey)
    text = f"{name} is {'no longer taken down' if reverse else 'taken down'}"
    echo_result({"did": did, "uri": name if rkey else None, "takedown": not reverse}, text)


async def _find(db: Database, target: Target) -> tuple[str, Target]:
    """Return the target as text and in parts, with the DID of its handle; raise `CommandError` if it is unknown.

    A collection that only `*` matches may be a handle with a typing error.
    """
    account, collection, rkey = target
    if account is None:
        selected = (await db.scope.load() or Scope()).collections
        named = {*selected.patterns, *selected.excluded} - {"*"}
        known = any(covers(pattern, collection or "") for pattern in named)
        if known or await db.removals.of_collection(collection or ""):
            return collection or "", target
        why = ": it has no record, and the scope does not name it; name an account by its DID"
        raise CommandError(f"{collection} is not in the database{why}", ExitCode.UNKNOWN)
    if did := account if account.startswith("did:") else await db.identities.did_of_handle(account.lower()):
        return f"at://{did}/{collection}/{rkey}" if rkey else did, (did, collection, rkey)
    raise CommandError(f"{account} is not in the database", ExitCode.UNKNOWN)


async def _delete_records(db: Database, did: str | None, collection: str, rkey: str | None) -> int:
    """Delete a record, or all records of a collection; return how many, without those that a daemon deletes."""
    scope, deleted = Scope(), 0
    keys = [(did, collection, rkey)] if did and rkey else await db.removals.of_collection(collection)
    while keys:
        scope = await db.scope.load(scope) or scope
        count = await db.removals.delete(scope, keys)
        if count is None:
            await asyncio.sleep(RETRY_SECONDS)
        else:
            deleted += count
            keys = [] if rkey else await db.removals.of_collection(collection)
    return deleted


async def _erase(db: Database, did: str) -> int:
    """Erase the records of an account that was untracked; return how many."""
    records = 0
    while (repo := (await db.repos.load([did])).get(did)) is not None and repo.erase_at is not None:
        erased = await db.repos.erase_batch([bucket_of(did)], inf, did=did)
        records += erased.records if erased else 0
        if not (erased and erased.records):
            await asyncio.sleep(RETRY_SECONDS)  # another process has the row
    return records
