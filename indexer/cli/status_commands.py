"""The commands `status`, `repo` and `record`."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import nullcontext
from time import time
from typing import NoReturn

import click
from rich.live import Live

from indexer.app.settings import Settings
from indexer.atproto.syntax import AtUri, is_did
from indexer.cli.arguments import ACCOUNT, RECORD_URI
from indexer.cli.command import ExitCode, command, json_option, report_error
from indexer.cli.database import connect_database
from indexer.cli.output import fact_table, result_console, to_json, to_readable_json
from indexer.cli.status_report import Sample, Status, status_of
from indexer.cli.status_tables import status_tables
from indexer.db import Database
from indexer.errors import SchemaVersionError
from indexer.reasons import Desync
from indexer.sync.shard import Shard

SAMPLE_SECONDS = 1.0
"""Interval between two samples."""
RATE_SECONDS = 60.0
"""Maximum age of the samples from which rates are computed."""


@command("status")
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON; with --watch one per second.")
@click.option("--watch", is_flag=True, help="Update the status every second until interrupted.")
async def status_command(settings: Settings, *, as_json: bool, watch: bool) -> int:
    """Show cursor, lag, repos by status, resync queue, throughput and progress.

    All data comes from the database, where each daemon stores every two seconds what its `/readyz` says. Rates are
    measured over one second, with --watch over the last minute. The exit code is 3 if the indexer is not ready, or no
    daemon runs; the status names the cause.
    """
    try:
        async with connect_database(settings) as db:
            statuses = sample_statuses(db, settings.shard, interval=SAMPLE_SECONDS)
            if watch:
                await _watch(statuses, as_json=as_json)
            status = await anext(statuses)
    except SchemaVersionError as error:
        return report_error(str(error), ExitCode.NOT_READY)
    if as_json:
        click.echo(to_json(status.to_dict()))
    else:
        result_console().print(status_tables(status))
    return ExitCode.OK if status.not_ready is None else ExitCode.NOT_READY


@command("repo")
@click.argument("account", metavar="DID|HANDLE", type=ACCOUNT)
@json_option
async def repo_command(settings: Settings, *, account: str, as_json: bool) -> int:
    """Show everything that is known about one repo.

    This includes the reason for its state. A handle is found only if the indexer has verified it.
    """
    async with connect_database(settings) as db:
        did = await _find_did(db, account)
        report = await db.reports.repo(did) if did else None
    if report is None:
        return report_error(f"{account} is not in the database", ExitCode.UNKNOWN)
    if as_json:
        click.echo(to_json(report))
        return ExitCode.OK
    reasons = [f"{reason}: {reason.text}" for reason in Desync if reason == report["sync_reason"]]
    result_console().print(fact_table(report | {"sync_reason": next(iter(reasons), None)}))
    return ExitCode.OK


@command("record")
@click.argument("uri", metavar="AT-URI", type=RECORD_URI)
@json_option
async def record_command(settings: Settings, *, uri: AtUri, as_json: bool) -> int:
    """Show the CID, the value and the rev of one record."""
    async with connect_database(settings) as db:
        did = await _find_did(db, uri.authority)
        record = await db.reports.record(did, uri.collection or "", uri.rkey or "") if did else None
    if record is None:
        return report_error(f"{uri} is not in the database, or its account is hidden", ExitCode.UNKNOWN)
    if as_json:
        click.echo(to_json(record))
        return ExitCode.OK
    result_console().print(fact_table((name, value) for name, value in record.items() if name != "value"))
    click.echo(to_readable_json(record["value"]))
    return ExitCode.OK


async def sample_statuses(
    db: Database, shard: Shard, *, interval: float, clock: Callable[[], float] = time
) -> AsyncIterator[Status]:
    """Yield the status every `interval` seconds, without end. Rates are averages over at most `RATE_SECONDS`."""
    at = clock()
    samples = deque([Sample(at, await db.reports.counts())])
    while True:
        await asyncio.sleep(interval)
        at = clock()
        while len(samples) > 1 and samples[1].at <= at - RATE_SECONDS:
            samples.popleft()
        samples.append(Sample(at, await db.reports.counts(since=samples[0].at)))
        yield status_of(db.address, shard, samples[0], samples[-1])


async def _watch(statuses: AsyncIterator[Status], *, as_json: bool) -> NoReturn:
    with nullcontext() if as_json else Live(console=result_console(), auto_refresh=False) as live:
        while True:
            status = await anext(statuses)
            if live is None:
                click.echo(to_json(status.to_dict()))
            else:
                live.update(status_tables(status), refresh=True)


async def _find_did(db: Database, account: str) -> str | None:
    """Return the DID of an account that is given as a DID or a handle; None if no account has the handle."""
    return account if is_did(account) else await db.identities.did_of_handle(account)
