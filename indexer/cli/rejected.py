"""The command `rejected`: list, show and replay dead letters."""

from dataclasses import asdict
from datetime import UTC, datetime
from typing import IO, Any

import click

from indexer.app.settings import Settings
from indexer.atproto.syntax import AtUri
from indexer.cli.arguments import parse_did
from indexer.cli.command import CommandError, ExitCode, command, command_group, json_lines_option, json_option
from indexer.cli.database import connect_database
from indexer.cli.output import echo_json, echo_result, fact_table, result_console, to_readable_json
from indexer.db.dead_letters import StoredDeadLetter
from indexer.db.tap_feed import SetAside
from indexer.errors import UpstreamError
from indexer.live.dead_letter_replay import UNKNOWN, UNTRIED, ReplayResult
from indexer.reasons import Rejection
from indexer.sync.events import frame_for_display
from indexer.sync.repo import Outcome
from indexer.telemetry.log import printable

DEAD_LETTER_ID = click.IntRange(1, 2**63 - 1)
REASONS = {reason.value: reason for reason in Rejection}
MAX_DETAIL_CHARACTERS = 160


def dead_letter_dict(dead_letter: StoredDeadLetter) -> dict[str, Any]:
    """Return a dead letter by column, with the sentence of its reason and whether its frame is complete."""
    return asdict(dead_letter) | {"meaning": dead_letter.reason.text, "complete": dead_letter.complete}


def dead_letter_lines(dead_letter: StoredDeadLetter) -> str:
    """Return the entry of a list: two lines, or three if there is a detail."""
    one = dead_letter
    cells = (one.id, one.time.isoformat(" ", "seconds"), one.relay, one.seq, one.did or None, one.kind or None)
    lines = [
        "  ".join("-" if cell is None else printable(str(cell)) for cell in cells),
        f"    {one.reason}: {one.reason.text}",
    ]
    return "\n".join([*lines, f"    {_shorten(one.detail)}"] if one.detail else lines)


def set_aside_dict(event: SetAside) -> dict[str, Any]:
    """Return an event of the feed that clients refused, and that was set aside."""
    return {
        "uri": str(AtUri(event.did, event.collection, event.rkey)),
        "action": event.action,
        "rev": event.rev or None,
        "attempts": event.attempts,
        "since": datetime.fromtimestamp(event.since, UTC),
        "failure": event.failure,
    }


def set_aside_lines(event: dict[str, Any]) -> str:
    """Return the entry of a list: two lines."""
    line = f"{event['since'].isoformat(' ', 'seconds')}  {event['action']}  {printable(event['uri'])}"
    return f"{line}\n    sent {event['attempts']} times: {printable(event['failure'])}"


def replay_line(result: ReplayResult) -> str:
    """Return the result of a replay as one line: ID, outcome, and the reason if there is one."""
    parts = [str(result.id), result.outcome]
    parts += [f"{result.reason}: {result.reason.text}"] if result.reason else []
    parts += [_shorten(result.detail)] if result.detail else []
    parts += [f"(before: {result.previous_reason})"] if result.previous_reason not in {None, result.reason} else []
    return "  ".join(parts)


def _shorten(text: str) -> str:
    return printable(text if len(text) <= MAX_DETAIL_CHARACTERS else f"{text[:MAX_DETAIL_CHARACTERS]}…")


class ListByDefaultGroup(click.Group):
    """A group that runs its command `list` if the arguments name none of its commands."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put `list` before the arguments if they start with an option of `list`, or if there are none."""
        named = {*self.commands, *ctx.help_option_names} & set(args) or not all(arg.startswith("-") for arg in args[:1])
        return super().parse_args(ctx, args if named else ["list", *args])


rejected_command = command_group(
    "rejected",
    """List, show or replay dead letters.

    Dead letters are messages that broke a rule of the protocol. Without a subcommand, list them. With --feed, the
    commands are about events that were set aside, because clients of the feed refused them.
    """,
    ListByDefaultGroup,
)


@command("list", rejected_command)
@click.option(
    "--reason",
    metavar="REASON",
    type=click.Choice([*REASONS]),
    help="List only messages rejected for this reason (docs/reasons.md).",
)
@click.option("--did", metavar="DID", type=parse_did, help="List only messages that name this DID.")
@click.option(
    "--limit", default=50, show_default=True, type=click.IntRange(1, 1_000_000), help="Maximum number of messages."
)
@click.option("--feed", is_flag=True, help="List events that clients of the feed refused and that were set aside.")
@json_lines_option
async def list_command(settings: Settings, *, reason: str | None, did: str | None, limit: int, feed: bool) -> None:
    """List dead letters, newest first.

    Each line shows the ID, time, relay, sequence number, DID, kind, and reason.
    """
    if feed and reason is not None:
        raise click.UsageError("--reason is about messages. Give it without --feed.")
    found: list[tuple[dict[str, Any], str]]
    async with connect_database(settings) as db:
        if feed:
            events = [set_aside_dict(event) for event in await db.feed.set_aside(did, limit)]
            found = [(event, set_aside_lines(event)) for event in events]
        else:
            letters = await db.dead_letters.newest(REASONS[reason] if reason else None, did, limit=limit)
            found = [(dead_letter_dict(letter), dead_letter_lines(letter)) for letter in letters]
    for result, lines in found:
        echo_result(result, lines)
    if not found:
        click.echo(f"No matching {'event' if feed else 'dead letter'}.", err=True)


