"""The settings: defaults, then a TOML file, then environment variables; the later source wins.

Each setting is a field of `Settings`. The field name is the key in the file. The environment variable is `INDEXER_` and
the field name in upper case. The type of the field describes the allowed values in words, for error messages and for
docs/settings.md. A test compares that page with this module.
"""

import os
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from platformdirs import user_data_path
from pydantic import AfterValidator, BeforeValidator, Field, ValidationError
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from indexer import __version__
from indexer.app.setting_types import (
    AllowedValues,
    BindAddress,
    Collections,
    Contact,
    DatabaseUrl,
    Directories,
    DnsServers,
    Duration,
    OwnShard,
    Password,
    Patterns,
    Rate,
    RateOrOff,
    Relays,
    Seconds,
    Size,
    Switch,
    WebhookUrl,
    Whole,
    check_duplicates,
    reject_bool,
    split_list,
)
from indexer.atproto.limits import DEFAULT_LIMITS, Limits
from indexer.atproto.syntax import CollectionFilter
from indexer.errors import SettingsError
from indexer.net.server.address import Address
from indexer.sync.policy import Policy
from indexer.sync.scope import Scope, Track, filter_of
from indexer.sync.shard import Shard

PREFIX = "INDEXER_"
OTHER_VARIABLES = frozenset({"INDEXER_CONFIG", "INDEXER_PG_BINDIR", "INDEXER_VECTORS", "INDEXER_TEST_DATABASE_URL"})
"""Environment variables that start with the prefix and are not settings."""
_SECRETS = frozenset({"database_url", "webhook_url", "admin_password"})


