"""The command `doctor`: checks that run concurrently, each with a timeout, and change nothing."""

import asyncio
import os
import resource
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, replace
from email.utils import parsedate_to_datetime
from enum import StrEnum
from itertools import count
from pathlib import Path
from time import time
from typing import Any
from urllib.parse import urlsplit

import click
from rich.text import Text

from indexer.app.clients import core_of, http_origin, open_outbound_client, outbound_concurrency
from indexer.app.daemon import CONNECTIONS
from indexer.app.interpreter import SLOWDOWN, InterpreterBuild, interpreter_build
from indexer.app.settings import Settings, load_from_environment, load_settings
from indexer.cli.command import ExitCode, command, config_file, json_option
from indexer.cli.database import open_database
from indexer.cli.output import result_console, show_progress, to_json
from indexer.db.requirements import DatabaseFacts, load_database_facts
from indexer.errors import SettingsError, UnavailableError
from indexer.net.http.checked_connector import DnsResolver, resolve_with_system
from indexer.net.http.http_client import OutboundClient
from indexer.net.identity.handle_verifier import HandleVerifier
from indexer.net.relay.subscription import first_event
from indexer.redaction import without_secrets
from indexer.sync.events import InfoEvent, StreamError
from indexer.sync.shard import Layout
from indexer.telemetry.log import printable

MIN_FREE_BYTES, FEW_FREE_BYTES = 10**9, 10 * 10**9
"""Free space of the data directory, in bytes. Less than the first is a failure, less than the second a warning."""
MIN_SIZES = {
    "shared_buffers": (256 * 2**20, "Set it to a quarter of the memory."),
    "max_wal_size": (2 * 2**30, "Set it to 4GB or more, so that checkpoints are rare."),
}
"""Sizes in bytes below which there is a warning, and what to do."""
HUGE_PAGES_FROM = 4 * 2**30
"""Bytes of `shared_buffers` from which huge pages are recommended."""
MAX_CLOCK_DIFFERENCE = 5.0
"""Seconds by which clocks may differ without a warning. A Date header has whole seconds, and requests take time."""
OTHER_FILES = 300
"""Open files beside outbound requests and database connections: HTTP clients, spool files, libraries."""
EXAMPLE_DID, EXAMPLE_HANDLE = "did:plc:z72i7hdynmk6r22z27h6tvur", "bsky.app"
"""The account whose document and whose DNS record are asked for."""
DATABASE_ACTION = (
    "Start the database, correct INDEXER_DATABASE_URL, or grant the privileges of "
    "docs/operations.md#postgres-version-and-privileges."
)
RELAY_ACTION = "Check INDEXER_RELAYS, the firewall, and the name servers."
DIRECTORY_ACTION = "Check INDEXER_PLC_URL, the firewall, and the name servers."
CORE_ACTION = "Install it with `pip install 'atproto-indexer[native]'`, or build it with `make native` (README.md)."
INTERPRETER_ACTION = (
    "Use the Python of your distribution or of the image python:3.11-slim-bookworm, or build it with the options "
    "--enable-optimizations --with-lto."
)
HANDLE_ACTION = "Allow DNS queries for TXT records, or set INDEXER_HANDLE_RATE=0."
DOCUMENT_BYTES = 65_536
"""Maximum size of a response of a relay or a directory."""
DIRECTORY_ANSWERS = frozenset({200, 404, 410})
"""A directory that denies the account answers, too."""


class Level(StrEnum):
    """The severity of a finding."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


OK, WARN, FAIL = Level
STYLES = {OK: "green", WARN: "yellow", FAIL: "bold red"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    Attributes:
        check: What was checked.
        found: What was found.
        action: What the operator should do; None if nothing.
    """

    check: str
    level: Level
    found: str
    action: str | None = None


