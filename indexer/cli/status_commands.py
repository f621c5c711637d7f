"""The commands `status`, `repo` and `record`."""

import asyncio
from collections.abc import Mapping
from contextlib import nullcontext
from datetime import UTC, datetime
from typing import Any

import click
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from indexer.app.settings import Settings
from indexer.atproto.syntax import AtUri, is_did
from indexer.cli.arguments import parse_account, parse_record_uri
from indexer.cli.command import CommandError, ExitCode, command, json_option
from indexer.cli.database import connect_database
from indexer.cli.output import (
    duration_text,
    echo_json,
    fact_table,
    json_wanted,
    result_console,
    row_table,
    shown,
    to_readable_json,
)
from indexer.db import Database
from indexer.db.database_errors import without_password
from indexer.errors import SchemaVersionError
from indexer.serve.account_status import account_summary
from indexer.serve.status_document import Row, StatusDocument
from indexer.serve.status_reader import StatusReader
from indexer.telemetry.log import printable

SAMPLE_SECONDS = 1.0
"""Interval between two reads of the database."""


@command("status")
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON; with --watch one per second.")
@click.option("--watch", is_flag=True, help="Update the status every second until interrupted.")
async def status_command(settings: Settings, *, watch: bool) -> int:
    """Show cursor, lag, repos by status, resync queue, throughput and progress.

    All data comes from the database, where each daemon stores every two seconds what its `/readyz` says. Rates are
    measured over one second, with --watch over the last minute. The exit code is 3 if the indexer is not ready, or no
    daemon runs; the status names the cause.
    """
    console = result_console()
    try:
        async with connect_database(settings) as db:
            reader = StatusReader(db, settings.shard)
            await reader.read()
            await reader.count()
            with Live(console=console, auto_refresh=False) if watch and not json_wanted() else nullcontext() as live:
                while True:
                    await asyncio.sleep(SAMPLE_SECONDS)
                    await reader.read()
                    await reader.count()
                    document = reader.document()
                    document.database = without_password(db.dsn)
                    if live is not None:
                        live.update(status_tables(document), refresh=True)
                    elif not echo_json(document.to_json()):
                        console.print(status_tables(document))
                    if not watch:
                        break
    except SchemaVersionError as error:
        raise CommandError(str(error), ExitCode.NOT_READY) from error
    return ExitCode.NOT_READY if document.reasons else ExitCode.OK


@command("repo")
@click.argument("account", metavar="DID|HANDLE", type=parse_account)
@json_option
async def repo_command(settings: Settings, *, account: str) -> None:
    """Show everything that is known about one repo.

    The output says why the repo has its state, and what happens next. A handle is found only if it is verified.
    """
    async with connect_database(settings) as db:
        did = await _find_did(db, account)
        report = await db.reports.repo(did) if did else None
    if report is None:
        raise CommandError(f"{account} is not in the database", ExitCode.UNKNOWN)
    summary = list(account_summary(report, datetime.now(UTC)))
    if echo_json({"summary": summary, **report}):
        return
    click.echo("\n".join(map(printable, summary)) + "\n")
    result_console().print(fact_table(report))


@command("record")
@click.argument("uri", metavar="AT-URI", type=parse_record_uri)
@json_option
async def record_command(settings: Settings, *, uri: AtUri) -> None:
    """Show the CID, the value and the rev of one record."""
    async with connect_database(settings) as db:
        did = await _find_did(db, uri.authority)
        record = await db.reports.record(did, uri.collection or "", uri.rkey or "") if did else None
        name = f"at://{did}/{uri.collection}/{uri.rkey}"
        removed = [] if record else await db.removals.of(name, did or "", uri.collection or "")
    for row in removed:
        state = "redacted" if row["action"] == "redact" else "hidden"
        why = f"{state} by {row['role']} at {row['at']:%F %T}: {row['reason'] or 'no reason given'}"
        raise CommandError(f"{row['target']} is {why}", ExitCode.UNKNOWN)
    if record is None:
        raise CommandError(f"{uri} is not in the database, or its account is hidden", ExitCode.UNKNOWN)
    if echo_json(record):
        return
    result_console().print(fact_table((name, value) for name, value in record.items() if name != "value"))
    click.echo(to_readable_json(record["value"]))


async def _find_did(db: Database, account: str) -> str | None:
    """Return the DID of an account that is given as a DID or a handle; None if no account has the handle."""
    return account if is_did(account) else await db.identities.did_of_handle(account)


