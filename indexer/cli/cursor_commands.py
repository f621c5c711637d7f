"""The command `cursor` and its subcommands `show` and `reset`."""

from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from operator import itemgetter
from time import time
from typing import Any, Literal

import click

from indexer.app.settings import Settings
from indexer.cli.arguments import parse_position
from indexer.cli.command import CommandError, ExitCode, command, command_group, confirm, json_option, yes_option
from indexer.cli.database import connect_database
from indexer.cli.output import echo_json, echo_result, result_console, row_table
from indexer.net.relay.subscription import first_event
from indexer.serve.status_document import describe_gap
from indexer.sync.events import InfoEvent, MalformedEvent, StreamError, UnknownEvent, event_seconds
from indexer.sync.shard import BUCKETS, Shard
from indexer.sync.stream import Cursor, Position

CURSOR_FIELDS = ("relay", "shard", "epoch", "seq", "event_time")

cursor_command = command_group("cursor", "Show or reset the stored positions in the streams of relays.")


@command("show", cursor_command)
@json_option
async def show_command(settings: Settings) -> None:
    """Show the stored cursors and the open gaps.

    The lag is the age of the message at the cursor, by its own time.
    """
    async with connect_database(settings) as db:
        cursors, gaps = await db.gaps.cursors(), await db.gaps.load_open()
    rows = [_cursor_row(cursor, time()) for cursor in sorted(cursors, key=_order)]
    open_gaps = [asdict(one.gap) | {"opened_at": datetime.fromtimestamp(one.opened_at, UTC)} for one in gaps]
    if echo_json({"cursors": rows, "open_gaps": open_gaps}):
        return
    if rows:
        result_console().print(row_table(rows, box=None))
    else:
        click.echo("No cursor is stored. The daemon stores one when it has processed a message.")
    for gap in gaps:
        click.echo(f"open: {describe_gap(gap)}")


@command("reset", cursor_command)
@click.argument("relay", metavar="RELAY")
@click.option(
    "--to",
    "target",
    default="oldest",
    show_default=True,
    metavar="SEQ|live|oldest",
    type=parse_position,
    help="Continue with this sequence number, with the next message, or with the oldest message that the relay has.",
)
@yes_option
@json_option
async def reset_command(settings: Settings, *, relay: str, target: Literal["live", "oldest"] | int) -> None:
    """Set the cursor of a relay, for all shards, and open a gap.

    RELAY is the URL of the relay as `indexer cursor show` prints it. No daemon may run. The next daemon is not ready
    until a reconciliation has closed the gap. Records are not changed: repeated messages have no effect.
    """
    async with connect_database(settings, connections=2) as db, db.shard_locks.open(Shard().positions) as lock:
        if not await lock.claim():
            raise CommandError("a daemon is running; stop all daemons of this database first", ExitCode.FAILED)
        cursors = await db.gaps.cursors()
        if relay not in {cursor.relay for cursor in cursors}:
            raise CommandError(f"no cursor is stored for {relay}; see indexer cursor show", ExitCode.UNKNOWN)
        confirm(f"Reset the cursor of {relay} to {target}?")
        position = await _position(settings, relay, target)
        if position is None:
            raise CommandError(f"{relay} has sent no message; the cursor is unchanged", ExitCode.FAILED)
        shards = present_shards(cursors)
        await db.gaps.reset_cursor(relay, shards, position)
    names = [str(shard) for shard in shards]
    text = f"{relay}: cursor {position.seq} in shards {', '.join(names)}; a gap is open for each shard"
    echo_result({"relay": relay, "seq": position.seq, "shards": names}, text)


def present_shards(cursors: Sequence[Cursor]) -> list[Shard]:
    """Return the shards that processed each bucket last. The number of shards may have changed in the past."""
    stored = [(cursor.updated_at, Shard.parse(cursor.shard)) for cursor in cursors]
    latest = [
        max(processed, key=itemgetter(0))[1]
        for position in range(BUCKETS)
        if (processed := [(at, shard) for at, shard in stored if position in shard.positions])
    ]
    return sorted(set(latest), key=lambda shard: (shard.count, shard.index))


async def _position(settings: Settings, relay: str, target: Literal["live", "oldest"] | int) -> Position | None:
    """Return the position that the target means; None if the relay sends no message to find it."""
    if isinstance(target, int):
        return Position(target, None)
    if target == "oldest":
        return Position(0, None)
    limits, user_agent = settings.limits, settings.user_agent
    event = await first_event(relay, None, limits, user_agent, connect_timeout=15.0, message_timeout=30.0)
    if event is None or isinstance(event, InfoEvent | StreamError | UnknownEvent | MalformedEvent):
        return None
    return Position(event.seq, event.time)


def _cursor_row(cursor: Cursor, now: float) -> dict[str, Any]:
    at = event_seconds(cursor.event_time)
    lag = None if at is None else round(now - at, 1)
    return {name: getattr(cursor, name) for name in CURSOR_FIELDS} | {"lag_seconds": lag}


def _order(cursor: Cursor) -> tuple[str, int, int]:
    shard = Shard.parse(cursor.shard)
    return cursor.relay, shard.count, shard.index
