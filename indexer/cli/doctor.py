"""The command `doctor`: checks that find mistakes in an installation. They change nothing."""

import asyncio
import os
import shutil
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from email.utils import parsedate_to_datetime
from enum import StrEnum
from pathlib import Path
from time import time
from urllib.parse import urlsplit

import click
from rich.text import Text

from indexer.app.clients import http_origin, open_outbound_client
from indexer.app.daemon import CONNECTIONS
from indexer.app.settings import Settings, load_from_environment, load_settings
from indexer.cli.command import ExitCode, command, config_file, json_option
from indexer.cli.database import open_database
from indexer.cli.output import result_console, to_json
from indexer.db.requirements import DatabaseFacts, load_database_facts
from indexer.errors import SettingsError, UnavailableError
from indexer.net.http.checked_connector import DnsResolver, resolve_with_system
from indexer.net.http.http_client import OutboundClient
from indexer.net.relay.subscription import first_event
from indexer.redaction import without_secrets
from indexer.sync.events import StreamError
from indexer.telemetry.log import printable

MIN_FREE_BYTES, FEW_FREE_BYTES = 10**9, 10 * 10**9
"""Free space of the data directory, in bytes. Less than the first is a failure, less than the second a warning."""
MAX_CLOCK_DIFFERENCE = 5.0
"""Seconds by which clocks may differ without a warning. A Date header has whole seconds, and requests take time."""
SINGLE_CONNECTIONS = 5
"""Connections that a process opens beside its pool at most: locks, signals, and the check of the database."""
EXAMPLE_DID = "did:plc:z72i7hdynmk6r22z27h6tvur"
"""The account whose document is asked for. A directory that denies the account answers, too."""
MAX_BYTES = 65_536
"""Maximum size of a response of a relay or a directory."""


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
        action: What the operator should do; "" if nothing.
    """

    check: str
    level: Level
    found: str
    action: str = ""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Maximum times, in seconds.

    Attributes:
        database: To read the facts about the database: the embedded Postgres may have to start.
        check: For all other checks, which run at the same time.
        connect: To connect to a relay.
        message: To wait for the next message of a relay.
    """

    database: float = 60.0
    check: float = 20.0
    connect: float = 10.0
    message: float = 5.0


@dataclass(frozen=True, slots=True)
class Context:
    """The data and clients of the checks. `facts` is None if the database is not available."""

    settings: Settings
    outbound: OutboundClient
    facts: DatabaseFacts | None
    timeouts: Timeouts


def _log_settings(_: Path | None) -> Settings:
    """Return the settings of log lines, or the defaults if they are bad: `settings` is one of the checks."""
    try:
        return load_from_environment("log_format", "log_level")
    except SettingsError:
        return Settings()


@command("doctor", load=_log_settings)
@json_option
async def doctor_command(_: Settings, *, as_json: bool) -> int:
    """Check settings, database, disk, clock, relays, directories and DNS.

    Print one line for each check: `ok`, `warn` or `fail`, what was found, and what to do. Nothing is changed, except
    that the embedded Postgres is started if it is used. The checks send a few requests, by the same rules as the
    daemon, and take at most 80 seconds. The exit code is 1 if a check fails.
    """
    try:
        findings = await run_checks(load_settings(config_file()))
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


async def run_checks(settings: Settings, timeouts: Timeouts | None = None) -> list[Finding]:
    """Run all checks, and return their findings. Default: the times of `Timeouts`."""
    timeouts = timeouts or Timeouts()
    facts: DatabaseFacts | None = None

    async def read_facts() -> list[Finding]:
        nonlocal facts
        async with open_database(settings) as dsn:
            facts = await load_database_facts(dsn)
        return [
            Finding("database", OK, f"Postgres {facts.settings['server_version']} at {facts.address}"),
            schema_finding(facts),
            *database_setting_findings(facts, settings),
        ]

    findings = _settings_findings(settings)
    findings += await _findings("database", read_facts(), timeouts.database)
    async with open_outbound_client(settings) as outbound:
        context = Context(settings, outbound, facts, timeouts)
        checks = (_findings(name, check(context), timeouts.check) for name, check in CHECKS.items())
        findings += [finding for found in await asyncio.gather(*checks) for finding in found]
    return findings


