"""The command line: results to stdout, log lines to stderr, exit codes that scripts can hold on to.

0 done · 1 failed · 2 a bad argument or setting · 3 not ready · 4 unknown here · 5 differences

Of several that hold for an audit, the first of 5, 1, 4.
"""

import asyncio
import json
import os
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, nullcontext
from datetime import datetime
from functools import wraps
from itertools import islice
from pathlib import Path
from time import time
from typing import IO, TYPE_CHECKING, Any, Concatenate, Literal, NoReturn, ParamSpec

import click
from rich.console import Console
from rich.live import Live

from indexer import __version__
from indexer.arguments import (
    ACCOUNT,
    DID,
    DID_OR_STDIN,
    KEY,
    LETTER,
    NSID,
    ORIGIN,
    REASON,
    RECORD_URI,
    STDIN,
    dids_of,
)
from indexer.atproto.cid import cid_text
from indexer.atproto.crypto import PublicKey
from indexer.atproto.record import Problem
from indexer.atproto.syntax import AtUri, is_did
from indexer.config import Settings, load_settings
from indexer.errors import SettingsError, UnavailableError, UpstreamError
from indexer.log import configure_logging, printable
from indexer.progress import accounts, counted
from indexer.reasons import Desync, FetchFailure, Rejection
from indexer.status import Sample, Status, facts_table, status_of, status_picture
from indexer.store import Store
from indexer.sync.shard import Shard

if TYPE_CHECKING:
    from indexer.audit import Tally, Verdict
    from indexer.inspection import Export

FAILED, BAD_ARGUMENT, NOT_READY, UNKNOWN, DIFFERENT, INTERRUPTED = 1, 2, 3, 4, 5, 130
SAMPLE_SECONDS = 1.0
SMOOTH_SECONDS = 60.0
ADD_AT_ONCE = 10_000
SAMPLE = 100

P = ParamSpec("P")
Command = Callable[Concatenate[Settings, P], Coroutine[Any, Any, int]]


class SchemaError(SettingsError):
    """The database is not at this program's schema."""


