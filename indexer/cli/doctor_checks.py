"""The checks of `indexer doctor`. They run concurrently, each with a timeout, and change nothing."""

import asyncio
import os
import resource
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, replace
from email.utils import parsedate_to_datetime
from enum import StrEnum
from itertools import count
from pathlib import Path
from time import time
from typing import Any
from urllib.parse import urlsplit

from indexer.app.clients import core_of, http_origin, open_outbound_client, outbound_concurrency
from indexer.app.daemon import CONNECTIONS
from indexer.app.interpreter import SLOWDOWN, InterpreterBuild, interpreter_build
from indexer.app.settings import Settings
from indexer.cli.database import open_database
from indexer.db.server_facts import ServerFacts, load_server_facts
from indexer.errors import SettingsError, UnavailableError
from indexer.net.http import OutboundClient
from indexer.net.http.checked_connector import DnsResolver, resolve_with_system
from indexer.net.identity import HandleVerifier
from indexer.net.relay.seek import first_event
from indexer.sync.events import InfoEvent, StreamError
from indexer.sync.shard import Layout

MIN_FREE_BYTES, FEW_FREE_BYTES = 10**9, 10 * 10**9
"""Free space of the data directory, in bytes. Less than the first is a failure, less than the second a warning."""
MIN_SHARED_BUFFERS, MIN_WAL_SIZE = 256 * 2**20, 2 * 2**30
"""Bytes of `shared_buffers` and `max_wal_size` below which there is a warning."""
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
DOCUMENT_BYTES = 65_536
"""Maximum size of a response of a relay or a directory."""
DIRECTORY_ANSWERS = frozenset({200, 404, 410})
"""A directory that denies the account answers, too."""


