"""The settings: defaults, then a TOML file, then environment variables; the later source wins.

Each setting is a field of `Settings`. The field name is the key in the file. The environment variable is `INDEXER_` and
the field name in upper case. The type of the field describes the allowed values in words, for error messages and for
docs/settings.md. A test compares that page with this module.
"""

import math
import os
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from platformdirs import user_data_path
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from indexer import __version__
from indexer.app import setting_types as types
from indexer.atproto.limits import DEFAULT_LIMITS, Limits
from indexer.atproto.syntax import CollectionFilter
from indexer.errors import SettingsError
from indexer.net.server.address import Address
from indexer.sync.hints import JETSTREAM
from indexer.sync.policy import Policy
from indexer.sync.scope import Scope, Track, filter_of
from indexer.sync.shard import Shard
from indexer.sync.stream import Cursor

PREFIX = "INDEXER_"
OTHER_VARIABLES = frozenset(
    {
        "INDEXER_CONFIG",
        "INDEXER_PG_BINDIR",
        "INDEXER_VECTORS",
        "INDEXER_TEST_DATABASE_URL",
        "INDEXER_TEST_PG_CONFIG",
    }
)
"""Environment variables that start with the prefix and are not settings."""
SCOPE_SETTINGS = ("track", "collections", "signal_collections")
"""The settings of the scope of a new database."""
MIN_CONSUMER_LAG_LIMIT = 3_600.0
"""Seconds that a consumer may be behind, however short the retention of changes is."""
MIN_PASS_INTERVAL = 60.0
"""Minimum interval of comparisons with hosts, in seconds. Each host has an eighth of the interval to answer."""
_SECRETS = frozenset({"database_url", "webhook_url", "admin_password"})