def judge(check: str, found: str, action: str, *, warn: bool = False, fail: bool = False) -> Finding:
    """Return a finding with this action, or one without an action if it is neither a warning nor a failure."""
    level = FAIL if fail else WARN if warn else OK
    return Finding(check, level, found, None if level is OK else action)


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Maximum times, in seconds.

    Attributes:
        check: For a check, besides the wait for the facts about the database.
        database: Until the facts about the database are known: the embedded Postgres may have to start.
        connect: To connect to a relay.
        message: To wait for the next message of a relay.
    """

    check: float = 20.0
    database: float = 60.0
    connect: float = 10.0
    message: float = 5.0


@dataclass(frozen=True, slots=True)
class Context:
    """The data and clients of the checks.

    Attributes:
        facts: Ends with the facts about the database, or with the error of reading them.
    """

    settings: Settings
    outbound: OutboundClient
    facts: "asyncio.Task[DatabaseFacts]"
    timeouts: Timeouts

    async def facts_if_available(self) -> DatabaseFacts | None:
        """Return the facts about the database; None if it is not available, which its own check reports."""
        await asyncio.wait([self.facts])
        return None if self.facts.cancelled() or self.facts.exception() else self.facts.result()

    async def first_event(self, relay: str, cursor: int | None) -> Any:
        """Return the first event that a relay sends after a cursor; None if it sends nothing in time."""
        settings, timeouts = self.settings, self.timeouts
        return await first_event(
            relay,
            cursor,
            settings.limits,
            settings.user_agent,
            connect_timeout=timeouts.connect,
            message_timeout=timeouts.message,
        )


def _log_settings(_: Path | None) -> Settings:
    """Return the settings of log lines, or the defaults if they are bad: `settings` is one of the checks."""
    try:
        return load_from_environment("log_format", "log_level")
    except SettingsError:
        return Settings()


@command("doctor", load=_log_settings)
@json_option
async def doctor_command(_: Settings, *, as_json: bool) -> int:
    """Check settings, database, disk, clock, relays, directories, DNS and limits.

    Print one line for each check: `ok`, `warn` or `fail`, what was found, and what to do. Nothing is changed, except
    that the embedded Postgres is started if it is used. The checks send a few requests, by the same rules as the
    daemon, and take at most 80 seconds. The exit code is 1 if a check fails.
    """
    try:
        settings = load_settings(config_file())
        with show_progress("checks", None) as progress:
            findings = await run_checks(settings, lambda done: progress.update(done, total=len(CHECKS)))
    except SettingsError as error:  # without settings there is nothing else to check
        findings = [Finding("settings", FAIL, str(error), "Correct it; docs/settings.md lists all settings.")]
    failed = any(finding.level is FAIL for finding in findings)
    if as_json:
        click.echo(to_json({"ok": not failed, "checks": [asdict(finding) for finding in findings]}))
    else:
        for finding in findings:
            text = f"{finding.check}: {finding.found}" + (f". {finding.action}" if finding.action else "")
            line = Text(f"{finding.level:<4}", STYLES[finding.level])
            result_console().print(line.append(f"  {printable(without_secrets(text))}", ""), soft_wrap=True)
    return ExitCode.FAILED if failed else ExitCode.OK


async def run_checks(
    settings: Settings, on_done: Callable[[int], None] = lambda _: None, timeouts: Timeouts | None = None
) -> list[Finding]:
    """Run all checks concurrently, and return their findings in the order of the checks.

    Args:
        settings: The settings to check.
        on_done: Called after each check, with the number of checks that are done.
        timeouts: Default: those of `Timeouts`.
    """
    timeouts = timeouts or Timeouts()
    numbers = count(1)

    async def run(name: str, check: Check, action: str) -> Sequence[Finding]:
        try:
            async with asyncio.timeout(timeouts.database + timeouts.check):
                found = check(context)
                return [found] if isinstance(found, Finding) else await found
        except TimeoutError as error:
            return [Finding(name, FAIL, f"no answer in time {error}".rstrip(), action)]
        except (UnavailableError, SettingsError, OSError) as error:
            return [Finding(name, FAIL, str(error), action)]
        finally:
            on_done(next(numbers))

    async with open_outbound_client(settings) as outbound, _facts_task(settings, timeouts) as facts:
        context = Context(settings, outbound, facts, timeouts)
        found = await asyncio.gather(*(run(*row) for row in CHECKS))
    return [finding for findings in found for finding in findings]


@asynccontextmanager
async def _facts_task(settings: Settings, timeouts: Timeouts) -> "AsyncIterator[asyncio.Task[DatabaseFacts]]":
    """Read the facts about the database in a task."""

    async def read() -> DatabaseFacts:
        async with asyncio.timeout(timeouts.database), open_database(settings) as dsn:
            return await load_database_facts(dsn)

    task = asyncio.create_task(read(), name="database facts")
    try:
        yield task
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError, UnavailableError, SettingsError, OSError):
            await task


async def _check_settings(context: Context) -> Sequence[Finding]:
    settings = context.settings
    findings = [Finding("settings", OK, f"valid; shard {settings.shard}, roles {', '.join(settings.roles)}")]
    if settings.contact is None:
        action = "Set INDEXER_CONTACT to a URL or an e-mail address."
        findings.append(Finding("contact", WARN, "operators of other hosts cannot reach you", action))
    if settings.allow_private_hosts:
        action = "Unset INDEXER_ALLOW_PRIVATE_HOSTS, except on a local network."
        found = "any account can make this daemon send requests to private addresses"
        findings.append(Finding("private hosts", WARN, found, action))
    return findings


def interpreter_finding(build: InterpreterBuild) -> Finding:
    """Return how the interpreter was built. One without profile-guided optimization is a warning."""
    slow = build.profile_guided is False
    found = f"{build}; up to {SLOWDOWN} times slower" if slow else str(build)
    return judge("interpreter", found, INTERPRETER_ACTION, warn=slow)


def core_finding(settings: Settings) -> Finding:
    """Return the core that a daemon with these settings uses. That the native one is missing is a warning.

    Raises:
        SettingsError: The settings demand the native core, and it cannot be used.
    """
    core = core_of(settings)
    if core.name == "native":
        return Finding("core", OK, f"native, version {core.version}; threads: {core.threads}")
    if settings.core == "python":
        return Finding("core", OK, "python, as INDEXER_CORE says")
    found = "python: the native core is not installed, which needs much less CPU"
    return Finding("core", WARN, found, CORE_ACTION)


async def _check_database(context: Context) -> Sequence[Finding]:
    facts = await context.facts
    version = facts.settings["server_version"]
    return [Finding("database", OK, f"Postgres {version} at {facts.address}"), _schema_finding(facts)]


def _schema_finding(facts: DatabaseFacts) -> Finding:
    schema = facts.schema
    if facts.missing is not None:
        return Finding("schema", FAIL, facts.missing, DATABASE_ACTION)
    if schema.database == schema.release:
        return Finding("schema", OK, f"version {schema.database}")
    if schema.is_usable:
        found = f"version {schema.database} of a newer release, which this release can use"
        return Finding("schema", WARN, found, "Upgrade this program, too.")
    found = "no schema" if schema.database is None else f"version {schema.database}"
    found = f"{found}; this release needs {schema.release}"
    if schema.database is not None and schema.database > schema.release:
        return Finding("schema", FAIL, found, "Use the release that upgraded it, or a newer one.")
    return Finding("schema", WARN, found, "`indexer run` upgrades it at its start, `indexer migrate` now.")


async def _check_database_settings(context: Context) -> Sequence[Finding]:
    facts = await context.facts_if_available()
    return [] if facts is None else database_setting_findings(facts, context.settings)


_DAMAGED = "After a crash of the machine, the database may be damaged. Set {0} = on."
BAD_VALUES = (
    ("fsync", "off", FAIL, _DAMAGED.format("fsync")),
    ("full_page_writes", "off", FAIL, _DAMAGED.format("full_page_writes")),
    ("autovacuum", "off", FAIL, "Tables grow without a limit. Set autovacuum = on."),
    (
        "synchronous_commit",
        "off",
        WARN,
        "A crash may lose the newest changes, and assign their numbers again. Set synchronous_commit = on.",
    ),
    ("jit", "on", WARN, "Set jit = off for roles that read the public views."),
)
"""Settings of Postgres, their bad values, how bad they are, and what to do; docs/operations.md#configure-postgres."""
_HUGE_PAGES = (
    "huge_pages_status",
    "off",
    WARN,
    "Let the kernel reserve huge pages, which save CPU: docs/operations.md#configure-postgres.",
)