class Settings(BaseSettings):
    """All settings, validated. `load_settings` reads them; `Settings(…)` reads neither the file nor the environment.

    Durations are in seconds and sizes in bytes, whatever unit was given.
    """

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, env_ignore_empty=True, enable_decoding=False, extra="forbid", frozen=True
    )

    database_url: DatabaseUrl | None = Field(
        None,
        description="Your Postgres database. Unset: the embedded Postgres under `INDEXER_DATA_DIR`.",
    )
    data_dir: Annotated[Path, AllowedValues("a directory")] = Field(
        default_factory=lambda: user_data_path("indexer"),
        validate_default=True,
        description="Directory of the embedded Postgres, and of exports while they are verified. Needs a disk with "
        "room.",
    )
    relays: Relays = Field(
        ("wss://relay1.us-east.bsky.network",),
        description="Relays to consume. The first one that works is used, so name more than one for availability. "
        "Each has its own cursor.",
    )
    upstream: Annotated[Literal["relay", "pds"], AllowedValues("`relay` or `pds`")] = Field(
        "relay",
        description="Kind of hosts in `INDEXER_RELAYS`. Choose `pds` to consume a PDS directly: its events count only "
        "for accounts that it hosts.",
    )
    start: Annotated[
        Literal["live", "oldest"] | Annotated[int, BeforeValidator(reject_bool), Field(ge=0, lt=2**63)],
        AllowedValues("`live`, `oldest`, or a sequence number"),
    ] = Field(
        "live",
        description="Where a new database starts: at the newest event, at the oldest one that the relay has, or after "
        "a sequence number.",
    )
    track: Annotated[Literal["all", "listed", "signal"], AllowedValues("`all`, `listed` or `signal`")] = Field(
        "all",
        description="Accounts to index: `all`; only those that `indexer add` or `indexer discover` added (`listed`); "
        "or also those with a record of a signal collection (`signal`). This and the next two settings are the scope "
        "of a new database; then use `indexer scope`.",
    )
    collections: Collections = Field(
        CollectionFilter(),
        description="Collections to store. Name those that your service reads; `app.bsky.*` matches all below "
        "`app.bsky`.",
    )
    signal_collections: Patterns = Field(
        (),
        description="With `INDEXER_TRACK=signal`: collections of which a record makes an account indexed. They need "
        "not be stored. Accounts of a pattern with `.*` are found on the stream only.",
    )
    store_values: Switch = Field(
        True,
        description="Store record values (JSON), not only CIDs. Turn it off to save "
        "disk if you need no values; feeds and links need them.",
    )
    links: Switch = Field(
        False,
        description="Keep `atproto.links` and `atproto.link_count`. Turn it on, for all processes, to count likes or "
        "followers: links of stored records are added in the background. Turned off, all links are removed.",
    )
    inversion: Annotated[Literal["strict", "lenient"], AllowedValues("`strict` or `lenient`")] = Field(
        "strict",
        description="Commits whose proof blocks are incomplete: `strict` requests a resync; `lenient` applies those "
        "that agree with the new tree, for lower latency, and requests a resync later.",
    )
    plc_url: Directories = Field(
        ("https://plc.directory",),
        description="PLC directories. If one does not answer, the next is asked. Put a mirror of yours first.",
    )
    dns_servers: DnsServers = Field(
        (), description="DNS servers for handles and host names, if not those of the system."
    )
    resync_workers: Annotated[Whole, Field(le=1_000), AllowedValues("a whole number from 1 to 1000")] = Field(
        32,
        description="Concurrent resyncs, besides those of exports above 32 MiB. Raise it if a backfill leaves CPU and "
        "database idle.",
    )
    resync_share: Annotated[
        float, BeforeValidator(reject_bool), Field(gt=0, le=1), AllowedValues("a number above 0, at most 1")
    ] = Field(
        0.5,
        description="Share of the resync workers that one host, registered domain or network address may occupy. `1` "
        "if you index a single PDS.",
    )
    new_accounts_per_host: Annotated[
        int,
        BeforeValidator(reject_bool),
        Field(ge=0, le=10**9),
        AllowedValues("a whole number up to 1000000000, or `0` for no limit"),
    ] = Field(
        100_000,
        description="Accounts that the stream may add in an hour for one host or registered domain; further ones wait. "
        "Raise it if a large host moves. `0`: no limit.",
    )
    resync_source: Annotated[
        tuple[Literal["relay", "pds"], ...],
        BeforeValidator(split_list),
        AfterValidator(check_duplicates),
        Field(min_length=1),
        AllowedValues("`relay`, `pds`, or both in a comma-separated list"),
    ] = Field(
        ("relay", "pds"),
        description="Sources of exports (`getRepo`), in the order in which they are asked. "
        "`pds,relay` spares the relay.",
    )
    export_time: Duration = Field(
        600,
        description="Maximum duration of the download of an export. Raise it if "
        "`last_failure` of large repos is `timeout`.",
    )
    export_rate: Size = Field(
        1_024,
        description="Minimum rate of the download of an export, in bytes per second. "
        "Lower it if slow hosts fail with `timeout`.",
    )
    plc_rate: Rate = Field(
        10,
        description="Maximum requests per second to PLC directories. Raise it for a mirror of yours, or if their "
        "operator agrees. At most half refresh known identities, at most a tenth for the same host.",
    )
    handle_rate: RateOrOff = Field(
        10,
        description="Maximum handle verifications per second. `0` if you need no handles: `atproto.repos.handle` is "
        "null.",
    )
    host_rate: Rate = Field(
        10,
        description="Maximum requests per second to one host or network address, except PLC directories. Raise it "
        "only for your own hosts.",
    )
    host_concurrency: Whole = Field(
        10, description="Maximum concurrent requests to one host. Raise it only for your own hosts."
    )
    outbound_rate: Rate = Field(
        100,
        description="Maximum requests per second to all hosts together. Raise it if a "
        "backfill of many hosts is limited by it.",
    )
    contact: Contact | None = Field(
        None, description="Contact for operators of other hosts, sent in every User-Agent header. Set it in production."
    )
    deletion_grace: Seconds = Field(
        604_800,
        description="Time from the deletion of an account to the erasure of its records, which are hidden at once. "
        "Lower it if your rules on erasure are stricter.",
    )
    sweep_interval: Seconds = Field(
        86_400,
        description="How often to compare the relay's repo list with the database, and to try parked repos again. "
        "`0`: only after messages may have been missed; parked repos stay.",
    )
    change_retention: Seconds = Field(
        604_800,
        description="How long changes stay in the change log, unless it reaches `INDEXER_CHANGE_BYTES`. Raise it to "
        "let consumers be away longer. `0`: no age limit.",
    )
    change_bytes: Annotated[Size, Field(ge=2**20), AllowedValues("a size of at least 1MiB, such as 5GB or 2GiB")] = (
        Field(
            50 * 10**9,
            description="Maximum size of the change log; twice as much while consumers are behind. Set it to less "
            "than half of the free disk.",
        )
    )
    consumer_lag_limit: Seconds = Field(
        1_209_600,
        description="Disconnect consumers that are further behind. `0`: only if the change log reaches twice "
        "`INDEXER_CHANGE_BYTES`.",
    )
    shard: OwnShard = Field(
        Shard(0, 1),
        description="Share i of n of the DIDs that this process indexes, from 0. Set it to use several machines.",
    )
    roles: Annotated[
        tuple[Literal["live", "resync", "feed"], ...],
        BeforeValidator(split_list),
        AfterValidator(check_duplicates),
        Field(min_length=1),
        AllowedValues("`live`, `resync`, `feed`, or several in a comma-separated list"),
    ] = Field(
        ("live", "resync"),
        description="Roles of this process: `live` consumes the firehose, `resync` runs resync workers. Add `feed` "
        "for clients of tap or Jetstream.",
    )
    core: Annotated[Literal["auto", "python", "native"], AllowedValues("`auto`, `python` or `native`")] = Field(
        "auto",
        description="Implementation of decoding and verification: `native` is the package `atproto-indexer-native`; "
        "`auto` uses it if it is installed. Both give the same results.",
    )
    verify_threads: Annotated[Whole, Field(le=1_000), AllowedValues("a whole number from 1 to 1000")] | None = Field(
        None,
        description="Threads in which the native core verifies. Lower it if other programs need the cores.",
    )
    batch_window: Annotated[Seconds, Field(le=1), AllowedValues("a duration such as 20ms, at most 1s, or 0")] = Field(
        0.02,
        description="Minimum time between batches that are not full. Longer: less CPU and fewer transactions, but "
        "later commits. `0`: lowest latency.",
    )
    webhook_url: WebhookUrl | None = Field(
        None,
        description="Webhook to which the role `feed` sends each event until it answers with a 2xx status, instead of "
        "serving `/channel`. It may have a private address.",
    )
    admin_password: Password | None = Field(
        None,
        description="Password of the user `admin` for paths of the role `feed` that change something or acknowledge "
        "events; also sent to the webhook. Unset: loopback clients only.",
    )
    allow_private_hosts: Switch = Field(
        False, description="Allow http:// URLs, and loopback and private addresses. For tests and local networks only."
    )
    stop_timeout: Duration = Field(
        25,
        description="Maximum time from SIGTERM or SIGINT to the end of the process. Keep it below that of your "
        "service manager: 30 s in Kubernetes, 10 s with `docker stop`.",
    )
    http_bind: BindAddress = Field(
        Address("127.0.0.1", 2580),
        description="Address of health checks, metrics, the status page and feeds. `0.0.0.0:2580` in a container.",
    )
    log_format: Annotated[Literal["auto", "json", "console"], AllowedValues("`json`, `console`, or `auto`")] = Field(
        "auto", description="Format of log lines. `auto`: `console` on a terminal, otherwise `json`."
    )
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], AllowedValues("`debug`, `info`, `warning`, or `error`")
    ] = Field("info", description="Minimum level of log lines. `debug` also shows single repos.")

    repo_bytes: Size = Field(
        DEFAULT_LIMITS.repo_bytes,
        description="Maximum size of an export, decompressed. Raise it if the "
        "`last_failure` of a wanted repo is `too-large`.",
    )
    repo_blocks: Whole = Field(
        DEFAULT_LIMITS.repo_blocks,
        description="Maximum number of blocks of an export. Raise it together with `INDEXER_REPO_BYTES`.",
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],  # noqa: ARG003 - the library's signature
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Use only the arguments of the constructor; `load_settings` reads the other sources."""
        return (init_settings,)

    @property
    def user_agent(self) -> str:
        """The User-Agent header of all requests."""
        return f"indexer/{__version__} (AT Protocol record-level sync; {self.contact or 'no contact given'})"

    @property
    def limits(self) -> Limits:
        """The limits on input from other hosts."""
        return replace(DEFAULT_LIMITS, repo_bytes=self.repo_bytes, repo_blocks=self.repo_blocks)

    @property
    def first_scope(self) -> Scope:
        """The scope of a new database. A stored scope has precedence."""
        return Scope(
            track=Track(self.track),
            collections=self.collections,
            signal_collections=filter_of(self.signal_collections),
        )

    @property
    def policy(self) -> Policy:
        """The settings that planning depends on, with the first scope."""
        return Policy(
            scope=self.first_scope,
            limits=self.limits,
            store_values=self.store_values,
            lenient=self.inversion == "lenient",
            deletion_grace=self.deletion_grace,
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
    environment = EnvSettingsSource(Settings)
    try:
        settings = Settings(_build_sources=((environment, InitSettingsSource(Settings, from_file)), {}))
    except ValidationError as error:
        name = str(error.errors()[0]["loc"][0])
        given = environment()
        where, value = (variable(name), given[name]) if name in given else (f"{name!r} in {file}", from_file[name])
        raise SettingsError(_bad_value(name, where, value)) from None
    if settings.track == "signal" and not settings.signal_collections:
        raise SettingsError(f"{variable('track')}: 'signal' needs {variable('signal_collections')}")
    if settings.links and not settings.store_values:
        raise SettingsError("INDEXER_LINKS needs INDEXER_STORE_VALUES, because links are found in values")
    return settings


def load_log_settings() -> Settings:
    """Return the defaults, with format and level of log lines from the environment.

    Raises:
        SettingsError: One of these two has a bad value.
    """
    return _load_only("log_format", "log_level")


def load_demo_settings() -> Settings:
    """Return the defaults, with what is not about a network from the environment: log lines and the core.

    Raises:
        SettingsError: One of these has a bad value.
    """
    return _load_only("log_format", "log_level", "core", "verify_threads")


def _load_only(*names: str) -> Settings:
    given = {name: value for name, value in EnvSettingsSource(Settings)().items() if name in names}
    try:
        return Settings(**given)
    except ValidationError as error:
        name = str(error.errors()[0]["loc"][0])
        raise SettingsError(_bad_value(name, variable(name), given[name])) from None


def variable(name: str) -> str:
    """Return the environment variable of a setting."""
    return PREFIX + name.upper()


def allowed(name: str) -> str:
    """Return the allowed values of a setting, in words."""
    field = Settings.model_fields[name]
    inner = [item for part in get_args(field.annotation) for item in getattr(part, "__metadata__", ())]
    return [item.text for item in [*inner, *field.metadata] if isinstance(item, AllowedValues)][-1]


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