class Settings(BaseModel):
    """All settings, validated. `load_settings` reads them; `Settings(…)` reads neither the file nor the environment.

    Durations are in seconds and sizes in bytes, whatever unit was given.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        arbitrary_types_allowed=True,
        use_attribute_docstrings=True,
    )

    database_url: types.DatabaseUrl | None = None
    """Your Postgres database. Unset: the embedded Postgres under `INDEXER_DATA_DIR`."""
    data_dir: Annotated[Path, "a directory"] = Field(default_factory=lambda: user_data_path("indexer"))
    """Directory of the embedded Postgres, and of exports while they are verified. Needs a disk with room."""
    relays: types.Relays = ("wss://relay1.us-east.bsky.network",)
    """Relays to consume. Name more than one for availability, and to get what one of them omits. Each has its own
    cursor."""
    relay_mode: Literal["all", "failover"] = "all"
    """Consume `all` relays at once, or the first one that works (`failover`). A further relay costs its traffic, and
    little CPU. With `INDEXER_UPSTREAM=pds`, it is always `failover`."""
    upstream: Literal["relay", "pds", "jetstream"] = "relay"
    """Stream to consume: of a `relay`; of a `pds`, whose events count only for accounts that it hosts; or of a
    `jetstream`, whose events are only hints: changed records are fetched from their hosts, with proof. `jetstream`
    needs `INDEXER_COLLECTIONS`, and relays for repo lists."""
    jetstreams: types.Jetstreams = tuple(
        f"wss://jetstream{number}.us-{coast}.bsky.network" for coast in ("east", "west") for number in (2, 1)
    )
    """Jetstreams for `INDEXER_UPSTREAM=jetstream`. The first one that works is read."""
    start: Annotated[
        Literal["live", "oldest"] | Annotated[int, Field(ge=0, lt=2**63)], "`live`, `oldest`, or a sequence number"
    ] = "live"
    """Where a stream without a stored cursor starts: at the newest event, or at the oldest one that the relay has. A
    sequence number counts only for a new database, and for the first relay."""
    track: Annotated[Literal["all", "listed", "signal"], "`all`, `listed` or `signal`"] | None = None
    """Accounts to index: `all`; only those that `indexer add` or `indexer discover` added (`listed`); or also those
    with a record of a signal collection (`signal`). This and the next two settings are the scope of a new database,
    which needs one of them or `indexer run --lexicon`. Change it later with `indexer scope`."""
    collections: types.Collections = CollectionFilter()
    """Collections to store. Name those that your service reads; `app.bsky.*` matches all below `app.bsky`."""
    signal_collections: types.Patterns = ()
    """Index each account that has a record of one of these collections. They need not be stored.
    Accounts of a pattern with `.*` are found on the stream only."""
    store_values: types.Switch = True
    """Store record values (JSON), not only CIDs. Turn it off to save disk if you need no values; feeds and links
    need them."""
    links: types.Switch = False
    """Keep `atproto.links` and `atproto.link_count`. Turn it on, for all processes, to count likes or followers:
    links of stored records are added in the background. Turned off, all links are removed."""
    inversion: Literal["strict", "lenient"] = "strict"
    """Commits whose proof blocks are incomplete: `strict` requests a resync; `lenient` applies those that agree
    with the new tree, for lower latency, and requests a resync later."""
    plc_url: types.Directories = ("https://plc.directory",)
    """PLC directories. If one does not answer, the next is asked. Put a mirror of yours first."""
    plc_lookup: Literal["log", "document"] = "log"
    """Ask directories for the `log` of operations, which proves the identity, or for the `document`, if yours has no
    logs."""
    plc_follow: types.Switch = False
    """Follow the operations of the first PLC directory: keys and hosts change at once, without lookups. Run `indexer
    identities import` before. Set it for all processes: one of them follows."""
    dns_servers: types.DnsServers = ()
    """DNS servers for handles and host names, if those of the system are slow or answer no queries for TXT records."""
    resync_workers: types.UpToThousand = 32
    """Concurrent resyncs, besides those of exports above 32 MiB. One host, registered domain or network address
    occupies at most half. Raise it if a backfill leaves CPU and database idle."""
    new_accounts_per_host: types.WholeOrOff = 100_000
    """Accounts that the stream may add in an hour for one host or registered domain; further ones wait. Raise it if
    a large host moves."""
    resync_source: types.Sources = ("relay", "pds")
    """Sources of exports (`getRepo`), in the order in which they are asked. `pds,relay` spares the relay."""
    sparse_resync: Literal["auto", "always", "never"] = "auto"
    """Fetch only the chosen collections of a repo, with their proof, instead of its export: `auto` if that costs less,
    `always` if possible, or `never`. `INDEXER_RESYNC_SOURCE` must contain `pds`."""
    export_time: types.Duration = 600
    """Maximum duration of the download of an export. Raise it if `last_failure` of large repos is `timeout`."""
    plc_rate: types.Rate = 10
    """Maximum requests per second to PLC directories. Raise it for a mirror of yours, or if their operator agrees."""
    handle_rate: types.RateOrOff = 10
    """Maximum handle verifications per second. `0` if you need no handles: `atproto.repos.handle` is null."""
    host_rate: types.Rate = 10
    """Maximum requests per second to one host or network address, except PLC directories. Raise it only for your
    own hosts."""
    host_concurrency: types.Whole = 10
    """Maximum concurrent requests to one host. Raise it only for your own hosts."""
    outbound_rate: types.Rate = 100
    """Maximum requests per second to all hosts together. Raise it if a backfill of many hosts is limited by it."""
    contact: types.Contact | None = None
    """Contact for operators of other hosts, sent in every User-Agent header. Set it in production."""
    deletion_grace: types.Seconds = 604_800
    """Time from the deletion of an account to the erasure of its records, which are hidden at once. Lower it if
    your rules on erasure are stricter."""
    sweep_interval: types.Seconds | None = None
    """How often to compare the relay's repo list with the database, and to try parked repos again.
    `0`: only after messages may have been missed; parked repos stay. With a Jetstream, each repo is compared with its
    host twice in this time, which is at least `60s`."""
    hosts_interval: types.Seconds = 86_400
    """How often to read the repo list of each host that the relays list, for accounts that relays withhold or omit.
    `0`, or an `INDEXER_UPSTREAM` other than `relay`: only `indexer discover --hosts` does."""
    host_streams: Annotated[int, Field(ge=0, le=100), "a whole number from 0 to 100"] = 8
    """Hosts whose own streams are read, because no relay passes on some of their accounts: those with the most of them.
    `0`: only their lists are read."""
    change_retention: types.Seconds = 604_800
    """How long changes stay in the change log, unless it reaches `INDEXER_CHANGE_BYTES`. Raise it to let consumers
    be away longer: they are disconnected after twice this time, but not before an hour. `0`: no limit of time."""
    change_bytes: Annotated[types.Size, Field(ge=2**20), "a size of at least 1MiB, such as 5GB or 2GiB"] = 50 * 10**9
    """Maximum size of the change log; twice as much while consumers are behind. Set it to less than half of the
    free disk."""
    shard: types.ShardOfAll = Shard(0, 1)
    """Share i of n of the DIDs that this process indexes, from 0. Set it to use several machines."""
    roles: types.Roles = ("live", "resync")
    """Roles of this process: `live` consumes the firehose, `resync` runs resync workers. Add `feed` for clients of
    tap or Jetstream."""
    core: Literal["auto", "python", "native"] = "auto"
    """Implementation of decoding and verification: `native` is the package `atproto-indexer-native`; `auto` uses it
    if it is installed. Both give the same results."""
    verify_threads: types.UpToThousand | None = None
    """Threads in which the native core verifies. Lower it if other programs need the cores."""
    batch_window: Annotated[types.Seconds, Field(le=1), "a duration such as 20ms, at most 1s, or 0"] = 0.05
    """Longest time from one read of the stream, and so from one batch, to the next, unless many messages arrive.
    Longer: less CPU and fewer transactions, but later commits. `0`: lowest latency."""
    webhook_url: types.WebhookUrl | None = None
    """Webhook to which the role `feed` sends each event until it answers 2xx, instead of serving `/channel`.
    It may have a private address."""
    webhook_batch: types.UpToThousand = 1
    """Maximum number of events in one request to the webhook, of about 1 MB at most. Above 1, the body is a JSON
    array. If it is refused, its events are sent again one by one."""
    admin_password: types.Password | None = None
    """Password of the user `admin` for paths of the role `feed` that change something or acknowledge events; also
    sent to the webhook. Unset: loopback clients only."""
    allow_private_hosts: types.Switch = False
    """Allow http:// URLs, and loopback and private addresses. For tests and local networks only."""
    stop_timeout: types.Duration = 25
    """Maximum time from SIGTERM or SIGINT to the end of the process. Keep it below that of your service manager: 30
    s in Kubernetes, 10 s with `docker stop`."""
    http_bind: types.ListenAddress = Address("127.0.0.1", 2580)
    """Address of health checks, metrics, the status page and feeds. `0.0.0.0:2580` in a container."""
    log_format: Literal["auto", "json", "console"] = "auto"
    """Format of log lines. `auto`: `console` on a terminal, otherwise `json`."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Minimum level of log lines. `debug` also shows single repos."""

    repo_bytes: types.Size = DEFAULT_LIMITS.repo_bytes
    """Maximum size of an export, decompressed. Raise it if the `last_failure` of a wanted repo is `too-large`."""

    @field_validator("*", mode="before")
    @classmethod
    def reject_bool(cls, value: Any, info: ValidationInfo) -> Any:
        """Reject `true` of TOML, which Python would accept as the number 1."""
        if isinstance(value, bool) and cls.model_fields[str(info.field_name)].annotation is not bool:
            raise ValueError("a truth value")
        return value

    @property
    def user_agent(self) -> str:
        """The User-Agent header of all requests."""
        return f"indexer/{__version__} (AT Protocol record-level sync; {self.contact or 'no contact given'})"

    @property
    def limits(self) -> Limits:
        """The limits on input from other hosts."""
        blocks = math.ceil(DEFAULT_LIMITS.repo_blocks * self.repo_bytes / DEFAULT_LIMITS.repo_bytes)
        return replace(DEFAULT_LIMITS, repo_bytes=self.repo_bytes, repo_blocks=blocks)

    @property
    def consumer_lag_limit(self) -> float:
        """The age of the oldest change that a consumer may lack, in seconds; 0: no limit."""
        return max(2 * self.change_retention, MIN_CONSUMER_LAG_LIMIT) if self.change_retention else 0.0

    @property
    def comparison_interval(self) -> float:
        """The interval of the comparisons with lists or hosts, in seconds."""
        default = 3_600.0 if self.upstream == "jetstream" else 86_400.0
        return default if self.sweep_interval is None else self.sweep_interval

    @property
    def chooses_scope(self) -> bool:
        """True if a setting says what to index."""
        return not self.model_fields_set.isdisjoint(SCOPE_SETTINGS)

    @property
    def first_scope(self) -> Scope:
        """The scope of a new database. A stored scope has precedence."""
        return Scope(
            track=Track(self.track or ("signal" if self.signal_collections else "all")),
            collections=self.collections,
            signal_collections=filter_of(self.signal_collections),
        )

    def continuing(self, cursors: Sequence[Cursor]) -> "Settings":
        """Return the settings for a database with these cursors: if no upstream was given, that of the newest one.

        Raises:
            SettingsError: Another setting excludes that.
        """
        if not cursors or "upstream" in self.model_fields_set:
            return self
        newest = max(cursors, key=lambda cursor: cursor.updated_at or 0.0)
        upstream = "jetstream" if newest.relay == JETSTREAM else "relay"
        return _consistent(_with_defaults(self, {"upstream": upstream}), scope_is_stored=True)

    def for_record_types(self, nsids: Sequence[str], stored: Scope | None) -> "Settings":
        """Return the settings of `indexer run --lexicon` for this stored scope. Settings that were given stay.

        Without a stored scope, these record types become the collections and the signal collections. With one, its
        parts count as given if others are, so that only a difference is logged. A Jetstream is read if the scope has
        signal collections and does not store all collections.

        Raises:
            SettingsError: Another setting excludes that.
        """
        chosen = CollectionFilter(nsids)
        scope = stored or Scope(track=Track.SIGNAL, collections=chosen, signal_collections=chosen)
        first = {"track": scope.track, "collections": scope.collections, "signal_collections": scope.signal_patterns}
        settings = _with_defaults(self, first) if self.chooses_scope or not stored else self
        scope = stored or settings.first_scope
        if scope.track is Track.SIGNAL and not scope.collections.matches_all:
            settings = _with_defaults(settings, {"upstream": "jetstream"})
        return _consistent(settings, scope_is_stored=stored is not None)

    @property
    def policy(self) -> Policy:
        """The settings that planning depends on, with the first scope."""
        return Policy(
            scope=self.first_scope,
            limits=self.limits,
            store_values=self.store_values,
            lenient=self.inversion == "lenient",
            deletion_grace=self.deletion_grace,
            upstream_is_pds=self.upstream == "pds",
        )


