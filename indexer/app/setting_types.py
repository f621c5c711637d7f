"""The types of settings: how each is read from text, which values are allowed, and these values in words."""

import re
from collections.abc import Callable, Mapping
from ipaddress import ip_address
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    SecretStr,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)

from indexer.atproto.syntax import CollectionFilter
from indexer.net.relay.stream_socket import STREAM_PATH, SUBSCRIBE_PATH
from indexer.net.server.address import Address
from indexer.sync.shard import BUCKETS, Shard

_SECONDS = {"": 1, "ms": 0.001, "s": 1, "m": 60, "h": 3_600, "d": 86_400}
_BYTES = {"": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_CONTACT = r"^(https?://[!-'*-?A-~]{1,200}|(mailto:)?[!-'*-.0-9;-?A-~]{1,100}@[0-9A-Za-z.-]{1,100})$"
"""It becomes part of the comment of a header, so spaces and parentheses are invalid."""
MAX_PORT = 65_535
# The native core holds sizes and counts in 64 bits on 64-bit platforms, and all of these are far below.
_MAX_WHOLE = 10**9
_MAX_BYTES = 10**15
_MAX_DAYS = 36_500
"""A hundred years. The times that the program computes with durations must be ones that Postgres can store."""


def _with_unit(units: Mapping[str, float]) -> Callable[[Any], Any]:
    """Return a function that reads a number with one of the units, and converts it."""

    def read(value: Any) -> Any:
        match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([A-Za-z]*)", value) if isinstance(value, str) else None
        return float(match[1]) * units[match[2]] if match and match[2] in units else value

    return read


def _split_list(value: Any) -> Any:
    """Return the items of a comma-separated list; a list from the file stays as it is."""
    return [item.strip() for item in value.split(",")] if isinstance(value, str) else value


def _read_list(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    """Read a list that has at least one item, and no item twice."""
    items = validate(_split_list(value))
    if not 0 < len(set(items)) == len(items):
        raise ValueError("empty, or an item is given twice")
    return items


def _read_address(value: Any) -> Any:
    """Read `host:port` or `[IPv6 address]:port`."""
    if not isinstance(value, str):
        return value
    parts = urlsplit(f"//{value}")
    host, port = parts.hostname or "", parts.port
    if port is None or parts.netloc != value:
        raise ValueError("no port")
    if not (_is_ip(host) if "[" in value else re.fullmatch(r"[a-z0-9.-]+", host)):
        raise ValueError("no host")
    return Address(host, port)


def _read_dns_server(value: Any) -> Any:
    """Read the address of a DNS server. The port may be missing."""
    bare = isinstance(value, str) and _is_ip(value.strip("[]"))
    address = Address(value.strip("[]"), 53) if bare else _read_address(value)
    if not (isinstance(address, Address) and _is_ip(address.host)):
        raise ValueError("a DNS server needs an IP address")
    return address


def _is_ip(text: str) -> bool:
    """Return True for an IP address. The zone of an IPv6 address may have letters, digits and ._~- only."""
    if not re.fullmatch(r"[0-9A-Fa-f.:]+(%[A-Za-z0-9._~-]+)?", text):
        return False
    try:
        ip_address(text)
    except ValueError:
        return False
    return True


def _check_url(value: str, *schemes: str) -> str:
    """Check a URL without user and fragment, and return it without the slash at its end."""
    parts = urlsplit(value)
    if parts.scheme not in schemes or not parts.hostname or parts.port == 0 or "@" in parts.netloc or parts.fragment:
        raise ValueError("not a URL of an allowed kind")
    if not value.isprintable() or " " in value:
        raise ValueError("not a URL")
    return value.rstrip("/")


def _check_relay(value: str, path: str = STREAM_PATH) -> str:
    """Return the URL of a relay or Jetstream for its stream: that of the host, with the scheme of a websocket.

    Other programs want the URL of the host (tap: `TAP_RELAY_URL`) or that of the stream (Jetstream:
    `JETSTREAM_WS_URL`), so both are accepted. XRPC has no other path: https://atproto.com/specs/xrpc.
    """
    url = _check_url(value.rstrip("/").removesuffix(path), "ws", "wss", "http", "https")
    if urlsplit(url).path or urlsplit(url).query:
        raise ValueError("not the URL of a host")
    return url.replace("http", "ws", 1) if url.startswith("http") else url


def _check_directory(value: str) -> str:
    """Check the URL of a PLC directory. A path may precede the DID, but not one that names an operation or a DID."""
    url = _check_url(value, "http", "https")
    last = urlsplit(url).path.rpartition("/")[2]
    if last == "export" or last.startswith("did:") or urlsplit(url).query:
        raise ValueError("not the URL of a directory")
    return url


def _check_webhook(value: SecretStr) -> SecretStr:
    """Check the URL of the webhook. Its path and query may contain a token, so it is a secret."""
    url = value.get_secret_value()
    _check_url(url, "http", "https")
    if not url.isascii():
        raise ValueError("not ASCII")
    return value


def _check_database_url(value: SecretStr) -> SecretStr:
    parts = urlsplit(value.get_secret_value())
    hosts = parts.netloc.rpartition("@")[2].split(",")
    ports = [re.fullmatch(r"(?:\[[^]]+\]|[^:]*)(?::([0-9]{1,5}))?", host) for host in hosts]
    if parts.scheme not in ("postgresql", "postgres") or not all(
        port and int(port[1] or 0) <= MAX_PORT for port in ports
    ):
        raise ValueError("not a Postgres URL")
    if "@" in parts.path or parts.fragment:
        raise ValueError("the password contains / or #, which must be escaped")
    return value


def _check_password(value: SecretStr) -> SecretStr:
    if not value.get_secret_value().isprintable():
        raise ValueError("not printable")
    return value


def _read_shard(value: Any) -> Any:
    match = re.fullmatch(r"(\d{1,4})/(\d{1,4})", value) if isinstance(value, str) else None
    return Shard(int(match[1]), int(match[2])) if match else value


def _read_collections(value: Any) -> Any:
    patterns = _split_list(value)
    strings = isinstance(patterns, list) and all(isinstance(pattern, str) for pattern in patterns)
    return CollectionFilter(patterns) if strings else value


def _check_pattern(value: str) -> str:
    CollectionFilter([value])  # raises an error that names it
    return value


T = TypeVar("T")
UniqueList = Annotated[tuple[T, ...], WrapValidator(_read_list)]

# The text at the end of a type describes the allowed values.
Whole = Annotated[int, Field(ge=1, le=_MAX_WHOLE), f"a whole number from 1 to {_MAX_WHOLE}"]
WholeOrOff = Annotated[int, Field(ge=0, le=_MAX_WHOLE), f"a whole number up to {_MAX_WHOLE}, or `0` for no limit"]
UpToThousand = Annotated[int, Field(ge=1, le=1_000), "a whole number from 1 to 1000"]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False), "a number above 0"]
RateOrOff = Annotated[float, Field(ge=0, allow_inf_nan=False), "a number, at least 0"]
Size = Annotated[
    int,
    BeforeValidator(_with_unit(_BYTES)),
    Field(ge=1, le=_MAX_BYTES),
    "a size from 1 byte to 1000000GB, such as 5000000, 5MB or 2GiB",
]
Seconds = Annotated[
    float,
    BeforeValidator(_with_unit(_SECONDS)),
    Field(ge=0, le=_MAX_DAYS * 86_400, allow_inf_nan=False),
    f"a duration such as 90s, 15m, 24h or 7d, at most {_MAX_DAYS}d, or 0",
]
Duration = Annotated[Seconds, Field(gt=0), f"a duration above 0, such as 90s, 15m or 24h, at most {_MAX_DAYS}d"]
Switch = Annotated[bool, "true or false"]
Relays = Annotated[
    UniqueList[Annotated[str, AfterValidator(_check_relay)]],
    "a comma-separated list of wss://, ws://, https:// or http:// URLs of hosts; the path of the stream may follow",
]
Jetstreams = Annotated[
    UniqueList[Annotated[str, AfterValidator(lambda value: _check_relay(value, SUBSCRIBE_PATH))]],
    "a comma-separated list of wss://, ws://, https:// or http:// URLs of hosts",
]
Directories = Annotated[
    UniqueList[Annotated[str, AfterValidator(_check_directory)]],
    "a comma-separated list of http:// or https:// URLs to which a DID can be added, without user and query",
]
DnsServers = Annotated[
    tuple[Annotated[Address, BeforeValidator(_read_dns_server)], ...],
    BeforeValidator(_split_list),
    "a comma-separated list of IP addresses, each with or without a port",
]
Collections = Annotated[
    CollectionFilter,
    BeforeValidator(_read_collections),
    "a comma-separated list of NSIDs, each complete or ending in `.*`, or `*`",
]
Patterns = Annotated[
    tuple[Annotated[str, AfterValidator(_check_pattern)], ...],
    BeforeValidator(_split_list),
    "a comma-separated list of NSIDs, each complete or ending in `.*`",
]
Sources = Annotated[UniqueList[Literal["relay", "pds"]], "`relay`, `pds`, or both in a comma-separated list"]
Roles = Annotated[
    UniqueList[Literal["live", "resync", "feed"]],
    "`live`, `resync`, `feed`, or several in a comma-separated list",
]
DatabaseUrl = Annotated[SecretStr, AfterValidator(_check_database_url), "a postgresql:// URL"]
WebhookUrl = Annotated[SecretStr, AfterValidator(_check_webhook), "an http(s):// URL"]
Password = Annotated[SecretStr, AfterValidator(_check_password), "printable text"]
Contact = Annotated[str, Field(pattern=_CONTACT), "an http(s):// URL or an e-mail address"]
ShardOfAll = Annotated[Shard, BeforeValidator(_read_shard), f"i/n, with i below n and n at most {BUCKETS}"]
ListenAddress = Annotated[Address, BeforeValidator(_read_address), "host:port"]