class Level(StrEnum):
    """The severity of a finding."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


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

    def to_dict(self) -> dict[str, Any]:
        """Return the finding as a JSON object."""
        return asdict(self)


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
    facts: "asyncio.Task[ServerFacts]"
    timeouts: Timeouts

    async def facts_if_available(self) -> ServerFacts | None:
        """Return the facts about the database; None if it is not available, which its own check reports."""
        await asyncio.wait([self.facts])
        return None if self.facts.cancelled() or self.facts.exception() else self.facts.result()


@dataclass(frozen=True, slots=True)
class Check:
    """A check.

    Attributes:
        run: Returns the findings. An error of the network, of the database or of the settings is a failure.
        action: What the operator should do after a failure.
    """

    name: str
    run: Callable[[Context], Awaitable[Sequence[Finding]]]
    action: str


async def run_checks(
    settings: Settings, on_done: Callable[[int, int], None] = lambda *_: None, timeouts: Timeouts | None = None
) -> list[Finding]:
    """Run all checks concurrently, and return their findings in the order of the checks.

    Args:
        settings: The settings to check.
        on_done: Called after each check, with the number of checks that are done, and of all checks.
        timeouts: Default: those of `Timeouts`.
    """
    timeouts = timeouts or Timeouts()
    checks = _checks()
    numbers = count(1)

    async def run(check: Check) -> Sequence[Finding]:
        findings = await _bounded(check, context)
        on_done(next(numbers), len(checks))
        return findings

    async with open_outbound_client(settings) as outbound, _facts_task(settings, timeouts) as facts:
        context = Context(settings, outbound, facts, timeouts)
        found = await asyncio.gather(*map(run, checks))
    return [finding for findings in found for finding in findings]


def _checks() -> list[Check]:
    return [
        Check("settings", _check_settings, "Correct the setting; docs/settings.md lists all of them."),
        Check("interpreter", _check_interpreter, ""),
        Check("core", _check_core, CORE_ACTION),
        Check("database", _check_database, DATABASE_ACTION),
        Check("database settings", _check_database_settings, ""),
        Check("disk", _check_disk, "Create the directory, or set INDEXER_DATA_DIR to one that this account can write."),
        Check("open files", _check_open_files, ""),
        Check("clock", _check_clock, "Synchronize the clock of this machine, for example with chrony."),
        Check("relay", _check_relays, RELAY_ACTION),
        Check("cursor", _check_cursors, RELAY_ACTION),
        Check("directory", _check_directories, DIRECTORY_ACTION),
        Check("dns", _check_dns, "Correct INDEXER_DNS_SERVERS, or the name servers of this machine."),
        Check("dns txt", _check_handle, "Allow DNS queries for TXT records, or set INDEXER_HANDLE_RATE=0."),
    ]


@asynccontextmanager
async def _facts_task(settings: Settings, timeouts: Timeouts) -> "AsyncIterator[asyncio.Task[ServerFacts]]":
    """Read the facts about the database in a task."""

    async def read() -> ServerFacts:
        async with asyncio.timeout(timeouts.database), open_database(settings) as dsn:
            return await load_server_facts(dsn)

    task = asyncio.create_task(read(), name="database facts")
    try:
        yield task
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError, UnavailableError, SettingsError, OSError):
            await task


async def _bounded(check: Check, context: Context) -> Sequence[Finding]:
    """Run a check; a timeout or an expected error is a failure."""
    try:
        async with asyncio.timeout(context.timeouts.database + context.timeouts.check):
            return await check.run(context)
    except TimeoutError as error:
        return [Finding(check.name, Level.FAIL, f"no answer in time {error}".rstrip(), check.action)]
    except (UnavailableError, SettingsError, OSError) as error:
        return [Finding(check.name, Level.FAIL, str(error), check.action)]


async def _check_settings(context: Context) -> Sequence[Finding]:
    settings = context.settings
    findings = [Finding("settings", Level.OK, f"valid; shard {settings.shard}, roles {', '.join(settings.roles)}")]
    if settings.contact is None:
        action = "Set INDEXER_CONTACT to a URL or an e-mail address."
        findings.append(Finding("contact", Level.WARN, "operators of other hosts cannot reach you", action))
    if settings.allow_private_hosts:
        action = "Unset INDEXER_ALLOW_PRIVATE_HOSTS, except on a local network."
        found = "any account can make this daemon send requests to private addresses"
        findings.append(Finding("private hosts", Level.WARN, found, action))
    return findings


async def _check_interpreter(_: Context) -> Sequence[Finding]:
    return [interpreter_finding(interpreter_build())]


def interpreter_finding(build: InterpreterBuild) -> Finding:
    """Return how the interpreter was built. One without profile-guided optimization is a warning."""
    if build.profile_guided is not False:
        return Finding("interpreter", Level.OK, str(build))
    return Finding("interpreter", Level.WARN, f"{build}; up to {SLOWDOWN} times slower", INTERPRETER_ACTION)


async def _check_core(context: Context) -> Sequence[Finding]:
    return [core_finding(context.settings)]


def core_finding(settings: Settings) -> Finding:
    """Return the core that a daemon with these settings uses. That the native one is missing is a warning.

    Raises:
        SettingsError: The settings demand the native core, and it cannot be used.
    """
    core = core_of(settings)
    if core.name == "native":
        return Finding("core", Level.OK, f"native, version {core.version}; threads: {core.threads}")
    if settings.core == "python":
        return Finding("core", Level.OK, "python, as INDEXER_CORE says")
    found = "python: the native core is not installed, which needs much less CPU"
    return Finding("core", Level.WARN, found, CORE_ACTION)


async def _check_database(context: Context) -> Sequence[Finding]:
    facts = await context.facts
    version = facts.settings["server_version"]
    found = [Finding("database", Level.OK, f"Postgres {version} at {facts.address}")]
    return [*found, _schema_finding(facts)]


def _schema_finding(facts: ServerFacts) -> Finding:
    schema = facts.schema
    if schema.missing is not None:
        return Finding("schema", Level.FAIL, schema.missing, DATABASE_ACTION)
    if schema.is_current:
        return Finding("schema", Level.OK, f"version {schema.database}")
    needs = f"this release needs {schema.release}"
    if schema.compatible:
        found = f"version {schema.database} of a newer release, which this release can use"
        return Finding("schema", Level.WARN, found, "Upgrade this program, too.")
    if schema.database is not None and schema.database > schema.release:
        action = "Use the release that upgraded it, or a newer one."
        return Finding("schema", Level.FAIL, f"version {schema.database}; {needs}", action)
    found = f"no schema; {needs}" if schema.database is None else f"version {schema.database}; {needs}"
    return Finding("schema", Level.WARN, found, "`indexer run` upgrades it at its start, `indexer migrate` now.")


async def _check_database_settings(context: Context) -> Sequence[Finding]:
    facts = await context.facts_if_available()
    return [] if facts is None else database_setting_findings(facts, context.settings)


def database_setting_findings(facts: ServerFacts, settings: Settings) -> list[Finding]:
    """Return one finding for each setting of Postgres that matters; docs/operations.md#configure-postgres."""
    values, sizes = facts.settings, facts.sizes
    lost = "After a crash of the machine, the database may be damaged. Set {0} = on."
    numbers = "A crash may lose the newest changes, and assign their numbers again. Set synchronous_commit = on."
    findings = [
        _setting("fsync", values, Level.FAIL, lost.format("fsync"), {"off"}),
        _setting("full_page_writes", values, Level.FAIL, lost.format("full_page_writes"), {"off"}),
        _setting("autovacuum", values, Level.FAIL, "Tables grow without a limit. Set autovacuum = on.", {"off"}),
        _setting("synchronous_commit", values, Level.WARN, numbers, {"off"}),
        _setting("jit", values, Level.WARN, "Set jit = off for roles that read the public views.", {"on"}),
        _size("shared_buffers", sizes, MIN_SHARED_BUFFERS, "Set it to a quarter of the memory."),
        _size("max_wal_size", sizes, MIN_WAL_SIZE, "Set it to 4GB or more, so that checkpoints are rare."),
    ]
    if sizes["shared_buffers"] >= HUGE_PAGES_FROM:
        advice = "Let the kernel reserve huge pages, which save CPU: docs/operations.md#configure-postgres."
        findings.append(_setting("huge_pages_status", values, Level.WARN, advice, {"off"}))
    return [*findings, _connections_finding(facts, settings)]