config_option = click.option(
    "--config",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="A TOML file with settings; the environment goes over it. Default: $INDEXER_CONFIG.",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command that `arguments` (without the program's name) ask for; gives the exit code."""
    try:
        code = commands.main(arguments, prog_name="indexer", standalone_mode=False)
        sys.stdout.flush()
    except (click.ClickException, SettingsError) as error:
        return _complain(_line(error), BAD_ARGUMENT)
    except BrokenPipeError:
        # Whoever read our output has had enough; the interpreter must not try to flush once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except (UnavailableError, OSError) as error:
        return _complain(str(error), FAILED)
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except asyncio.CancelledError:  # the daemon's second signal
        return FAILED
    return code if isinstance(code, int) else 0


def _line(error: click.ClickException | SettingsError) -> str:
    if not isinstance(error, click.ClickException):
        return str(error)
    context = error.ctx if isinstance(error, click.UsageError) else None
    return error.format_message().rstrip(".") + (f"; see {context.command_path} --help" if context else "")


def _complain(message: str, code: int) -> int:
    """One line on stderr, whatever the message holds."""
    click.echo(f"indexer: {printable(' '.join(message.split()))}", err=True)
    return code


@click.group(no_args_is_help=False, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="indexer")
@config_option
def commands(config: Path | None) -> None:
    """A record-level sync indexer for the AT Protocol: every record, complete, current and proven, in Postgres.

    Settings are defaults, under a TOML file, under environment variables INDEXER_…
    """


class ListedByDefault(click.Group):
    """A group that lists where no other command of it is named."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        named = {*self.commands, *ctx.help_option_names} & set(args) or not all(arg.startswith("-") for arg in args[:1])
        return super().parse_args(ctx, args if named else ["list", *args])


@commands.group("rejected", cls=ListedByDefault)
@config_option
def rejected(config: Path | None) -> None:
    """The dead letters: messages that were refused by their own fault.

    Of each relay and reason the newest thousand are kept. Without a command: list.
    """


def _command(name: str, group: click.Group = commands) -> Callable[[Command[P]], click.Command]:
    """Registers a coroutine function as a command that takes the settings first."""

    def register(function: Command[P]) -> click.Command:
        @wraps(function)
        def invoke(*args: P.args, **options: P.kwargs) -> int:
            options.pop("config")
            settings = load_settings(_config_file())
            configure_logging(settings.log_format, settings.log_level)
            return asyncio.run(function(settings, *args, **options))

        return group.command(name)(config_option(invoke))

    return register


def _config_file() -> Path | None:
    """As given to the command, or before it."""
    context: click.Context | None = click.get_current_context()
    file: Path | None = None
    while context is not None and file is None:
        file, context = context.params["config"], context.parent
    return file


@_command("run")
@click.option("--no-migrate", is_flag=True, help="Don't bring the schema to head first; stop if it isn't.")
@click.option(
    "--processes", default=1, type=click.IntRange(1, 64), help="So many daemons, each with its part of the shard."
)
async def run_command(settings: Settings, *, no_migrate: bool, processes: int) -> int:
    """Run the daemon: consume, verify, resynchronize, serve health and metrics.

    SIGTERM or SIGINT saves what was received and stops; a second one stops at once.
    """
    from indexer.run import run  # noqa: PLC0415 - what only the daemon needs is loaded only by it

    if processes == 1:
        return await run(settings, migrate_first=not no_migrate)
    from indexer.supervise import supervise  # noqa: PLC0415

    return await supervise(settings, processes, _config_file(), migrate_first=not no_migrate)


@_command("demo")
@click.option("--seconds", default=30.0, show_default=True, type=click.FloatRange(5, 3_600), help="How long to play.")
async def demo_command(settings: Settings, *, seconds: float) -> int:
    """Run the daemon against a small signed network on this machine, and compare the two at the end.

    Everything is temporary and on loopback. Exit code 0 only if every repo is synchronized and equal.
    """
    from indexer.demo import demo  # noqa: PLC0415

    if "log_level" not in settings.model_fields_set:
        configure_logging(settings.log_format, "error")  # the network's accidents are wanted, and the picture moves
    return await demo(settings, seconds)


@_command("migrate")
async def migrate_command(settings: Settings) -> int:
    """Bring the database's schema to head."""
    from indexer.store.migrate import migrate  # noqa: PLC0415

    async with _database(settings) as dsn:
        await migrate(dsn)
    click.echo("The database's schema is at head.")
    return 0


@_command("status")
@click.option("--json", "as_json", is_flag=True, help="JSON; with --watch one line each time.")
@click.option("--watch", is_flag=True, help="Go on until interrupted.")
async def status_command(settings: Settings, *, as_json: bool, watch: bool) -> int:
    """Show cursor, lag, repos by status, resync queue, throughput and progress, as the database has them.

    Rates are measured over a second, with --watch over the last minute. Exit code 3 if not ready: no event saved yet,
    or the newest one is over a minute old.
    """
    try:
        async with _store(settings) as store:
            statuses = _statuses(store, settings.shard)
            if watch:
                await _watch(statuses, as_json=as_json)
            status = await anext(statuses)
    except SchemaError as error:
        return _complain(str(error), NOT_READY)
    if as_json:
        click.echo(_json(status.to_json()))
    else:
        _console().print(status_picture(status))
    return 0 if status.not_ready is None else NOT_READY


@_command("repo")
@click.argument("account", metavar="DID|HANDLE", type=ACCOUNT)
@click.option("--json", "as_json", is_flag=True, help="JSON.")
async def repo_command(settings: Settings, *, account: str, as_json: bool) -> int:
    """Show everything known of one repo, with the reason of its state.

    A handle is looked up among those that were found to belong to their accounts.
    """
    async with _store(settings) as store:
        did = await _did(store, account)
        report = await store.repo_report(did) if did else None
    if report is None:
        return _complain(f"{account} is not known here", UNKNOWN)
    if as_json:
        click.echo(_json(report))
        return 0
    reasons = [f"{reason}: {reason.text}" for reason in Desync if reason == report["sync_reason"]]
    _console().print(facts_table(report | {"sync_reason": next(iter(reasons), None)}))
    return 0


@_command("record")
@click.argument("uri", metavar="AT-URI", type=RECORD_URI)
@click.option("--json", "as_json", is_flag=True, help="JSON.")
async def record_command(settings: Settings, *, uri: AtUri, as_json: bool) -> int:
    """Show one record: CID, value, rev."""
    async with _store(settings) as store:
        did = await _did(store, uri.authority)
        record = await store.record(did, uri.collection or "", uri.rkey or "") if did else None
    if record is None:
        return _complain(f"{uri} is not known here, or its account is not shown", UNKNOWN)
    if as_json:
        click.echo(_json(record))
        return 0
    _console().print(facts_table((name, value) for name, value in record.items() if name != "value"))
    click.echo(_readable(record["value"]))
    return 0


@_command("add")
@click.argument("dids", nargs=-1, metavar="DID…|-", type=DID_OR_STDIN)
@click.option("--file", "-f", type=click.File(errors="replace"), help="Read DIDs from a file, one a line.")
async def add_command(settings: Settings, *, dids: tuple[str, ...], file: IO[str] | None) -> int:
    """Track repos: each is fetched and followed from now on. `-` reads DIDs from standard input, one a line.

    In a file, empty lines and lines that begin with # are left out.
    """
    if (file is None) != bool(dids):
        raise click.UsageError("Name DIDs, or a --file of them, or -.")
    if STDIN in dids:
        if len(dids) > 1:
            raise click.UsageError("Name DIDs, or - alone.")
        file = click.open_file(STDIN, errors="replace")
    named = dids_of(file) if file else iter(dids)
    added = count = 0
    async with _store(settings) as store:
        while page := list(islice(named, ADD_AT_ONCE)):
            count += len(page)
            added += await store.add(page)
    click.echo(f"{added} added, {count - added} known before")
    return 0


@_command("resync")
@click.argument("dids", nargs=-1, metavar="DID…", type=DID)
@click.option("--errored", is_flag=True, help="All whose last resync failed.")
@click.option("--all", "everything", is_flag=True, help="All there are.")
async def resync_command(settings: Settings, *, dids: tuple[str, ...], errored: bool, everything: bool) -> int:
    """Mark repos to be fetched again and compared. Their records stay visible meanwhile."""
    if bool(dids) + errored + everything != 1:
        raise click.UsageError("Name DIDs, or give --errored or --all.")
    named = sorted(set(dids))
    async with _store(settings) as store:
        marked = await store.mark_resync(named, errored=errored, all=everything)
    click.echo(f"{marked} marked")
    return _complain(f"{len(named) - marked} of them are not known here", UNKNOWN) if marked < len(named) else 0


@_command("discover")
@click.option("--collection", "collections", multiple=True, metavar="NSID", type=NSID, help="May be given again.")
@click.option("--relay", metavar="URL", type=ORIGIN, help="Ask this relay instead of the first of INDEXER_RELAYS.")
@click.option("--pds", metavar="URL", type=ORIGIN, help="Ask this PDS instead.")
async def discover_command(
    settings: Settings, *, collections: tuple[str, ...], relay: str | None, pds: str | None
) -> int:
    """Track all accounts that a host lists, or, with --collection, those that may have records of it.

    Each is fetched by the daemon and followed from then on. A discovery that was interrupted goes on where it was
    left. Few hosts but relays list the accounts of a collection.
    """
    from indexer.clients import origin_of, requests_of  # noqa: PLC0415
    from indexer.service.discovery import Discovery  # noqa: PLC0415

    if relay and pds:
        raise click.UsageError("Name a --relay or a --pds, not both.")
    source = relay or pds or origin_of(settings.relays[0])
    async with _store(settings) as store, requests_of(settings) as outbound:
        discovery = Discovery(store, outbound)
        for collection in collections or ("",):
            listing = await discovery.begin(source, collection)
            name = f"{collection or 'all accounts'} of {source}"
            if listing.cursor is not None:
                click.echo(f"{name}: goes on behind {listing.listed:,} accounts", err=True)
            with accounts(name, None, _progress()) as heard:
                listing = await discovery.run(listing, heard)
            click.echo(f"{name}: {listing.listed} listed, {listing.found} added")
    if discovery.refused:
        click.echo(f"{discovery.refused} entries of the lists were no accounts, and are left out", err=True)
    return 0


@_command("sweep")
async def sweep_command(settings: Settings) -> int:
    """Hold what the relay lists against what is here, and have those repos fetched again that differ.

    A repo that seems behind is looked at again half a minute later, since the stream may be about to bring what it
    lacks. The daemon does the same every INDEXER_SWEEP_INTERVAL, and when the relay has lost something.
    """
    from indexer.clients import requests_of  # noqa: PLC0415
    from indexer.metrics import Metrics  # noqa: PLC0415
    from indexer.run import sweep_of  # noqa: PLC0415

    async with _store(settings) as store, requests_of(settings) as outbound:
        known = sum((await store.counts()).statuses.values())
        with accounts("accounts that the relay lists", known, _progress()) as heard:
            listing = await sweep_of(settings, store, outbound, Metrics()).sweep(heard)
    click.echo(f"{listing.listed} listed, {listing.found} differ and are fetched again")
    return 0


@_command("takedown")
@click.argument("did", metavar="DID", type=DID)
@click.option("--reverse", is_flag=True, help="Show it again.")
async def takedown_command(settings: Settings, *, did: str, reverse: bool) -> int:
    """Hide a repo here, whatever upstream says of it. It is kept up to date all the same."""
    async with _store(settings) as store:
        known = await store.takedown(did, on=not reverse)
    if not known:
        return _complain(f"{did} is not known here", UNKNOWN)
    click.echo(f"{did} is {'shown again' if reverse else 'hidden'}")
    return 0


@_command("export")
@click.option("--collection", required=True, metavar="NSID", type=NSID, help="The collection.")
@click.option("--format", "form", type=click.Choice(["jsonl", "parquet"]), default="jsonl", show_default=True)
@click.option("--output", "-o", type=click.Path(path_type=Path, dir_okay=False), help="A file; default: stdout.")
async def export_command(
    settings: Settings, *, collection: str, form: Literal["jsonl", "parquet"], output: Path | None
) -> int:
    """Write all visible records of a collection to a file, as of one moment.

    JSON lines, or Parquet, which needs the library pyarrow (pip install 'indexer[parquet]'). The file gets its name
    when it is whole. Memory doesn't depend on the number of records.
    """
    from indexer.export import export  # noqa: PLC0415

    if form == "parquet" and output is None and sys.stdout.isatty():
        raise click.UsageError("Parquet is not for terminals: give an --output.")
    async with _store(settings) as store:
        count = await export(store, collection, form, output)
    click.echo(f"records: {count:,}", err=True)
    return 0


@_command("list", rejected)
@click.option("--reason", metavar="REASON", type=REASON, help="Those refused for this reason (docs/reasons.md).")
@click.option("--did", metavar="DID", type=DID, help="Those that claim to be of this DID.")
@click.option("--limit", default=50, show_default=True, type=click.IntRange(1, 1_000_000), help="So many at most.")
@click.option("--json", "as_json", is_flag=True, help="JSON, one line each.")
async def list_rejected_command(
    settings: Settings, *, reason: Rejection | None, did: str | None, limit: int, as_json: bool
) -> int:
    """List dead letters, the newest first.

    Each with its ID, when it was refused, its relay, sequence number, DID and kind, and the reason.
    """
    from indexer.rejected import letter_facts, letter_lines  # noqa: PLC0415

    async with _store(settings) as store:
        letters = await store.letters(reason, did, most=limit)
    for letter in letters:
        click.echo(_json(letter_facts(letter)) if as_json else letter_lines(letter))
    if not letters:
        click.echo("No such message is kept.", err=True)
    return 0


@_command("show", rejected)
@click.argument("number", metavar="ID", type=LETTER)
@click.option("--json", "as_json", is_flag=True, help="JSON.")
@click.option("--frame", type=click.File("wb", lazy=True), help="Write the message's bytes to a file, and no more.")
async def show_rejected_command(settings: Settings, *, number: int, as_json: bool, frame: IO[bytes] | None) -> int:
    """Show all that is kept of one dead letter, with its message by field."""
    from indexer.rejected import letter_report, report_facts  # noqa: PLC0415

    async with _store(settings) as store:
        found = await store.letter(number)
    if found is None:
        return _complain(f"{number} is not known here", UNKNOWN)
    if frame is not None:
        frame.write(found[1])
        return 0
    report = letter_report(*found)
    if as_json:
        click.echo(_json(report))
        return 0
    _console().print(facts_table(report_facts(report)))
    if report["unreadable"] is None:
        click.echo(_readable({"header": report["header"], "payload": report["payload"]}))
    else:
        click.echo(f"\nIts fields can't be shown: {printable(report['unreadable'])}")
    return 0


@_command("replay", rejected)
@click.argument("numbers", nargs=-1, metavar="ID…", type=LETTER)
@click.option("--reason", metavar="REASON", type=REASON, help="All that were refused for this reason.")
async def replay_rejected_command(settings: Settings, *, numbers: tuple[int, ...], reason: Rejection | None) -> int:
    """Take messages up once more, in the order of their IDs, as if they had just arrived.

    By the settings, keys and states of now, while a daemon runs or without one. A line for each: its ID, the outcome,
    the reason. Applied, replayed (nothing new), buffered, ignored or desynchronized, it is a dead letter no more.
    Rejected again, or untried (its frame was cut, no key could be had), it stays.

    Exit code 4 if an ID is not known here, otherwise 1 if a letter stays.
    """
    from indexer.rejected import replayed_line  # noqa: PLC0415
    from indexer.run import replay  # noqa: PLC0415

    if bool(numbers) == (reason is not None):
        raise click.UsageError("Name IDs, or give a --reason.")
    stay = unknown = 0
    async with _store(settings) as store, replay(settings, store) as letters:
        for number in sorted(set(numbers)) if reason is None else await store.letters_of(reason):
            replayed = await letters.take(number)
            click.echo(replayed_line(replayed))
            stay += replayed.stays
            unknown += not replayed.known
    if unknown and numbers:
        return _complain(f"{unknown} of them are not known here", UNKNOWN)
    return _complain(f"{stay} of them stay", FAILED) if stay else 0


@_command("audit")
@click.argument("dids", nargs=-1, metavar="[DID…]", type=DID)
@click.option(
    "--sample",
    type=click.IntRange(1, 1_000_000),
    metavar="N",
    help=f"So many synchronized repos at random. Default, if no DID is named: {SAMPLE}.",
)
async def audit_command(settings: Settings, *, dids: tuple[str, ...], sample: int | None) -> int:
    """Fetch repos again and compare every record with the database, changing nothing.

    Each is fetched from its own host, proven whole, and compared as of one moment: head, records, their CIDs and
    values. If the host is ahead of us, the daemon gets some seconds to come up to it; it need not run.

    A line for each difference (of one repo, the first hundred) and for each repo that could not be compared, then a
    summary. Exit code 5 if there are differences; else 1 if a repo that is known could not be compared; else 4 if a DID
    is not known here.
    """
    from indexer.audit import Tally, at_once, auditing  # noqa: PLC0415

    if dids and sample is not None:
        raise click.UsageError("Name DIDs, or give a --sample.")
    tally = Tally()
    async with (
        _store(settings, connections=at_once(settings), readonly=True) as store,
        auditing(settings, store) as audit,
    ):
        repos = list(dict.fromkeys(dids)) or await store.sample(sample or SAMPLE)
        with counted("repos", _progress()) as progress:
            task = progress.add_task("repos", total=len(repos))
            async with aclosing(audit.verdicts(repos)) as verdicts:
                async for verdict in verdicts:
                    tally.add(verdict)
                    if lines := _verdict_lines(verdict):
                        progress.stop()  # it may be on the same terminal
                        click.echo("\n".join(lines))
                        progress.start()
                    progress.advance(task)
    return _conclude_audit(tally)


@_command("inspect")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE.car")
@click.option(
    "--key",
    metavar="did:key:…",
    type=KEY,
    help="The account's signing key, to check the signature with.",
)
async def inspect_command(settings: Settings, *, file: Path, key: PublicKey | None) -> int:
    """Verify an export of a repo offline, and list its records.

    Every block is hashed, the commit decoded, the whole tree walked. Exit code 1 with the reason if a rule is broken
    or something is missing.
    """
    from indexer.inspection import open_export  # noqa: PLC0415

    try:
        async with open_export(file, key, settings.limits) as export:
            return _list_export(export)
    except (UpstreamError, UnavailableError) as error:
        return _complain(f"{file} is invalid: {error}", FAILED)


def _database(settings: Settings) -> AbstractAsyncContextManager[str]:
    """The URL of the database; an embedded one runs, if it doesn't already, for as long as the block does."""
    from indexer.store.embedded import database  # noqa: PLC0415

    url = settings.database_url
    return database(url.get_secret_value() if url else None, settings.data_dir)


@asynccontextmanager
async def _store(settings: Settings, *, connections: int = 1, readonly: bool = False) -> AsyncIterator[Store]:
    from indexer.store.migrate import schema_is_current  # noqa: PLC0415

    async with _database(settings) as dsn:
        if not await schema_is_current(dsn):
            raise SchemaError("the database's schema is not this program's: run `indexer migrate`")
        store = await Store.open(dsn, connections=connections, readonly=readonly)
        try:
            yield store
        finally:
            await store.close()


async def _statuses(store: Store, shard: Shard) -> AsyncIterator[Status]:
    """One a second, for ever. Rates are those of the last minute, and at first of what there has been of it."""
    at = time()
    samples = deque([Sample(at, await store.counts())])
    while True:
        await asyncio.sleep(SAMPLE_SECONDS)
        at = time()
        while len(samples) > 1 and samples[1].at <= at - SMOOTH_SECONDS:
            samples.popleft()
        samples.append(Sample(at, await store.counts(since=samples[0].at)))
        yield status_of(store.address, shard, samples[0], samples[-1])


async def _watch(statuses: AsyncIterator[Status], *, as_json: bool) -> NoReturn:
    with nullcontext() if as_json else Live(console=_console(), auto_refresh=False) as live:
        while True:
            status = await anext(statuses)
            if live is None:
                click.echo(_json(status.to_json()))
            else:
                live.update(status_picture(status), refresh=True)


async def _did(store: Store, account: str) -> str | None:
    """The DID of an account named by it or by a handle; None if nobody is known by that handle."""
    return account if is_did(account) else await store.did_of_handle(account)


def _progress() -> Console:
    """For what moves while a command works: it shows nothing off a terminal."""
    return Console(stderr=True, highlight=False, markup=False, emoji=False)


def _console() -> Console:
    """As wide as the terminal; off a terminal wide enough that no value is broken."""
    return Console(width=None if sys.stdout.isatty() else 400, highlight=False, markup=False, emoji=False)


def _json(value: Any) -> str:
    """One line of ASCII, which no value can break or steer a terminal with."""
    return json.dumps(value, default=datetime.isoformat)


def _readable(value: Any) -> str:
    """JSON for people: other scripts as they are, whatever could steer a terminal escaped."""
    text = json.dumps(value, indent=2, ensure_ascii=False)
    return "".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text)


def _verdict_lines(verdict: "Verdict") -> list[str]:
    lines = [f"{printable(place)} {printable(what)}" for place, what in verdict.shown]
    if more := verdict.differences - len(verdict.shown):
        lines.append(f"{printable(verdict.did)} {more:,} more differences")
    if verdict.hindrance is not None:
        lines.append(f"{printable(verdict.did)} not compared: {printable(verdict.hindrance)}")
    return lines


def _conclude_audit(tally: "Tally") -> int:
    click.echo(f"repos: {tally.repos:,} compared, {tally.equal:,} equal")
    click.echo(f"records: {tally.records:,} compared, {tally.differences:,} differences")
    if tally.hindered:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in sorted(tally.hindrances.items()))
        click.echo(f"not compared: {tally.hindered:,} ({reasons})")
    if tally.differences:
        return DIFFERENT
    if tally.hindered > tally.unknown:
        return FAILED
    return UNKNOWN if tally.unknown else 0


def _list_export(export: "Export") -> int:
    commit = export.commit
    click.echo(f"did        {commit.did}\nrev        {commit.rev}\ncommit     {cid_text(commit.cid)}")
    click.echo(f"data       {cid_text(commit.data)}\nrecords    {export.count}")
    click.echo(f"signature  {'valid' if export.signed else 'not checked: no --key'}\n")
    missing = 0
    for record in export.records():
        missing += record.problem == Problem.MISSING
        note = f"  ({printable(record.problem)})" if record.problem else ""
        click.echo(f"{cid_text(record.cid)} {record.path}{note}")
    if missing:
        return _complain(f"{FetchFailure.EXPORT_LACKS_RECORDS}: {missing} records are not in the file", FAILED)
    return 0
