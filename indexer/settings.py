"""The settings: defaults, then a TOML file, then environment variables; the later source wins.

Each setting is a field of `Settings`. The field name is the key in the file. The environment variable is `INDEXER_` and
the field name in upper case. The type of the field describes the allowed values in words, for error messages and for
docs/settings.md. A test compares that page with this module.
"""

import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args
from urllib.parse import urlsplit

from platformdirs import user_data_path
from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, ValidationError
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from indexer import __version__
from indexer.atproto.limits import DEFAULT_LIMITS, Limits
from indexer.atproto.syntax import CollectionFilter
from indexer.errors import SettingsError
from indexer.sync.policy import Policy
from indexer.sync.shard import BUCKETS, Shard

PREFIX = "INDEXER_"
OTHER_VARIABLES = frozenset({"INDEXER_CONFIG", "INDEXER_PG_BINDIR", "INDEXER_VECTORS", "INDEXER_TEST_DATABASE_URL"})
"""Environment variables that start with the prefix and are not settings."""


@dataclass(frozen=True, slots=True)
class AllowedValues:
    """The allowed values of a setting, in words."""

    text: str


class Address(NamedTuple):
    """A host name or IP address, and a port. Its text is a valid value of the setting."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def _reject_bool(value: Any) -> Any:
    """Reject `true` of TOML, which Python would accept as the number 1."""
    if isinstance(value, bool):
        raise ValueError("a truth value")  # noqa: TRY004 - pydantic collects ValueError
    return value


def _split(value: Any) -> Any:
    """Return the items of a comma-separated list; a list from the file stays as it is."""
    return [item.strip() for item in value.split(",")] if isinstance(value, str) else value


def _number_with_unit(units: Mapping[str, float]) -> Callable[[Any], Any]:
    """Return a function that reads a number with one of the units, and converts it."""

    def read(value: Any) -> Any:
        match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([A-Za-z]*)", value) if isinstance(value, str) else None
        return float(match[1]) * units[match[2]] if match and match[2] in units else value

    return read


_SECONDS = {"": 1, "ms": 0.001, "s": 1, "m": 60, "h": 3_600, "d": 86_400}
_BYTES = {"": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_PORTS = 65_535


def _address(value: Any, default_port: int | None = None) -> Any:
    """Read `host:port` or `[IPv6 address]:port`. The port may be missing if there is a default."""
    if not isinstance(value, str):
        return value
    if default_port is not None and _is_ip(value.strip("[]")):
        return Address(value.strip("[]"), default_port)
    host, separator, port = value.rpartition(":")
    bracketed = re.fullmatch(r"\[(.+)\]", host)
    host = bracketed[1] if bracketed else host
    if not separator or not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > _PORTS:
        raise ValueError("no port")
    if not (_is_ip(host) if bracketed else re.fullmatch(r"[A-Za-z0-9.-]+", host)):
        raise ValueError("no host")
    return Address(host, int(port))


def _is_ip(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return True


def _dns_server(value: Any) -> Any:
    address = _address(value, default_port=53)
    if not (isinstance(address, Address) and _is_ip(address.host)):
        raise ValueError("a DNS server needs an IP address")
    return address


def _url(*schemes: str) -> Callable[[str], str]:
    """Return a check for base URLs. They are logged and paths are appended, so user, query and fragment are invalid."""

    def check(value: str) -> str:
        parts = urlsplit(value)
        if parts.scheme not in schemes or not parts.hostname or parts.port == 0 or "@" in parts.netloc:
            raise ValueError("not a URL of an allowed kind")
        if parts.query or parts.fragment or not value.isprintable() or " " in value:
            raise ValueError("not a base URL")
        return value.rstrip("/")

    return check


def _contact(value: str) -> str:
    """Check a contact. It becomes part of the comment of a header, so spaces and parentheses are invalid."""
    if not re.fullmatch(
        r"(https?://[!-'*-?A-~]{1,200})|((mailto:)?[!-'*-.0-9;-?A-~]{1,100}@[0-9A-Za-z.-]{1,100})", value
    ):
        raise ValueError("not a contact")
    return value


def _database_url(value: SecretStr) -> SecretStr:
    parts = urlsplit(value.get_secret_value())
    hosts = parts.netloc.rpartition("@")[2].split(",")
    if parts.scheme not in ("postgresql", "postgres") or not all(map(_HOST_AND_PORT, hosts)):
        raise ValueError("not a Postgres URL")
    return value


_HOST_AND_PORT = re.compile(r"(\[[^]]+\]|[^:]*)(:[0-9]{1,5})?").fullmatch


def _shard(value: Any) -> Any:
    match = re.fullmatch(r"(\d{1,4})/(\d{1,4})", value) if isinstance(value, str) else None
    return Shard(int(match[1]), int(match[2])) if match else value


def _collections(value: Any) -> Any:
    patterns = _split(value)
    strings = isinstance(patterns, list) and all(isinstance(pattern, str) for pattern in patterns)
    return CollectionFilter(patterns) if strings else value


def _without_duplicates(items: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(items)) < len(items):
        raise ValueError("given twice")
    return items


Whole = Annotated[int, BeforeValidator(_reject_bool), Field(ge=1), AllowedValues("a whole number, at least 1")]
Rate = Annotated[
    float, BeforeValidator(_reject_bool), Field(gt=0, allow_inf_nan=False), AllowedValues("a number above 0")
]
RateOrOff = Annotated[
    float, BeforeValidator(_reject_bool), Field(ge=0, allow_inf_nan=False), AllowedValues("a number, at least 0")
]
Size = Annotated[
    int,
    BeforeValidator(_number_with_unit(_BYTES)),
    BeforeValidator(_reject_bool),
    Field(ge=1),
    AllowedValues("a size of at least 1 byte, such as 5000000, 5MB or 2GiB"),
]
Seconds = Annotated[
    float,
    BeforeValidator(_number_with_unit(_SECONDS)),
    BeforeValidator(_reject_bool),
    Field(ge=0, allow_inf_nan=False),
    AllowedValues("a duration such as 90s, 15m, 24h or 7d, or 0"),
]
Duration = Annotated[
    float,
    BeforeValidator(_number_with_unit(_SECONDS)),
    BeforeValidator(_reject_bool),
    Field(gt=0, allow_inf_nan=False),
    AllowedValues("a duration above 0, such as 90s, 15m or 24h"),
]
Switch = Annotated[bool, AllowedValues("true or false")]
Relays = Annotated[
    tuple[Annotated[str, AfterValidator(_url("ws", "wss"))], ...],
    BeforeValidator(_split),
    AfterValidator(_without_duplicates),
    Field(min_length=1),
    AllowedValues("a comma-separated list of ws:// or wss:// URLs, without user and query"),
]
Directories = Annotated[
    tuple[Annotated[str, AfterValidator(_url("http", "https"))], ...],
    BeforeValidator(_split),
    AfterValidator(_without_duplicates),
    Field(min_length=1),
    AllowedValues("a comma-separated list of http:// or https:// URLs, without user and query"),
]


class Settings(BaseSettings):
    """All settings, validated. `load_settings` reads them; `Settings(…)` reads neither the file nor the environment.

    Durations are in seconds and sizes in bytes, whatever unit was given.
    """

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, env_ignore_empty=True, enable_decoding=False, extra="forbid", frozen=True
    )

    database_url: Annotated[SecretStr, AfterValidator(_database_url), AllowedValues("a postgresql:// URL")] | None = (
        Field(None, description="Postgres database to use. Unset: the embedded Postgres under `INDEXER_DATA_DIR`.")
    )
    data_dir: Annotated[Path, AllowedValues("a directory")] = Field(
        default_factory=lambda: user_data_path("indexer"),
        validate_default=True,
        description="Directory of the embedded Postgres and of spool files (exports that are being verified).",
    )
    relays: Relays = Field(
        ("wss://relay1.us-east.bsky.network",),
        description="Relays to consume, in order of preference: the first one that works is used. Each relay has its "
        "own cursor.",
    )
    upstream: Annotated[Literal["relay", "pds"], AllowedValues("`relay` or `pds`")] = Field(
        "relay",
        description="Kind of hosts in `INDEXER_RELAYS`. Events from a PDS are accepted only for accounts that it "
        "hosts.",
    )
    start: Annotated[
        Literal["live", "oldest"] | Annotated[int, BeforeValidator(_reject_bool), Field(ge=0)],
        AllowedValues("`live`, `oldest`, or a sequence number"),
    ] = Field(
        "live",
        description="Where to start consuming without a stored cursor: at the newest event, at the oldest event that "
        "the relay still has, or after a sequence number.",
    )
    track: Annotated[Literal["all", "listed"], AllowedValues("`all` or `listed`")] = Field(
        "all",
        description="Accounts to index: `all` accounts that appear on the firehose, or only `listed` ones, which "
        "`indexer add` or `indexer discover` added.",
    )
    collections: Annotated[
        CollectionFilter,
        BeforeValidator(_collections),
        AllowedValues("a comma-separated list of NSIDs, each complete or ending in `.*`, or `*`"),
    ] = Field(
        CollectionFilter(),
        description="Collections to store. `app.bsky.*` matches all collections below `app.bsky`. After a change, "
        "stored records follow at the next resync of their repo; `indexer resync --all` requests it.",
    )
    store_values: Switch = Field(True, description="Store record values (JSON), not only CIDs.")
    inversion: Annotated[Literal["strict", "lenient"], AllowedValues("`strict` or `lenient`")] = Field(
        "strict",
        description="How to treat commits whose proof blocks are incomplete: `strict` requests a resync; `lenient` "
        "applies a commit if its operations agree with the new tree.",
    )
    plc_url: Directories = Field(
        ("https://plc.directory",), description="PLC directories. If one does not answer, the next one is asked."
    )
    dns_servers: Annotated[
        tuple[Annotated[Address, BeforeValidator(_dns_server)], ...],
        BeforeValidator(_split),
        AllowedValues("a comma-separated list of IP addresses, each with or without a port"),
    ] = Field((), description="DNS servers for handles and host names. Unset: those of the system.")
    resync_workers: Annotated[Whole, Field(le=1_000), AllowedValues("a whole number from 1 to 1000")] = Field(
        8, description="Number of concurrent resyncs. Resyncs of large repos have additional slots."
    )
    resync_source: Annotated[
        tuple[Literal["relay", "pds"], ...],
        BeforeValidator(_split),
        AfterValidator(_without_duplicates),
        Field(min_length=1),
        AllowedValues("`relay`, `pds`, or both in a comma-separated list"),
    ] = Field(("relay", "pds"), description="Sources of exports (`getRepo`), in the order in which they are asked.")
    export_time: Duration = Field(600, description="Maximum duration of the download of an export.")
    export_rate: Size = Field(1_024, description="Minimum rate of the download of an export, in bytes per second.")
    plc_rate: Rate = Field(
        10,
        description="Maximum requests per second to PLC directories. At most half of them refresh known identities, "
        "and at most a tenth refresh identities of accounts on the same host.",
    )
    handle_rate: RateOrOff = Field(
        10,
        description="Maximum handle verifications per second, in the background. `0`: none, and "
        "`atproto.repos.handle` is null.",
    )
    host_rate: Rate = Field(10, description="Maximum requests per second to one host, except PLC directories.")
    host_concurrency: Whole = Field(10, description="Maximum concurrent requests to one host.")
    outbound_rate: Rate = Field(100, description="Maximum requests per second to all hosts together.")
    outbound_concurrency: Whole = Field(
        256,
        description="Maximum concurrent requests to all hosts together. A resync needs one. Lookups need up to 200.",
    )
    contact: (
        Annotated[str, AfterValidator(_contact), AllowedValues("an http(s):// URL or an e-mail address")] | None
    ) = Field(None, description="Contact for operators of other hosts, sent in the User-Agent header of every request.")
    deletion_grace: Seconds = Field(
        604_800,
        description="Time from the deletion of an account to the erasure of its records. They are hidden immediately.",
    )
    sweep_interval: Seconds = Field(
        86_400,
        description="How often to compare the relay's repo list with the database, and to try parked repos again. "
        "`0`: never.",
    )
    change_retention: Seconds = Field(
        604_800,
        description="Minimum time that changes stay in the change log, unless it reaches `INDEXER_CHANGE_BYTES`. "
        "`0` disables the age limit.",
    )
    change_bytes: Annotated[Size, Field(ge=2**20), AllowedValues("a size of at least 1MiB, such as 5GB or 2GiB")] = (
        Field(
            50 * 10**9,
            description="Maximum size of the change log, in bytes. While consumers are behind, it may reach twice this "
            "size.",
        )
    )
    consumer_lag_alarm: Seconds = Field(
        3_600,
        description="Report consumers of the change log that are further behind than this, in the log and on the "
        "status page.",
    )
    consumer_lag_limit: Seconds = Field(
        1_209_600,
        description="Disconnect consumers that are further behind than this. `0`: only if the change log reaches twice "
        "`INDEXER_CHANGE_BYTES`.",
    )
    shard: Annotated[Shard, BeforeValidator(_shard), AllowedValues(f"i/n, with i below n and n at most {BUCKETS}")] = (
        Field(
            Shard(0, 1),
            description="Share of the DIDs that this process indexes: share i of n equal shares, counted from 0.",
        )
    )
    roles: Annotated[
        tuple[Literal["live", "resync"], ...],
        BeforeValidator(_split),
        AfterValidator(_without_duplicates),
        Field(min_length=1),
        AllowedValues("`live`, `resync`, or both in a comma-separated list"),
    ] = Field(
        ("live", "resync"),
        description="Roles of this process: `live` consumes the firehose, `resync` runs resync workers.",
    )
    allow_private_hosts: Switch = Field(
        False, description="Allow http:// URLs, and loopback and private addresses, for tests and local networks."
    )
    http_bind: Annotated[Address, BeforeValidator(_address), AllowedValues("host:port")] = Field(
        Address("127.0.0.1", 2580),
        description="Address of the HTTP server for health checks, metrics and the status page.",
    )
    log_format: Annotated[Literal["auto", "json", "console"], AllowedValues("`json`, `console`, or `auto`")] = Field(
        "auto", description="Format of log lines. `auto`: `console` on a terminal, otherwise `json`."
    )
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], AllowedValues("`debug`, `info`, `warning`, or `error`")
    ] = Field("info", description="Minimum level of log lines.")

    frame_bytes: Size = Field(DEFAULT_LIMITS.frame_bytes, description="Maximum size of a websocket message, in bytes.")
    commit_blocks_bytes: Size = Field(
        DEFAULT_LIMITS.commit_blocks_bytes, description="Maximum size of the blocks of a #commit, in bytes."
    )
    commit_ops: Whole = Field(DEFAULT_LIMITS.commit_ops, description="Maximum number of operations of a #commit.")
    sync_blocks_bytes: Size = Field(
        DEFAULT_LIMITS.sync_blocks_bytes, description="Maximum size of the blocks of a #sync, in bytes."
    )
    record_bytes: Size = Field(DEFAULT_LIMITS.record_bytes, description="Maximum size of a record, in bytes.")
    car_header_bytes: Size = Field(
        DEFAULT_LIMITS.car_header_bytes, description="Maximum size of the header of a CAR file, in bytes."
    )
    block_bytes: Size = Field(
        DEFAULT_LIMITS.block_bytes, description="Maximum size of one block of a CAR file, in bytes."
    )
    node_entries: Whole = Field(DEFAULT_LIMITS.node_entries, description="Maximum number of entries of a tree node.")
    tree_depth: Annotated[Whole, Field(le=128), AllowedValues("a whole number from 1 to 128")] = Field(
        DEFAULT_LIMITS.tree_depth, description="Maximum number of layers of a tree."
    )
    repo_bytes: Size = Field(
        DEFAULT_LIMITS.repo_bytes, description="Maximum size of an export, decompressed, in bytes."
    )
    repo_blocks: Whole = Field(DEFAULT_LIMITS.repo_blocks, description="Maximum number of blocks of an export.")
    clock_drift_seconds: Seconds = Field(
        DEFAULT_LIMITS.clock_drift_seconds,
        description="Maximum time that a rev may be ahead of the clock of this machine.",
    )
    resync_buffer_events: Whole = Field(
        DEFAULT_LIMITS.resync_buffer_events, description="Maximum number of events in the resync buffer of one repo."
    )
    resync_buffer_bytes: Size = Field(
        DEFAULT_LIMITS.resync_buffer_bytes,
        description="Maximum size of the frames in the resync buffer of one repo, in bytes.",
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
        return Limits(**{limit.name: int(getattr(self, limit.name)) for limit in fields(Limits)})

    @property
    def policy(self) -> Policy:
        """The settings that planning depends on."""
        return Policy(
            collections=self.collections,
            limits=self.limits,
            store_values=self.store_values,
            lenient=self.inversion == "lenient",
            track_all=self.track == "all",
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
        return Settings(_build_sources=((environment, InitSettingsSource(Settings, from_file)), {}))
    except ValidationError as error:
        name = str(error.errors()[0]["loc"][0])
        given = environment()
        where, value = (variable(name), given[name]) if name in given else (f"{name!r} in {file}", from_file[name])
        raise SettingsError(_bad_value(name, where, value)) from None


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
    shown = "the value given" if name == "database_url" or "@" in str(value) else repr(value)[:200]
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