def _setting(name: str, values: Any, level: Level, action: str, bad: set[str]) -> Finding:
    value = values[name]
    return Finding(name, level, value, action) if value in bad else Finding(name, Level.OK, value)


def _size(name: str, sizes: Any, minimum: int, action: str) -> Finding:
    found = f"{sizes[name] / 2**20:,.0f} MiB"
    return Finding(name, Level.OK, found) if sizes[name] >= minimum else Finding(name, Level.WARN, found, action)


def _daemon_connections(settings: Settings, layout: Layout) -> int:
    """Return how many database connections a daemon opens at most: its pool, and those of single stages."""
    single = [
        True,  # the check that the database answers
        "live" in settings.roles,  # the shard lock
        "feed" in settings.roles,  # the ownership of the feed
        "feed" in settings.roles,  # the signal of new changes, for Jetstream clients
        not layout.commit_numbers,  # the numbering of changes
    ]
    return CONNECTIONS + sum(single)


def _connections_finding(facts: ServerFacts, settings: Settings) -> Finding:
    """Compare the connections that all shards need with the ones that the server allows for ordinary roles."""
    values = facts.settings
    allowed = int(values["max_connections"]) - int(values["superuser_reserved_connections"])
    of_process = _daemon_connections(settings, facts.layout)
    shards = settings.shard.count
    found = f"{allowed} for ordinary roles; a process needs {of_process}"
    action = "Raise max_connections."
    if of_process > allowed:
        return Finding("max_connections", Level.FAIL, found, action)
    if of_process * shards > allowed:
        return Finding("max_connections", Level.WARN, f"{found}, {shards} shards {of_process * shards}", action)
    return Finding("max_connections", Level.OK, found)