def status_tables(document: StatusDocument) -> Group:
    """Return the document as tables for a terminal.

    Facts come first, tables that may be long last: `--watch` shows no more than fits the terminal.
    """
    messages = "\n".join(f"not ready: {reason.message}" for reason in document.reasons)
    parts: list[RenderableType] = [
        Text(messages, "bold red") if messages else Text("ready", "bold green"),
        fact_table(_facts(document)),
    ]
    return Group(*parts, *(row_table(rows, title=title) for title, rows in _rows(document).items() if rows))


TABLES = {
    "stream": ("cursors", "relay, shard, cursor: seq, lag: lag_seconds"),
    "daemons": ("daemons", "shard, state, from: client, session: pid, running for: seconds"),
    "open gaps": ("gaps", "relay, shard, reason, first_seq, last_seq, open for: open_seconds"),
    "consumers of the change log": (
        "consumers",
        (
            "consumer: name, position: seq, changes behind: behind, lag: lag_seconds, silent for: silent_seconds, "
            "disconnected: cut_off"
        ),
    ),
    "dead letters": ("rejections", "reason, last_hour, stored, age of the newest: newest_seconds_ago"),
    "withheld accounts": (
        "withheld",
        "host, repos, synchronized, at the relay: at_relay, not_passed_on, age of the list: listed_seconds_ago",
    ),
    "paused hosts": ("hosts", "host, paused for: seconds_left, reason, failures_in_a_row, last_error"),
}
"""The tables by title: the list of the document, and the columns. A column has the name of its field, or its own name
before that. Fields named `…seconds…` are times."""


def _rows(document: StatusDocument) -> dict[str, list[dict[str, str]]]:
    """Return the rows of each table by its title. A row has the cells by the names of the columns."""
    tables = {"repos": [] if document.repos is None else _repo_rows(document.repos)}
    for title, (name, columns) in TABLES.items():
        fields = {column.split(": ")[0]: column.split(": ")[-1] for column in columns.split(", ")}
        rows: list[Row] = getattr(document, name)
        tables[title] = [{column: _cell(field, row[field]) for column, field in fields.items()} for row in rows]
    return tables


def _cell(field: str, value: Any) -> str:
    return duration_text(value) if "seconds" in field else str(value) if field == "pid" else shown(value)


def _repo_rows(repos: Row) -> list[dict[str, str]]:
    rows = [
        *repos["statuses"].items(),
        *((f"reason: {reason}", count) for reason, count in repos["reasons"].items()),
        *((f"last error: {failure}", count) for failure, count in repos["failures"].items()),
    ]
    return [{"state": name, "repos": _repos(repos, count)} for name, count in rows]


def _repos(repos: Row, count: int) -> str:
    """Return a number of repos, with a word if it is an estimate."""
    return f"{count:,}" if repos["counted_share"] == 1.0 else f"about {count:,}"


def _facts(document: StatusDocument) -> Mapping[str, Any]:
    facts: dict[str, Any] = {}
    if document.set_aside_events:
        text = f"{document.set_aside_events:,} refused by clients of the feed: see `indexer rejected list --feed`"
        facts["events set aside"] = text
    facts["database"] = document.database
    if (repos := document.repos) is not None:
        facts |= {
            "records": f"about {repos['records']:,}",
            "resync queue": _repos(repos, repos["queued"]),
            "parked": _repos(repos, repos["parked"]),
            "unproven": _repos(repos, repos["unproven"]),
            "scope backfill": _scope_backfill(repos, repos["scope_backfill"]),
            "resyncs per second": f"{repos['backfill']['repos_per_second'] or 0.0:,.1f}",
            "progress": None if repos["progress"] is None else f"{repos['progress']:.1%}",
            "time left": duration_text(repos["backfill"]["seconds_left"]),
        }
    if document.links is not None:
        facts["links"] = _links(document.links)
    rate = document.events_per_second
    return facts | {"events per second": None if rate is None else f"{rate:,.1f}"}


def _scope_backfill(repos: Row, backfill: Row) -> str:
    if repos["unlisted"]:
        return f"the relay's lists of {repos['unlisted']} signal collections are not read; the log says why"
    if not backfill["waiting"]:
        return "complete"
    left = "unknown" if backfill["seconds_left"] is None else duration_text(backfill["seconds_left"])
    return f"{_repos(repos, backfill['waiting'])} repos wait for added collections; time left: {left}"


def _links(links: Row) -> str:
    if links["state"] == "off":
        return "off"
    parts: list[str] = [links["state"]]
    if links["state"] == "backfill":
        left = "unknown" if links["seconds_left"] is None else duration_text(links["seconds_left"])
        parts = [f"backfill: about {links['progress'] or 0.0:.1%} of the repos", f"time left: {left}"]
    if links["open_recounts"]:
        parts.append(f"repos to recount: {links['open_recounts']:,}")
    return "; ".join(parts)