def database_setting_findings(facts: DatabaseFacts, settings: Settings) -> list[Finding]:
    """Return one finding for each setting of Postgres that matters."""
    values, sizes = facts.settings, facts.sizes
    bad_values = [*BAD_VALUES, _HUGE_PAGES] if sizes["shared_buffers"] >= HUGE_PAGES_FROM else BAD_VALUES
    findings = [
        Finding(name, level, bad, action) if values[name] == bad else Finding(name, OK, values[name])
        for name, bad, level, action in bad_values
    ]
    findings += [
        judge(name, f"{sizes[name] / 2**20:,.0f} MiB", action, warn=sizes[name] < minimum)
        for name, (minimum, action) in MIN_SIZES.items()
    ]
    return [*findings, _connections_finding(values, settings, facts.layout)]


def _connections_finding(values: Mapping[str, str], settings: Settings, layout: Layout) -> Finding:
    """Compare the connections that all shards need with the ones that the server allows for ordinary roles."""
    single = [
        True,  # the check that the database answers
        "live" in settings.roles,  # the shard lock
        "feed" in settings.roles,  # the ownership of the feed
        "feed" in settings.roles,  # the signal of new changes, for Jetstream clients
        not layout.commit_numbers,  # the numbering of changes
    ]
    of_process, shards = CONNECTIONS + sum(single), settings.shard.count
    allowed = int(values["max_connections"]) - int(values["superuser_reserved_connections"])
    of_all = f", {shards} shards {of_process * shards}" if shards > 1 else ""
    found = f"{allowed} for ordinary roles; a process needs {of_process}{of_all}"
    return judge(
        "max_connections",
        found,
        "Raise max_connections.",
        warn=of_process * shards > allowed,
        fail=of_process > allowed,
    )