async def _check_disk(context: Context) -> Sequence[Finding]:
    return [disk_finding(context.settings.data_dir)]


def disk_finding(directory: Path) -> Finding:
    """Return the free space of the data directory, or of the nearest parent that exists.

    Raises:
        OSError: The directory cannot be used.
    """
    directory = directory.absolute()
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise PermissionError(f"{existing} is not a directory that this account can write")
    free, total = shutil.disk_usage(existing).free, shutil.disk_usage(existing).total
    found = f"{free / 10**9:,.1f} GB of {total / 10**9:,.1f} GB free in {existing}"
    action = "Free space, or set INDEXER_DATA_DIR; docs/operations.md#estimate-disk-space-and-memory."
    if free < MIN_FREE_BYTES:
        return Finding("disk", Level.FAIL, found, action)
    return Finding("disk", Level.WARN, found, action) if free < FEW_FREE_BYTES else Finding("disk", Level.OK, found)


async def _check_open_files(context: Context) -> Sequence[Finding]:
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    return [open_files_finding(limit, context.settings)]


def open_files_finding(limit: int, settings: Settings) -> Finding:
    """Compare the hard limit of open files, up to which the daemon raises its own, with what the daemon needs."""
    needed = outbound_concurrency(settings) + CONNECTIONS + OTHER_FILES
    if limit == resource.RLIM_INFINITY:
        return Finding("open files", Level.OK, f"no limit; a process needs {needed:,}")
    found = f"limit {limit:,}; a process needs {needed:,}"
    if limit >= needed:
        return Finding("open files", Level.OK, found)
    return Finding("open files", Level.FAIL, found, "Raise the hard limit: `ulimit -Hn`, or LimitNOFILE of systemd.")


async def _check_clock(context: Context) -> Sequence[Finding]:
    limit = context.settings.limits.clock_drift_seconds
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
    return [clock_finding(host, ahead, limit) for host, ahead in sorted(ahead_by_host.items())]


def clock_finding(host: str, ahead: float, limit: float) -> Finding:
    """Return the difference of two clocks. Revs further in the future than `limit` seconds are rejected."""
    found = f"{abs(ahead):.1f} s {'behind' if ahead > 0 else 'ahead of'} {host}"
    action = "Synchronize the clocks, for example with chrony."
    if abs(ahead) > max(limit, MAX_CLOCK_DIFFERENCE):
        action = f"Messages are rejected at a difference of {limit:g} s. {action}"
        return Finding("clock", Level.FAIL, found, action)
    if abs(ahead) > MAX_CLOCK_DIFFERENCE:
        return Finding("clock", Level.WARN, found, action)
    return Finding("clock", Level.OK, f"within {MAX_CLOCK_DIFFERENCE:g} s of {host}")


async def _check_relays(context: Context) -> Sequence[Finding]:
    return one_is_enough(await asyncio.gather(*(_relay_finding(context, url) for url in context.settings.relays)))


async def _relay_finding(context: Context, relay: str) -> Finding:
    try:
        event = await _first_event(context, relay, None)
    except OSError as error:
        return Finding("relay", Level.FAIL, f"{relay}: {str(error) or type(error).__name__}", RELAY_ACTION)
    if isinstance(event, StreamError):
        return Finding("relay", Level.FAIL, f"{relay} sends an error: {event.error}", RELAY_ACTION)
    sent = f"no message for {context.timeouts.message:g} s" if event is None else f"a message with number {event.seq}"
    return Finding("relay", Level.OK, f"{relay} opened the stream and sent {sent}")