@command("show", rejected_command)
@click.argument("number", metavar="ID", type=DEAD_LETTER_ID)
@json_option
@click.option(
    "--frame", type=click.File("wb", lazy=True), help="Write the bytes of the message to a file, and print nothing."
)
async def show_command(settings: Settings, *, number: int, frame: IO[bytes] | None) -> None:
    """Show one dead letter with the fields of its message."""
    async with connect_database(settings) as db:
        found = await db.dead_letters.load(number)
    if found is None:
        raise CommandError(f"There is no dead letter {number}.", ExitCode.UNKNOWN)
    if frame is not None:
        frame.write(found[1])
        return
    report = dead_letter_dict(found[0])
    try:
        report |= frame_for_display(found[1]) | {"unreadable": None}
    except UpstreamError as error:
        report |= {"header": None, "payload": None, "unreadable": error.detail}
    if echo_json(report):
        return
    frame_text = f"{report['frame_bytes']:,} bytes"
    if not report["complete"]:
        frame_text += " stored of a longer frame; it cannot be replayed"
    facts = {name: report[name] for name in ("id", "time", "relay", "seq", "did", "kind")}
    # Identifying numbers get no thousands separator.
    facts |= {name: None if facts[name] is None else str(facts[name]) for name in ("id", "seq")}
    facts |= {"reason": f"{report['reason']}: {report['meaning']}", "detail": report["detail"], "frame": frame_text}
    result_console().print(fact_table(facts))
    if report["unreadable"] is None:
        click.echo(to_readable_json({"header": report["header"], "payload": report["payload"]}))
    else:
        click.echo(f"\nThe message cannot be decoded: {printable(report['unreadable'])}")


@command("replay", rejected_command)
@click.argument("numbers", nargs=-1, metavar="ID…", type=DEAD_LETTER_ID)
@click.option(
    "--reason", metavar="REASON", type=click.Choice([*REASONS]), help="Replay every message rejected for this reason."
)
@click.option("--feed", is_flag=True, help="Send the events again that clients of the feed refused.")
@click.option("--did", metavar="DID", type=parse_did, help="With --feed: only events of this repo.")
@json_lines_option
async def replay_command(
    settings: Settings,
    *,
    numbers: tuple[int, ...],
    reason: str | None,
    feed: bool,
    did: str | None,
) -> None:
    """Process messages again as if they had just arrived.

    They are processed in the order of their IDs, with the present settings, keys and repo states. A daemon may run at
    the same time. Each line shows the ID, the outcome, and the reason. With the outcome applied, replayed (nothing
    new), buffered, ignored or desynchronized, the dead letter is deleted. With the outcome rejected or untried (frame
    truncated, or no key available), it remains.

    With --feed, the daemon that serves the feed sends the events again within seconds, with the present values. What
    clients acknowledge is no longer set aside.

    The exit code is 4 if an ID does not exist, otherwise 1 if a dead letter remains.
    """
    from indexer.app.clients import open_replay  # noqa: PLC0415 - the other subcommands do not need it

    if [bool(numbers), reason is not None, feed].count(True) != 1 or (did is not None and not feed):
        raise click.UsageError("Give IDs, or --reason, or --feed with or without --did.")
    if feed:
        async with connect_database(settings) as db:
            events = await db.feed.send_again(did)
        echo_result({"events": events}, f"Events that are sent again: {events}")
        return
    remaining = unknown = 0
    async with connect_database(settings) as db, open_replay(settings, db) as replay:
        for number in sorted(set(numbers)) if reason is None else await db.dead_letters.ids(REASONS[reason]):
            result = await replay.replay(number)
            echo_result(asdict(result), replay_line(result))
            remaining += result.outcome in {Outcome.REJECTED, UNTRIED}
            unknown += result.outcome == UNKNOWN
    if unknown and numbers:
        raise CommandError(f"IDs that do not exist: {unknown}", ExitCode.UNKNOWN)
    if remaining:
        raise CommandError(f"dead letters that remain: {remaining}", ExitCode.FAILED)
