"""Settings: defaults, under a TOML file, under the environment. docs/settings.md is held to this file by a test.

A setting is one field of `Settings`: its name in capitals behind `INDEXER_` is the environment variable, its name
as it stands the key in the file. Its type says in words what is allowed, and those words are the error message.
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
from indexer.sync.planning import Policy
from indexer.sync.shard import BUCKETS, Shard

PREFIX = "INDEXER_"
OTHER_VARIABLES = frozenset({"INDEXER_CONFIG", "INDEXER_PG_BINDIR", "INDEXER_VECTORS", "INDEXER_TEST_DATABASE_URL"})


@dataclass(frozen=True, slots=True)
class Allowed:
    """What a setting may be, in words."""

    text: str


class Address(NamedTuple):
    """A host name or IP address, and a port; printed so that it can be read again."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def _not_a_truth_value(value: Any) -> Any:
    """TOML's `true` is a number to Python, but not to an operator."""
    if isinstance(value, bool):
        raise ValueError("a truth value")  # noqa: TRY004 - what pydantic collects
    return value


def _listed(value: Any) -> Any:
    """The items of a comma list, or of a list in the file."""
    return [item.strip() for item in value.split(",")] if isinstance(value, str) else value


def _measured(units: Mapping[str, float]) -> Callable[[Any], Any]:
    """Numbers with a unit behind them, in the unit that counts 1."""

    def read(value: Any) -> Any:
        match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([A-Za-z]*)", value) if isinstance(value, str) else None
        return float(match[1]) * units[match[2]] if match and match[2] in units else value

    return read