def one_is_enough(findings: Sequence[Finding]) -> Sequence[Finding]:
    """Return failures as warnings if there is a host without one: the daemon uses that host."""
    if all(finding.level is Level.FAIL for finding in findings):
        return findings
    return [replace(finding, level=Level.WARN) if finding.level is Level.FAIL else finding for finding in findings]


async def _check_cursors(context: Context) -> Sequence[Finding]:
    facts = await context.facts_if_available()
    if facts is None:
        return []
    findings = []
    for relay in context.settings.relays:
        cursor = facts.cursors.get(relay)
        if cursor is None:
            findings.append(Finding("cursor", Level.OK, f"none is stored for {relay}"))
            continue
        with suppress(OSError):  # the check of the relay reports it
            findings.append(cursor_finding(relay, cursor, await _first_event(context, relay, cursor)))
    return findings


def cursor_finding(relay: str, cursor: int, event: Any) -> Finding:
    """Compare the stored cursor with the first event that the relay sends after it (None: it sends nothing)."""
    action = "The daemon opens a gap and compares the repo list; wait until `indexer status` shows no open gap."
    match event:
        case InfoEvent(name=name):
            return Finding("cursor", Level.WARN, f"{relay} no longer has messages after {cursor}: {name}", action)
        case StreamError(error=error):
            return Finding("cursor", Level.WARN, f"{relay} refuses the stored cursor {cursor}: {error}", action)
        case None:
            return Finding("cursor", Level.OK, f"{relay} has no message after {cursor}")
        case _ if event.seq is not None and event.seq < cursor:
            action = f"{action} If /readyz keeps reporting stream-error, run `indexer cursor reset {relay}`."
            return Finding("cursor", Level.WARN, f"{relay} is at {event.seq}, before the cursor {cursor}", action)
    return Finding("cursor", Level.OK, f"{relay} continues after {cursor}")


async def _first_event(context: Context, relay: str, cursor: int | None) -> Any:
    settings = context.settings
    return await first_event(
        relay,
        cursor,
        settings.limits,
        settings.user_agent,
        connect_timeout=context.timeouts.connect,
        message_timeout=context.timeouts.message,
    )


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
        return Finding("directory", Level.FAIL, f"{url}: {error}", DIRECTORY_ACTION)
    if response.status not in DIRECTORY_ANSWERS:
        return Finding("directory", Level.FAIL, f"{url} answers with status {response.status}", DIRECTORY_ACTION)
    return Finding("directory", Level.OK, f"{url} answers")


async def _check_dns(context: Context) -> Sequence[Finding]:
    settings = context.settings
    parts = urlsplit(settings.relays[0])
    host = parts.hostname or ""
    resolve = resolve_with_system if settings.allow_private_hosts else DnsResolver(settings.dns_servers)
    addresses = await resolve(host, parts.port or 443)
    return [Finding("dns", Level.OK, f"{host} resolves to {', '.join(addresses[:4])}")]


async def _check_handle(context: Context) -> Sequence[Finding]:
    """Ask for the TXT record of a handle, as the verification of handles does."""
    settings = context.settings
    if not settings.handle_rate:
        return [Finding("dns txt", Level.OK, "not needed: INDEXER_HANDLE_RATE is 0")]
    results: dict[str, str] = {}
    handles = HandleVerifier(
        context.outbound,
        settings.dns_servers,
        allow_private_hosts=settings.allow_private_hosts,
        on_lookup=results.__setitem__,
    )
    with suppress(UnavailableError):  # `results` has the reason
        await handles.verify_handle(EXAMPLE_DID, EXAMPLE_HANDLE)
    result = results.get("dns", "no answer")
    name = f"_atproto.{EXAMPLE_HANDLE}"
    if result == "found":
        return [Finding("dns txt", Level.OK, f"{name} has a TXT record")]
    action = "Allow DNS queries for TXT records, or set INDEXER_HANDLE_RATE=0."
    return [Finding("dns txt", Level.WARN, f"{name}: {result}; handles are verified by HTTPS only", action)]