async def _findings(name: str, check: Awaitable[Sequence[Finding]], seconds: float) -> Sequence[Finding]:
    try:
        async with asyncio.timeout(seconds):
            return await check
    except TimeoutError:
        return [Finding(name, FAIL, f"no answer within {seconds:g} s", ACTIONS[name])]
    except (UnavailableError, SettingsError, OSError) as error:
        return [Finding(name, FAIL, str(error), ACTIONS[name])]


def _settings_findings(settings: Settings) -> list[Finding]:
    findings = [Finding("settings", OK, f"valid; shard {settings.shard}, roles {', '.join(settings.roles)}")]
    if settings.contact is None:
        action = "Set INDEXER_CONTACT to a URL or an e-mail address."
        findings.append(Finding("contact", WARN, "operators of other hosts cannot reach you", action))
    if settings.allow_private_hosts:
        action = "Unset INDEXER_ALLOW_PRIVATE_HOSTS, except on a local network."
        found = "any account can make this daemon send requests to private addresses"
        findings.append(Finding("private hosts", WARN, found, action))
    return findings


def schema_finding(facts: DatabaseFacts) -> Finding:
    """Compare the version of the schema with this release, and check the privileges of the role."""
    schema = facts.schema
    if facts.missing is not None:
        return Finding("schema", FAIL, facts.missing, ACTIONS["database"])
    found = "no schema" if schema.database is None else f"version {schema.database}"
    if schema.database == schema.release:
        return Finding("schema", OK, found)
    found = f"{found}; this release has {schema.release}"
    if schema.is_usable:
        return Finding("schema", WARN, f"{found}, and can use it", "Upgrade this program, too.")
    if schema.is_old:
        return Finding("schema", WARN, found, "`indexer run` upgrades it at its start, `indexer migrate` now.")
    return Finding("schema", FAIL, found, "Use the release that upgraded it, or a newer one.")


BAD_SETTINGS = (
    ("fsync", FAIL, "After a crash of the machine, the database may be damaged."),
    ("full_page_writes", FAIL, "After a crash of the machine, the database may be damaged."),
    ("autovacuum", FAIL, "Tables grow without a limit."),
    ("synchronous_commit", WARN, "A crash may lose the newest changes, and assign their numbers again."),
)
"""Settings of Postgres that must not be off, the level if they are, and why (docs/operations.md#configure-postgres)."""


def database_setting_findings(facts: DatabaseFacts, settings: Settings) -> list[Finding]:
    """Return findings about the settings of Postgres that may lose data or let a process fail."""
    findings = [
        Finding(name, level, "off", f"{why} Set {name} = on.")
        for name, level, why in BAD_SETTINGS
        if facts.settings[name] == "off"
    ]
    needed = (CONNECTIONS + SINGLE_CONNECTIONS) * settings.shard.count
    allowed = int(facts.settings["max_connections"]) - int(facts.settings["superuser_reserved_connections"])
    if allowed < needed:
        found = f"{allowed} for ordinary roles; the daemons of all shards need up to {needed}"
        findings.append(Finding("max_connections", WARN, found, "Raise max_connections."))
    return findings


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
    usage = shutil.disk_usage(existing)
    level = FAIL if usage.free < MIN_FREE_BYTES else WARN if usage.free < FEW_FREE_BYTES else OK
    found = f"{usage.free / 10**9:,.1f} GB of {usage.total / 10**9:,.1f} GB free in {existing}"
    return Finding("disk", level, found, "" if level is OK else ACTIONS["disk"])


async def _check_clock(context: Context) -> Sequence[Finding]:
    """Compare the clock with those of the first relay and of the database, as far as they are available."""
    relay, ahead_by_host = http_origin(context.settings.relays[0]), {}
    with suppress(UnavailableError, ValueError, TypeError):  # no answer, or no readable header
        asked_at = time()
        answer = await context.outbound.get(
            f"{relay}/xrpc/_health", max_bytes=MAX_BYTES, timeout=context.timeouts.check
        )
        date = parsedate_to_datetime(answer.headers.get("Date", "")).timestamp()
        ahead_by_host[relay] = date + 0.5 - (asked_at + time()) / 2
    if context.facts is not None:
        ahead_by_host["the database"] = context.facts.clock_ahead
    limit = context.settings.limits.clock_drift_seconds
    return [clock_finding(host, ahead, limit) for host, ahead in ahead_by_host.items()]