def load_settings(file: Path | None = None) -> Settings:
    """Return the settings of this process.

    Args:
        file: The TOML file. Default: the file that `INDEXER_CONFIG` names, if any.

    Raises:
        SettingsError: A setting is unknown or has a bad value, or the file cannot be read.
    """
    default_file = os.environ.get("INDEXER_CONFIG")
    file = file or (Path(default_file) if default_file else None)
    from_file = _read_file(file) if file else {}
    for name in os.environ:
        if name.upper().startswith(PREFIX) and name.upper() not in _VARIABLES | OTHER_VARIABLES:
            raise SettingsError(f"{name} is not a setting{_hint(name.upper(), _VARIABLES)}")
    for key in from_file:
        if key not in Settings.model_fields:
            raise SettingsError(f"{key!r} in {file} is not a setting{_hint(key, Settings.model_fields)}")
    return _consistent(_validated(_from_environment(Settings.model_fields), from_file, file))


def _with_defaults(settings: Settings, values: Mapping[str, Any]) -> Settings:
    """Return the settings, with these values in place of defaults."""
    return settings.model_copy(update={name: values[name] for name in values.keys() - settings.model_fields_set})


def _consistent(settings: Settings, *, scope_is_stored: bool = False) -> Settings:
    """Return the settings; raise `SettingsError` if two of them contradict each other."""
    if settings.track == "signal" and not settings.signal_collections:
        raise SettingsError(f"{variable('track')}: 'signal' needs {variable('signal_collections')}")
    if settings.links and not settings.store_values:
        raise SettingsError("INDEXER_LINKS needs INDEXER_STORE_VALUES, because links are found in values")
    needs = {
        "named collections in INDEXER_COLLECTIONS": scope_is_stored
        or not (settings.chooses_scope and settings.collections.matches_all),
        "INDEXER_SPARSE_RESYNC other than 'never'": settings.sparse_resync != "never",
        "'pds' in INDEXER_RESYNC_SOURCE": "pds" in settings.resync_source,
        "INDEXER_SWEEP_INTERVAL of at least 60s": settings.comparison_interval >= MIN_PASS_INTERVAL,
        "'live' in INDEXER_START": settings.start == "live",
    }
    for need in [need for need, met in needs.items() if settings.upstream == "jetstream" and not met]:
        raise SettingsError(f"INDEXER_UPSTREAM: 'jetstream' needs {need}")
    return settings