def disk_finding(directory: Path) -> Finding:
    """Return the free space of the data directory, or of the nearest parent that exists.

    Raises:
        OSError: The directory cannot be used.
    """
    directory = directory.absolute()
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise PermissionError(f"{existing} is not a directory that this account can write")
    usage = shutil.disk_usage(existing)
    return judge(
        "disk",
        f"{usage.free / 10**9:,.1f} GB of {usage.total / 10**9:,.1f} GB free in {existing}",
        "Free space, or set INDEXER_DATA_DIR; docs/operations.md#estimate-disk-space-and-memory.",
        warn=usage.free < FEW_FREE_BYTES,
        fail=usage.free < MIN_FREE_BYTES,
    )


def open_files_finding(limit: int, settings: Settings) -> Finding:
    """Compare the hard limit of open files, up to which the daemon raises its own, with what the daemon needs."""
    needed = outbound_concurrency(settings) + CONNECTIONS + OTHER_FILES
    unlimited = limit == resource.RLIM_INFINITY
    found = f"{'no limit' if unlimited else f'limit {limit:,}'}; a process needs {needed:,}"
    action = "Raise the hard limit: `ulimit -Hn`, or LimitNOFILE of systemd."
    return judge("open files", found, action, fail=not unlimited and limit < needed)