_SECONDS = {"": 1, "ms": 0.001, "s": 1, "m": 60, "h": 3_600, "d": 86_400}
_BYTES = {"": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_PORTS = 65_535


def _address(value: Any, default_port: int | None = None) -> Any:
    """`host:port`, `[v6]:port`; without the port where there is a default."""
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
        raise ValueError("a name server is asked by its IP address")
    return address


def _url(*schemes: str) -> Callable[[str], str]:
    """Base URLs: no user, query or fragment, since they are logged, and paths are added to them."""

    def check(value: str) -> str:
        parts = urlsplit(value)
        if parts.scheme not in schemes or not parts.hostname or parts.port == 0 or "@" in parts.netloc:
            raise ValueError("not such a URL")
        if parts.query or parts.fragment or not value.isprintable() or " " in value:
            raise ValueError("not a base URL")
        return value.rstrip("/")

    return check


def _contact(value: str) -> str:
    """It goes into a header's comment: no spaces, no parentheses."""
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
    patterns = _listed(value)
    strings = isinstance(patterns, list) and all(isinstance(pattern, str) for pattern in patterns)
    return CollectionFilter(patterns) if strings else value


def _once(items: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(items)) < len(items):
        raise ValueError("named twice")
    return items


Whole = Annotated[int, BeforeValidator(_not_a_truth_value), Field(ge=1), Allowed("a whole number from 1 on")]
Rate = Annotated[
    float, BeforeValidator(_not_a_truth_value), Field(gt=0, allow_inf_nan=False), Allowed("a number above 0")
]
RateOrOff = Annotated[
    float, BeforeValidator(_not_a_truth_value), Field(ge=0, allow_inf_nan=False), Allowed("a number from 0 on")
]
Size = Annotated[
    int,
    BeforeValidator(_measured(_BYTES)),
    BeforeValidator(_not_a_truth_value),
    Field(ge=1),
    Allowed("a number of bytes from 1 on, as 5000000, 5MB or 2GiB"),
]
Seconds = Annotated[
    float,
    BeforeValidator(_measured(_SECONDS)),
    BeforeValidator(_not_a_truth_value),
    Field(ge=0, allow_inf_nan=False),
    Allowed("a duration, as 90s, 15m, 24h or 7d, or 0"),
]
Duration = Annotated[
    float,
    BeforeValidator(_measured(_SECONDS)),
    BeforeValidator(_not_a_truth_value),
    Field(gt=0, allow_inf_nan=False),
    Allowed("a duration above 0, as 90s, 15m or 24h"),
]
Switch = Annotated[bool, Allowed("true or false")]
Relays = Annotated[
    tuple[Annotated[str, AfterValidator(_url("ws", "wss"))], ...],
    BeforeValidator(_listed),
    AfterValidator(_once),
    Field(min_length=1),
    Allowed("a comma list of ws:// or wss:// URLs, without user and query"),
]
Directories = Annotated[
    tuple[Annotated[str, AfterValidator(_url("http", "https"))], ...],
    BeforeValidator(_listed),
    AfterValidator(_once),
    Field(min_length=1),
    Allowed("a comma list of http:// or https:// URLs, without user and query"),
]


class Settings(BaseSettings):
    """All settings, checked. Made by `load_settings`; `Settings(…)` itself reads neither file nor environment.

    Durations are seconds, sizes are bytes, whatever unit they were given in.
    """

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, env_ignore_empty=True, enable_decoding=False, extra="forbid", frozen=True
    )

    database_url: Annotated[SecretStr, AfterValidator(_database_url), Allowed("a postgresql:// URL")] | None = Field(
        None, description="The database; unset: an embedded Postgres under `INDEXER_DATA_DIR`."
    )
    data_dir: Annotated[Path, Allowed("a directory")] = Field(
        default_factory=lambda: user_data_path("indexer"),
        validate_default=True,
        description="Embedded database and spool files.",
    )
    relays: Relays = Field(
        ("wss://relay1.us-east.bsky.network",),
        description="Relays to read from; the first that works is used. Cursors are kept per relay.",
    )
    upstream: Annotated[Literal["relay", "pds"], Allowed("`relay` or `pds`")] = Field(
        "relay", description="What `INDEXER_RELAYS` are. A PDS is believed of the accounts that it hosts, of no others."
    )
    start: Annotated[
        Literal["live", "oldest"] | Annotated[int, BeforeValidator(_not_a_truth_value), Field(ge=0)],
        Allowed("`live`, `oldest`, or a sequence number"),
    ] = Field("live", description="Where to begin without a saved cursor.")
    track: Annotated[Literal["all", "listed"], Allowed("`all` or `listed`")] = Field(
        "all",
        description="`all`: every account seen on the firehose; `listed`: only accounts that are in the repo table.",
    )
    collections: Annotated[
        CollectionFilter,
        BeforeValidator(_collections),
        Allowed("a comma list of NSIDs, each whole or ending in `.*`, or `*`"),
    ] = Field(
        CollectionFilter(),
        description="Collections to keep; a trailing `.*` matches on whole segments. After a change: "
        "`indexer resync --all`, since what is there already follows with each repo's next resync.",
    )
    store_values: Switch = Field(True, description="Keep record values (JSON) beside their CIDs.")
    inversion: Annotated[Literal["strict", "lenient"], Allowed("`strict` or `lenient`")] = Field(
        "strict", description="Towards commits that come with too few blocks to be inverted."
    )
    plc_url: Directories = Field(
        ("https://plc.directory",), description="PLC directories; the next is asked when one doesn't answer."
    )
    dns_servers: Annotated[
        tuple[Annotated[Address, BeforeValidator(_dns_server)], ...],
        BeforeValidator(_listed),
        Allowed("a comma list of IP addresses, each with or without a port"),
    ] = Field((), description="Name servers for handles and hosts; unset: the system's.")
    resync_workers: Annotated[Whole, Field(le=1_000), Allowed("a whole number from 1 to 1000")] = Field(
        8, description="Concurrent resyncs."
    )
    resync_source: Annotated[
        tuple[Literal["relay", "pds"], ...],
        BeforeValidator(_listed),
        AfterValidator(_once),
        Field(min_length=1),
        Allowed("`relay`, `pds`, or both in a comma list"),
    ] = Field(("relay", "pds"), description="Where `getRepo` is asked, in order.")
    export_time: Duration = Field(600, description="How long an export may take to arrive.")
    export_rate: Size = Field(1_024, description="The least bytes a second at which an export may arrive.")
    plc_rate: Rate = Field(
        10,
        description="Directory look-ups a second; at most half of them of identities that are known already, and a "
        "tenth of those of one host's accounts.",
    )
    handle_rate: RateOrOff = Field(
        10, description="Handles checked a second, in the background; `0`: none, `atproto.repos.handle` stays null."
    )
    host_rate: Rate = Field(10, description="Requests a second to any one other host.")
    host_concurrency: Whole = Field(10, description="Requests at once to any one host.")
    outbound_rate: Rate = Field(100, description="Requests a second to all hosts together.")
    outbound_concurrency: Whole = Field(
        256, description="Requests at once to all hosts together; each resync needs one, and look-ups up to 200."
    )
    contact: Annotated[str, AfterValidator(_contact), Allowed("a http(s):// URL or an e-mail address")] | None = Field(
        None, description="Whom operators of hosts may write to: it stands in the User-Agent of every request."
    )
    deletion_grace: Seconds = Field(
        604_800,
        description="How long a deleted account's records, hidden at once, are kept before they are erased.",
    )
    sweep_interval: Seconds = Field(
        86_400,
        description="How often all accounts that the relay lists are held against ours, and those behind are fetched; "
        "after so long, too, a repo that was given up on is tried again. `0`: never.",
    )
    change_retention: Seconds = Field(
        604_800, description="How long the change log is kept at least, up to `INDEXER_CHANGE_BYTES`; `0`: for ever."
    )
    change_bytes: Annotated[Size, Field(ge=2**20), Allowed("a number of bytes from 1MiB on, as 5GB or 2GiB")] = Field(
        50 * 10**9,
        description="How large the change log grows; up to twice that for registered readers that are behind.",
    )
    reader_alarm: Seconds = Field(
        3_600, description="A registered reader that is so far behind the change log is told of, in log and status."
    )
    reader_limit: Seconds = Field(
        1_209_600, description="And so far behind it is cut off; `0`: never, but for `INDEXER_CHANGE_BYTES`."
    )
    shard: Annotated[Shard, BeforeValidator(_shard), Allowed(f"i/n, with i below n and n at most {BUCKETS}")] = Field(
        Shard(0, 1), description="This process's share of the DIDs."
    )
    roles: Annotated[
        tuple[Literal["live", "resync"], ...],
        BeforeValidator(_listed),
        AfterValidator(_once),
        Field(min_length=1),
        Allowed("`live`, `resync`, or both in a comma list"),
    ] = Field(("live", "resync"), description="What this process does of the two.")
    allow_private_hosts: Switch = Field(
        False, description="Allow http and loopback or private addresses (tests, local networks)."
    )
    http_bind: Annotated[Address, BeforeValidator(_address), Allowed("host:port")] = Field(
        Address("127.0.0.1", 2580), description="Health, metrics, status page."
    )
    log_format: Annotated[Literal["auto", "json", "console"], Allowed("`json`, `console`, or `auto`")] = Field(
        "auto", description="`auto`: `console` on a terminal, `json` elsewhere."
    )
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Allowed("`debug`, `info`, `warning`, or `error`")
    ] = Field("info", description="The least severe log lines to write.")

    frame_bytes: Size = Field(DEFAULT_LIMITS.frame_bytes, description="A websocket message.")
    commit_blocks_bytes: Size = Field(DEFAULT_LIMITS.commit_blocks_bytes, description="The blocks of a #commit.")
    commit_ops: Whole = Field(DEFAULT_LIMITS.commit_ops, description="Operations of a #commit.")
    sync_blocks_bytes: Size = Field(DEFAULT_LIMITS.sync_blocks_bytes, description="The blocks of a #sync.")
    record_bytes: Size = Field(DEFAULT_LIMITS.record_bytes, description="A record.")
    car_header_bytes: Size = Field(DEFAULT_LIMITS.car_header_bytes, description="The header of a CAR file.")
    block_bytes: Size = Field(DEFAULT_LIMITS.block_bytes, description="Any one block of a CAR file.")
    node_entries: Whole = Field(DEFAULT_LIMITS.node_entries, description="Entries of one tree node.")
    tree_depth: Annotated[Whole, Field(le=128), Allowed("a whole number from 1 to 128")] = Field(
        DEFAULT_LIMITS.tree_depth, description="Layers of a tree."
    )
    repo_bytes: Size = Field(DEFAULT_LIMITS.repo_bytes, description="An export, decompressed.")
    repo_blocks: Whole = Field(DEFAULT_LIMITS.repo_blocks, description="Blocks of an export.")
    clock_drift_seconds: Seconds = Field(
        DEFAULT_LIMITS.clock_drift_seconds, description="How far a revision may lie in the future."
    )
    kept_events: Whole = Field(DEFAULT_LIMITS.kept_events, description="Events kept for one repo during its resync.")
    kept_bytes: Size = Field(DEFAULT_LIMITS.kept_bytes, description="And the bytes of their frames.")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],  # noqa: ARG003 - the library's signature
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)

    @property
    def user_agent(self) -> str:
        """What hosts and relays are told of who asks."""
        return f"indexer/{__version__} (AT Protocol record-level sync; {self.contact or 'no contact given'})"

    @property
    def limits(self) -> Limits:
        return Limits(**{limit.name: int(getattr(self, limit.name)) for limit in fields(Limits)})

    @property
    def policy(self) -> Policy:
        return Policy(
            collections=self.collections,
            limits=self.limits,
            store_values=self.store_values,
            lenient=self.inversion == "lenient",
            track_all=self.track == "all",
            deletion_grace=self.deletion_grace,
        )


