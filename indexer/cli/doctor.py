"""The command `doctor`: checks that find mistakes in an installation. They change nothing."""

import asyncio
import os
import shutil
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from email.utils import parsedate_to_datetime
from enum import StrEnum
from pathlib import Path
from time import time
from urllib.parse import urlsplit

from dns.rdatatype import TXT
from rich.text import Text

from indexer.app.clients import http_origin, make_did_resolver, open_outbound_client
from indexer.app.daemon import CONNECTIONS
from indexer.app.settings import Settings, load_from_environment, load_settings
from indexer.cli.command import ExitCode, command, config_file, json_option
from indexer.cli.database import open_database
from indexer.cli.output import echo_json, result_console
from indexer.db.requirements import DatabaseFacts, load_database_facts
from indexer.errors import SettingsError, UnavailableError
from indexer.net.http.checked_connector import DnsResolver, resolve_with_system
from indexer.net.http.http_client import OutboundClient
from indexer.net.identity.did_resolver import DidResolver
from indexer.net.relay.stream_socket import SUBSCRIBE_PATH, ConnectionSettings, open_stream
from indexer.net.relay.subscription import first_event
from indexer.redaction import without_secrets
from indexer.sync.events import StreamError
from indexer.sync.stream import Cursor
from indexer.telemetry.log import printable

DATABASE_SECONDS = 60.0
"""Maximum time to read the facts about the database: the embedded Postgres may have to start."""
CHECK_SECONDS = 20.0
"""Maximum time of each other check."""
CONNECT_SECONDS, MESSAGE_SECONDS = 10.0, 5.0
"""Maximum times to connect to a relay, and to wait for its next message."""
MIN_FREE_BYTES, FEW_FREE_BYTES = 10**9, 10 * 10**9
"""Free space of the data directory, in bytes. Less than the first is a failure, less than the second a warning."""
MAX_CLOCK_DIFFERENCE = 5.0
"""Seconds by which clocks may differ without a warning. A Date header has whole seconds, and requests take time."""
SINGLE_CONNECTIONS = 5
"""Connections that a process opens beside its pool at most: locks, signals, and the check of the database."""
EXAMPLE_DID = "did:plc:z72i7hdynmk6r22z27h6tvur"
"""The account that is looked up. A directory that denies the account answers, too."""
EXAMPLE_COLLECTION = "com.example.none"
"""A collection with few events."""
MAX_BYTES = 65_536
"""Maximum size of a response of a relay."""


class Level(StrEnum):
    """The severity of a finding."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


OK, WARN, FAIL = Level
STYLES = {OK: "green", WARN: "yellow", FAIL: "bold red"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report, with the action that the operator should take; "" if none."""

    check: str
    level: Level
    found: str
    action: str = ""


def _log_settings(_: Path | None) -> Settings:
    """Return the settings of log lines, or the defaults if they are bad: `settings` is one of the checks."""
    try:
        return load_from_environment("log_format", "log_level")
    except SettingsError:
        return Settings()


@command("doctor", load=_log_settings)
@json_option
async def doctor_command(_: Settings) -> int:
    """Check settings, database, disk, clock, relays, directories and DNS.

    Print one line for each check: `ok`, `warn` or `fail`, what was found, and what to do. Only the embedded Postgres is
    started, if it is used. The checks take at most 80 seconds. The exit code is 1 if a check fails.
    """
    try:
        findings = await run_checks(load_settings(config_file()))
    except SettingsError as error:  # without settings there is nothing else to check
        findings = [Finding("settings", FAIL, str(error), "Correct it; docs/settings.md lists all settings.")]
    failed = any(finding.level is FAIL for finding in findings)
    if not echo_json({"ok": not failed, "checks": [asdict(finding) for finding in findings]}):
        for finding in findings:
            text = f"{finding.check}: {finding.found}" + (f". {finding.action}" if finding.action else "")
            line = Text(f"{finding.level:<4}", STYLES[finding.level])
            result_console().print(line.append(f"  {printable(without_secrets(text))}", ""), soft_wrap=True)
    return ExitCode.FAILED if failed else ExitCode.OK


async def run_checks(settings: Settings) -> list[Finding]:
    """Check the database, which says what kind of stream is read, then the rest at the same time. Return the findings.

    Raises:
        SettingsError: The upstream of the database excludes one of the settings.
    """
    cursors: list[Cursor] = []
    database = await _findings("database", "", _check_database(settings, cursors), DATABASE_SECONDS)
    settings = settings.continuing(cursors)
    kind, check, urls = "relay", _check_relay, settings.relays
    if settings.upstream == "jetstream":
        kind, check, urls = "jetstream", _check_jetstream, settings.jetstreams
    async with open_outbound_client(settings) as outbound:
        dids = make_did_resolver(settings, outbound)
        results = await asyncio.gather(
            _findings("disk", "", asyncio.to_thread(check_disk, settings.data_dir)),
            _findings("clock", "", _check_clock(settings, outbound)),
            *(_findings(kind, f"{url}: ", check(settings, url)) for url in urls),
            *(_findings("directory", f"{url}: ", _check_directory(dids, url)) for url in settings.plc_url),
            _findings("dns", "", _check_dns(settings)),
        )
    found = [finding for found in (database, *results) for finding in found]
    return _settings_findings(settings) + one_is_enough(found)


