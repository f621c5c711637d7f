"""Types of settings: read a value from its text, check it, and describe the allowed values in words."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr

from indexer.atproto.syntax import CollectionFilter
from indexer.net.relay.subscription import STREAM_PATH
from indexer.net.server.address import Address
from indexer.sync.shard import BUCKETS, Shard


@dataclass(frozen=True, slots=True)
class AllowedValues:
    """The allowed values of a setting, in words."""

    text: str


def reject_bool(value: Any) -> Any:
    """Reject `true` of TOML, which Python would accept as the number 1."""
    if isinstance(value, bool):
        raise ValueError("a truth value")  # noqa: TRY004 - pydantic collects ValueError
    return value


def split_list(value: Any) -> Any:
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


def _read_address(value: Any, default_port: int | None = None) -> Any:
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
    """Return True for an IP address. The zone of an IPv6 address may have letters, digits and ._~- only."""
    if not re.fullmatch(r"[0-9A-Fa-f.:]+(%[A-Za-z0-9._~-]+)?", text):
        return False
    try:
        ip_address(text)
    except ValueError:
        return False
    return True


def _read_dns_server(value: Any) -> Any:
    address = _read_address(value, default_port=53)
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


def _read_relay(value: str) -> str:
    """Return the URL of a relay for its stream: that of the host, with the scheme of a websocket.

    Other programs want the URL of the host (tap: `TAP_RELAY_URL`) or that of the stream (Jetstream:
    `JETSTREAM_WS_URL`), so both are accepted. XRPC has no other path: https://atproto.com/specs/xrpc.
    """
    url = _url("ws", "wss", "http", "https")(value.rstrip("/").removesuffix(STREAM_PATH))
    if urlsplit(url).path:
        raise ValueError("not the URL of a host")
    return url.replace("http", "ws", 1) if url.startswith("http") else url


def _check_directory(value: str) -> str:
    """Check the URL of a PLC directory. A path may precede the DID, but not one that names an operation or a DID."""
    url = _url("http", "https")(value)
    last = urlsplit(url).path.rpartition("/")[2]
    if last == "export" or last.startswith("did:"):
        raise ValueError("not the URL of a directory")
    return url


def _check_contact(value: str) -> str:
    """Check a contact. It becomes part of the comment of a header, so spaces and parentheses are invalid."""
    if not re.fullmatch(
        r"(https?://[!-'*-?A-~]{1,200})|((mailto:)?[!-'*-.0-9;-?A-~]{1,100}@[0-9A-Za-z.-]{1,100})", value
    ):
        raise ValueError("not a contact")
    return value


def _check_database_url(value: SecretStr) -> SecretStr:
    parts = urlsplit(value.get_secret_value())
    hosts = [_HOST_AND_PORT(host) for host in parts.netloc.rpartition("@")[2].split(",")]
    if parts.scheme not in ("postgresql", "postgres") or not all(
        host and int(host[2] or 0) <= _PORTS for host in hosts
    ):
        raise ValueError("not a Postgres URL")
    if "@" in parts.path or parts.fragment:
        raise ValueError("the password contains / or #, which must be escaped")
    return value


_HOST_AND_PORT = re.compile(r"(\[[^]]+\]|[^:]*)(?::([0-9]{1,5}))?").fullmatch


def _check_webhook_url(value: SecretStr) -> SecretStr:
    """Check the URL of the webhook. Its path and query may contain a token, so it is a secret."""
    url = value.get_secret_value()
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0 or "@" in parts.netloc:
        raise ValueError("not a URL of an allowed kind")
    if parts.fragment or not url.isascii() or not url.isprintable() or " " in url:
        raise ValueError("not a URL of an endpoint")
    return value


def _check_password(value: SecretStr) -> SecretStr:
    if not value.get_secret_value().isprintable():
        raise ValueError("not printable")
    return value


def _read_shard(value: Any) -> Any:
    match = re.fullmatch(r"(\d{1,4})/(\d{1,4})", value) if isinstance(value, str) else None
    return Shard(int(match[1]), int(match[2])) if match else value


def _read_collections(value: Any) -> Any:
    patterns = split_list(value)
    strings = isinstance(patterns, list) and all(isinstance(pattern, str) for pattern in patterns)
    return CollectionFilter(patterns) if strings else value


def _check_pattern(value: str) -> str:
    CollectionFilter([value])  # raises an error that names it
    return value


def check_duplicates(items: tuple[str, ...]) -> tuple[str, ...]:
    """Reject a list that contains a text twice."""
    if len(set(items)) < len(items):
        raise ValueError("given twice")
    return items


# The native core holds sizes and counts in 64 bits on 64-bit platforms, and all of these are far below.
_MAX_WHOLE = 10**9
_MAX_BYTES = 10**15
_MAX_DAYS = 36_500
"""A hundred years. The times that the program computes with durations must be ones that Postgres can store."""

Whole = Annotated[
    int,
    BeforeValidator(reject_bool),
    Field(ge=1, le=_MAX_WHOLE),
    AllowedValues(f"a whole number from 1 to {_MAX_WHOLE}"),
]
Rate = Annotated[
    float, BeforeValidator(reject_bool), Field(gt=0, allow_inf_nan=False), AllowedValues("a number above 0")
]
RateOrOff = Annotated[
    float, BeforeValidator(reject_bool), Field(ge=0, allow_inf_nan=False), AllowedValues("a number, at least 0")
]
Size = Annotated[
    int,
    BeforeValidator(_number_with_unit(_BYTES)),
    BeforeValidator(reject_bool),
    Field(ge=1, le=_MAX_BYTES),
    AllowedValues("a size from 1 byte to 1000000GB, such as 5000000, 5MB or 2GiB"),
]
Seconds = Annotated[
    float,
    BeforeValidator(_number_with_unit(_SECONDS)),
    BeforeValidator(reject_bool),
    Field(ge=0, le=_MAX_DAYS * 86_400, allow_inf_nan=False),
    AllowedValues(f"a duration such as 90s, 15m, 24h or 7d, at most {_MAX_DAYS}d, or 0"),
]
Duration = Annotated[
    float,
    BeforeValidator(_number_with_unit(_SECONDS)),
    BeforeValidator(reject_bool),
    Field(gt=0, le=_MAX_DAYS * 86_400, allow_inf_nan=False),
    AllowedValues(f"a duration above 0, such as 90s, 15m or 24h, at most {_MAX_DAYS}d"),
]
Switch = Annotated[bool, AllowedValues("true or false")]
Relays = Annotated[
    tuple[Annotated[str, AfterValidator(_read_relay)], ...],
    BeforeValidator(split_list),
    AfterValidator(check_duplicates),
    Field(min_length=1),
    AllowedValues(
        "a comma-separated list of wss://, ws://, https:// or http:// URLs of hosts; the path of the stream may follow"
    ),
]
Directories = Annotated[
    tuple[Annotated[str, AfterValidator(_check_directory)], ...],
    BeforeValidator(split_list),
    AfterValidator(check_duplicates),
    Field(min_length=1),
    AllowedValues(
        "a comma-separated list of http:// or https:// URLs to which a DID can be added, without user and query"
    ),
]
DatabaseUrl = Annotated[SecretStr, AfterValidator(_check_database_url), AllowedValues("a postgresql:// URL")]
WebhookUrl = Annotated[SecretStr, AfterValidator(_check_webhook_url), AllowedValues("an http(s):// URL")]
Password = Annotated[SecretStr, AfterValidator(_check_password), AllowedValues("printable text")]
Contact = Annotated[str, AfterValidator(_check_contact), AllowedValues("an http(s):// URL or an e-mail address")]
BindAddress = Annotated[Address, BeforeValidator(_read_address), AllowedValues("host:port")]
DnsServers = Annotated[
    tuple[Annotated[Address, BeforeValidator(_read_dns_server)], ...],
    BeforeValidator(split_list),
    AllowedValues("a comma-separated list of IP addresses, each with or without a port"),
]
OwnShard = Annotated[Shard, BeforeValidator(_read_shard), AllowedValues(f"i/n, with i below n and n at most {BUCKETS}")]
Collections = Annotated[
    CollectionFilter,
    BeforeValidator(_read_collections),
    AllowedValues("a comma-separated list of NSIDs, each complete or ending in `.*`, or `*`"),
]
Patterns = Annotated[
    tuple[Annotated[str, AfterValidator(_check_pattern)], ...],
    BeforeValidator(split_list),
    AllowedValues("a comma-separated list of NSIDs, each complete or ending in `.*`"),
]