def load_settings(file: Path | None = None) -> Settings:
    """The settings of this process: defaults < `file` < environment; raises `SettingsError`, one line each.

    `file` defaults to what `INDEXER_CONFIG` names, if it does.
    """
    named = os.environ.get("INDEXER_CONFIG")
    file = file or (Path(named) if named else None)
    from_file = _read(file) if file else {}
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
        raise SettingsError(_complaint(name, where, value)) from None


def variable(name: str) -> str:
    """The environment variable of a setting."""
    return PREFIX + name.upper()


def allowed(name: str) -> str:
    """What the setting may be, in words."""
    field = Settings.model_fields[name]
    inner = [item for part in get_args(field.annotation) for item in getattr(part, "__metadata__", ())]
    return [item.text for item in [*inner, *field.metadata] if isinstance(item, Allowed)][-1]


def _complaint(name: str, where: str, value: Any) -> str:
    """The value is left out where it may hold a password."""
    shown = "the value given" if name == "database_url" or "@" in str(value) else repr(value)[:200]
    return f"{where}: {shown} is not allowed; it must be {allowed(name).replace('`', '')}"


def _read(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as opened:
            return tomllib.load(opened)
    except OSError as error:
        raise SettingsError(f"the settings file {file} can't be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"the settings file {file} is not TOML: {str(error).splitlines()[0]}") from None


def _hint(name: str, known: Mapping[str, Any] | frozenset[str]) -> str:
    close = get_close_matches(name, known, n=1, cutoff=0.8)
    return f"; did you mean {close[0]}?" if close else ""


_VARIABLES = frozenset(map(variable, Settings.model_fields))