def clock_finding(host: str, ahead: float, limit: float) -> Finding:
    """Return the difference of two clocks. Revs further in the future than `limit` seconds are rejected."""
    if abs(ahead) <= MAX_CLOCK_DIFFERENCE:
        return Finding("clock", OK, f"within {MAX_CLOCK_DIFFERENCE:g} s of {host}")
    found = f"{abs(ahead):.1f} s {'behind' if ahead > 0 else 'ahead of'} {host}"
    action = f"{ACTIONS['clock']} Messages are rejected at a difference of {limit:g} s."
    return Finding("clock", FAIL if abs(ahead) > limit else WARN, found, action)


async def _check_relays(context: Context) -> Sequence[Finding]:
    return one_is_enough(await asyncio.gather(*(_relay_finding(context, url) for url in context.settings.relays)))


async def _relay_finding(context: Context, relay: str) -> Finding:
    settings, timeouts = context.settings, context.timeouts
    try:
        event = await first_event(
            relay, None, settings.limits, settings.user_agent,
            connect_timeout=timeouts.connect, message_timeout=timeouts.message,
        )  # fmt: skip
    except OSError as error:
        return Finding("relay", FAIL, f"{relay}: {str(error) or type(error).__name__}", ACTIONS["relay"])
    if isinstance(event, StreamError):
        return Finding("relay", FAIL, f"{relay} sends an error: {event.error}", ACTIONS["relay"])
    sent = f"no message for {timeouts.message:g} s" if event is None else f"a message with number {event.seq}"
    return Finding("relay", OK, f"{relay} opened the stream and sent {sent}")


async def _check_directories(context: Context) -> Sequence[Finding]:
    return one_is_enough(await asyncio.gather(*(_directory_finding(context, url) for url in context.settings.plc_url)))


async def _directory_finding(context: Context, url: str) -> Finding:
    try:
        response = await context.outbound.get(
            f"{url}/{EXAMPLE_DID}",
            max_bytes=MAX_BYTES,
            timeout=context.timeouts.check,
            accept="application/did+ld+json",
        )
    except UnavailableError as error:
        return Finding("directory", FAIL, f"{url}: {error}", ACTIONS["directory"])
    if response.status not in {200, 404, 410}:
        return Finding("directory", FAIL, f"{url} answers with status {response.status}", ACTIONS["directory"])
    return Finding("directory", OK, f"{url} answers")


def one_is_enough(findings: Sequence[Finding]) -> Sequence[Finding]:
    """Return failures as warnings if there is a host without one: the daemon uses that host."""
    if all(finding.level is FAIL for finding in findings):
        return findings
    return [replace(finding, level=WARN) if finding.level is FAIL else finding for finding in findings]


async def _check_dns(context: Context) -> Sequence[Finding]:
    settings = context.settings
    parts = urlsplit(settings.relays[0])
    host = parts.hostname or ""
    resolve = resolve_with_system if settings.allow_private_hosts else DnsResolver(settings.dns_servers)
    addresses = await resolve(host, parts.port or 443)
    return [Finding("dns", OK, f"{host} resolves to {', '.join(addresses[:4])}")]


CHECKS: dict[str, Callable[[Context], Awaitable[Sequence[Finding]]]] = {
    "disk": _check_disk,
    "clock": _check_clock,
    "relay": _check_relays,
    "directory": _check_directories,
    "dns": _check_dns,
}
"""The checks that run at the same time, after the database."""

ACTIONS = {
    "database": "Start the database, correct INDEXER_DATABASE_URL, or grant the privileges of "
    "docs/operations.md#postgres-version-and-privileges.",
    "disk": "Free space, or set INDEXER_DATA_DIR to a directory that this account can write.",
    "clock": "Synchronize the clocks, for example with chrony.",
    "relay": "Check INDEXER_RELAYS, the firewall, and the name servers.",
    "directory": "Check INDEXER_PLC_URL, the firewall, and the name servers.",
    "dns": "Correct INDEXER_DNS_SERVERS, or the name servers of this machine.",
}
"""The advice for each check that fails."""