async def _findings(
    name: str, subject: str, check: Awaitable[Sequence[Finding]], seconds: float | None = None
) -> Sequence[Finding]:
    try:
        async with asyncio.timeout(seconds or CHECK_SECONDS):
            return await check
    except (UnavailableError, SettingsError, OSError) as error:  # OSError includes TimeoutError
        return [Finding(name, FAIL, subject + (str(error) or "no answer in time"), ACTIONS[name])]


def one_is_enough(findings: Sequence[Finding]) -> list[Finding]:
    """Return failures of relays or directories as warnings if another one works: the daemon uses that one."""
    working = {finding.check for finding in findings if finding.level is OK} & {"relay", "jetstream", "directory"}
    return [
        replace(finding, level=WARN) if finding.level is FAIL and finding.check in working else finding
        for finding in findings
    ]


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


async def _check_database(settings: Settings, cursors: list[Cursor]) -> Sequence[Finding]:
    """Check the database, and add its cursors."""
    async with open_database(settings) as dsn:
        facts = await load_database_facts(dsn)
        cursors += facts.cursors
    return [
        Finding("database", OK, f"Postgres {facts.settings['server_version']} at {facts.address}"),
        _schema_finding(facts),
        *database_setting_findings(facts, settings),
        clock_finding("the database", facts.clock_ahead, settings.limits.clock_drift_seconds),
    ]


def _schema_finding(facts: DatabaseFacts) -> Finding:
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


def check_disk(directory: Path) -> Sequence[Finding]:
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
    return [Finding("disk", level, found, "" if level is OK else ACTIONS["disk"])]


async def _check_clock(settings: Settings, outbound: OutboundClient) -> Sequence[Finding]:
    """Compare the clock with that of the first relay, if it answers with a readable date."""
    relay = http_origin(settings.relays[0])
    with suppress(UnavailableError, ValueError, TypeError):
        asked_at = time()
        answer = await outbound.get(f"{relay}/xrpc/_health", max_bytes=MAX_BYTES, timeout=CHECK_SECONDS)
        date = parsedate_to_datetime(answer.headers.get("Date", "")).timestamp()
        return [clock_finding(relay, date + 0.5 - (asked_at + time()) / 2, settings.limits.clock_drift_seconds)]
    return []


def clock_finding(host: str, ahead: float, limit: float) -> Finding:
    """Return the difference of two clocks. Revs further in the future than `limit` seconds are rejected."""
    if abs(ahead) <= MAX_CLOCK_DIFFERENCE:
        return Finding("clock", OK, f"within {MAX_CLOCK_DIFFERENCE:g} s of {host}")
    found = f"{abs(ahead):.1f} s {'behind' if ahead > 0 else 'ahead of'} {host}"
    action = f"{ACTIONS['clock']} Messages are rejected at a difference of {limit:g} s."
    return Finding("clock", FAIL if abs(ahead) > limit else WARN, found, action)


async def _check_relay(settings: Settings, url: str) -> Sequence[Finding]:
    event = await first_event(
        url, None, settings.limits, settings.user_agent,
        connect_timeout=CONNECT_SECONDS, message_timeout=MESSAGE_SECONDS,
    )  # fmt: skip
    if isinstance(event, StreamError):
        raise OSError(f"the relay sends an error: {event.error}")
    sent = f"no message for {MESSAGE_SECONDS:g} s" if event is None else f"a message with number {event.seq}"
    return [Finding("relay", OK, f"{url} opened the stream and sent {sent}")]


async def _check_jetstream(settings: Settings, url: str) -> Sequence[Finding]:
    path, connection = f"{SUBSCRIBE_PATH}?wantedCollections={EXAMPLE_COLLECTION}", ConnectionSettings()
    async with open_stream(url, None, MAX_BYTES, settings.user_agent, connection, path=path):
        return [Finding("jetstream", OK, f"{url} opened the stream")]


async def _check_directory(dids: DidResolver, url: str) -> Sequence[Finding]:
    await replace(dids, plc_urls=(url,)).resolve(EXAMPLE_DID)
    return [Finding("directory", OK, f"{url} answers")]


async def _check_dns(settings: Settings) -> Sequence[Finding]:
    parts = urlsplit((settings.jetstreams if settings.upstream == "jetstream" else settings.relays)[0])
    host = parts.hostname or ""
    resolve = resolve_with_system if settings.allow_private_hosts else DnsResolver(settings.dns_servers)
    addresses = await resolve(host, parts.port or 443)
    if settings.dns_servers or not settings.allow_private_hosts:  # some servers answer no queries for TXT records
        await DnsResolver(settings.dns_servers).query(f"_atproto.{host}", TXT)
    return [Finding("dns", OK, f"{host} resolves to {', '.join(addresses[:4])}")]


ACTIONS = {
    "database": "Start the database, correct INDEXER_DATABASE_URL, or grant the privileges of "
    "docs/operations.md#postgres-version-and-privileges.",
    "disk": "Free space, or set INDEXER_DATA_DIR to a directory that this account can write.",
    "clock": "Synchronize the clocks, for example with chrony.",
    "relay": "Check INDEXER_RELAYS, the firewall, and the name servers.",
    "jetstream": "Check INDEXER_JETSTREAMS, the firewall, and the name servers.",
    "directory": "Check INDEXER_PLC_URL, INDEXER_PLC_LOOKUP, the firewall, and the name servers.",
    "dns": "Set INDEXER_DNS_SERVERS to servers that answer queries for TXT records, or correct those of this machine.",
}
"""The advice for each check that fails."""