def load_from_environment(*names: str) -> Settings:
    """Return the defaults, with these settings from the environment.

    Raises:
        SettingsError: One of these has a bad value.
    """
    return _validated(_from_environment(names), {}, None)


DEMO_SETTINGS = ("log_format", "log_level", "core", "verify_threads")
"""The settings of the demo, and of benchmarks: those that are not about a network."""


def _from_environment(names: Iterable[str]) -> dict[str, str]:
    """Return the values of settings from the environment. An empty variable counts as unset."""
    given = {name.upper(): value for name, value in os.environ.items() if value}
    return {name: given[variable(name)] for name in names if variable(name) in given}


def _validated(environment: dict[str, str], from_file: dict[str, Any], file: Path | None) -> Settings:
    try:
        return Settings(**(from_file | environment))
    except ValidationError as error:
        name = str(error.errors()[0]["loc"][0])
        if name in environment:
            raise SettingsError(_bad_value(name, variable(name), environment[name])) from None
        raise SettingsError(_bad_value(name, f"{name!r} in {file}", from_file[name])) from None


def variable(name: str) -> str:
    """Return the environment variable of a setting."""
    return PREFIX + name.upper()


def allowed(name: str) -> str:
    """Return the allowed values of a setting, in words."""
    field = Settings.model_fields[name]
    if get_origin(field.annotation) is Literal:
        *others, last = (f"`{value}`" for value in get_args(field.annotation))
        return f"{', '.join(others)} or {last}"
    inner = [item for part in get_args(field.annotation) for item in getattr(part, "__metadata__", ())]
    return [item for item in [*inner, *field.metadata] if isinstance(item, str)][-1]


def _bad_value(name: str, where: str, value: Any) -> str:
    """Return the error message, without the value if that may contain a password."""
    shown = "the value given" if name in _SECRETS or "@" in str(value) else repr(value)[:200]
    return f"{where}: {shown} is not allowed; it must be {allowed(name).replace('`', '')}"


def _read_file(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as opened:
            return tomllib.load(opened)
    except OSError as error:
        raise SettingsError(f"the settings file {file} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"the settings file {file} is not TOML: {str(error).splitlines()[0]}") from None


def _hint(name: str, known: Mapping[str, Any] | frozenset[str]) -> str:
    close = get_close_matches(name, known, n=1, cutoff=0.8)
    return f"; did you mean {close[0]}?" if close else ""


_VARIABLES = frozenset(map(variable, Settings.model_fields))