async def _check_clock(context: Context) -> Sequence[Finding]:
    relay = http_origin(context.settings.relays[0])
    ahead_by_host = {}
    with suppress(UnavailableError):  # the check of the relay reports it
        asked_at = time()
        answer = await context.outbound.get(
            f"{relay}/xrpc/_health", max_bytes=DOCUMENT_BYTES, timeout=context.timeouts.check
        )
        with suppress(ValueError, TypeError):  # no readable header
            date = parsedate_to_datetime(answer.headers.get("Date", "")).timestamp()
            ahead_by_host[relay] = date + 0.5 - (asked_at + time()) / 2
    if facts := await context.facts_if_available():
        ahead_by_host["the database"] = facts.clock_ahead
    limit = context.settings.limits.clock_drift_seconds
    return [clock_finding(host, ahead, limit) for host, ahead in sorted(ahead_by_host.items())]


def clock_finding(host: str, ahead: float, limit: float) -> Finding:
    """Return the difference of two clocks. Revs further in the future than `limit` seconds are rejected."""
    if abs(ahead) <= MAX_CLOCK_DIFFERENCE:
        return Finding("clock", OK, f"within {MAX_CLOCK_DIFFERENCE:g} s of {host}")
    rejects = abs(ahead) > max(limit, MAX_CLOCK_DIFFERENCE)
    action = f"Messages are rejected at a difference of {limit:g} s. " if rejects else ""
    found = f"{abs(ahead):.1f} s {'behind' if ahead > 0 else 'ahead of'} {host}"
    return judge("clock", found, f"{action}Synchronize the clocks, for example with chrony.", warn=True, fail=rejects)


async def _check_relays(context: Context) -> Sequence[Finding]:
    return one_is_enough(await asyncio.gather(*(_relay_finding(context, url) for url in context.settings.relays)))


async def _relay_finding(context: Context, relay: str) -> Finding:
    try:
        event = await context.first_event(relay, None)
    except OSError as error:
        return Finding("relay", FAIL, f"{relay}: {str(error) or type(error).__name__}", RELAY_ACTION)
    if isinstance(event, StreamError):
        return Finding("relay", FAIL, f"{relay} sends an error: {event.error}", RELAY_ACTION)
    sent = f"no message for {context.timeouts.message:g} s" if event is None else f"a message with number {event.seq}"
    return Finding("relay", OK, f"{relay} opened the stream and sent {sent}")


def one_is_enough(findings: Sequence[Finding]) -> Sequence[Finding]:
    """Return failures as warnings if there is a host without one: the daemon uses that host."""
    if all(finding.level is FAIL for finding in findings):
        return findings
    return [replace(finding, level=WARN) if finding.level is FAIL else finding for finding in findings]


async def _check_cursors(context: Context) -> Sequence[Finding]:
    findings = []
    facts = await context.facts_if_available()
    for relay in context.settings.relays if facts else ():
        cursor = facts.cursors.get(relay) if facts else None
        if cursor is None:
            findings.append(Finding("cursor", OK, f"none is stored for {relay}"))
            continue
        with suppress(OSError):  # the check of the relay reports it
            findings.append(cursor_finding(relay, cursor, await context.first_event(relay, cursor)))
    return findings


def cursor_finding(relay: str, cursor: int, event: Any) -> Finding:
    """Compare the stored cursor with the first event that the relay sends after it (None: it sends nothing)."""
    action = "The daemon opens a gap and compares the repo list; wait until `indexer status` shows no open gap."
    match event:
        case InfoEvent(name=name):
            return Finding("cursor", WARN, f"{relay} no longer has messages after {cursor}: {name}", action)
        case StreamError(error=error):
            return Finding("cursor", WARN, f"{relay} refuses the stored cursor {cursor}: {error}", action)
        case None:
            return Finding("cursor", OK, f"{relay} has no message after {cursor}")
        case _ if event.seq is not None and event.seq < cursor:
            action = f"{action} If /readyz keeps reporting stream-error, run `indexer cursor reset {relay}`."
            return Finding("cursor", WARN, f"{relay} is at {event.seq}, before the cursor {cursor}", action)
    return Finding("cursor", OK, f"{relay} continues after {cursor}")


async def _check_directories(context: Context) -> Sequence[Finding]:
    return one_is_enough(await asyncio.gather(*(_directory_finding(context, url) for url in context.settings.plc_url)))


async def _directory_finding(context: Context, url: str) -> Finding:
    try:
        response = await context.outbound.get(
            f"{url}/{EXAMPLE_DID}",
            max_bytes=DOCUMENT_BYTES,
            timeout=context.timeouts.check,
            accept="application/did+ld+json",
        )
    except UnavailableError as error:
        return Finding("directory", FAIL, f"{url}: {error}", DIRECTORY_ACTION)
    if response.status not in DIRECTORY_ANSWERS:
        return Finding("directory", FAIL, f"{url} answers with status {response.status}", DIRECTORY_ACTION)
    return Finding("directory", OK, f"{url} answers")


async def _check_dns(context: Context) -> Sequence[Finding]:
    settings = context.settings
    parts = urlsplit(settings.relays[0])
    host = parts.hostname or ""
    resolve = resolve_with_system if settings.allow_private_hosts else DnsResolver(settings.dns_servers)
    addresses = await resolve(host, parts.port or 443)
    return [Finding("dns", OK, f"{host} resolves to {', '.join(addresses[:4])}")]


async def _check_handle(context: Context) -> Sequence[Finding]:
    """Ask for the TXT record of a handle, as the verification of handles does."""
    settings = context.settings
    if not settings.handle_rate:
        return [Finding("dns txt", OK, "not needed: INDEXER_HANDLE_RATE is 0")]
    results: dict[str, str] = {}
    handles = HandleVerifier(
        context.outbound,
        settings.dns_servers,
        allow_private_hosts=settings.allow_private_hosts,
        on_lookup=results.__setitem__,
    )
    with suppress(UnavailableError):  # `results` has the reason
        await handles.verify_handle(EXAMPLE_DID, EXAMPLE_HANDLE)
    result, name = results.get("dns", "no answer"), f"_atproto.{EXAMPLE_HANDLE}"
    if result == "found":
        return [Finding("dns txt", OK, f"{name} has a TXT record")]
    return [Finding("dns txt", WARN, f"{name}: {result}; handles are verified by HTTPS only", HANDLE_ACTION)]


Check = Callable[[Context], Finding | Awaitable[Sequence[Finding]]]
CHECKS: tuple[tuple[str, Check, str], ...] = (
    ("settings", _check_settings, ""),
    ("interpreter", lambda _: interpreter_finding(interpreter_build()), ""),
    ("core", lambda context: core_finding(context.settings), CORE_ACTION),
    ("database", _check_database, DATABASE_ACTION),
    ("database settings", _check_database_settings, ""),
    (
        "disk",
        lambda context: disk_finding(context.settings.data_dir),
        "Create the directory, or set INDEXER_DATA_DIR to one that this account can write.",
    ),
    (
        "open files",
        lambda context: open_files_finding(resource.getrlimit(resource.RLIMIT_NOFILE)[1], context.settings),
        "",
    ),
    ("clock", _check_clock, "Synchronize the clock of this machine, for example with chrony."),
    ("relay", _check_relays, RELAY_ACTION),
    ("cursor", _check_cursors, RELAY_ACTION),
    ("directory", _check_directories, DIRECTORY_ACTION),
    ("dns", _check_dns, "Correct INDEXER_DNS_SERVERS, or the name servers of this machine."),
    ("dns txt", _check_handle, HANDLE_ACTION),
)
"""The checks: the name, what returns the findings, and what to do after an error of the network, the database or the
settings."""
