"""Types of command line arguments, checked before a command opens anything."""

import re
from collections.abc import Callable, Iterator
from typing import IO, Literal
from urllib.parse import urlsplit

import click

from indexer.atproto.crypto import PublicKey, parse_did_key
from indexer.atproto.syntax import AtUri, is_account_did, is_did, is_nsid, normalize_account, normalize_nsid
from indexer.errors import UpstreamError
from indexer.net.relay.stream_socket import STREAM_PATH
from indexer.sync.events import MAX_SEQ

STDIN = "-"
_MAX_SHOWN = 80
_MAX_FIRST_PORT = 65_000
"""The following ports are used, too."""


def wrong(text: str, why: str) -> click.BadParameter:
    """Return the error of an argument; `why` says what it is not."""
    return click.BadParameter(f"{text[:_MAX_SHOWN]!r} {why}")


def _parser(read: Callable[[str], str | None], why: str) -> Callable[[str], str]:
    """Return a function that reads a text, and raises `BadParameter` with `why` if the result of `read` is None."""

    def parse(text: str) -> str:
        value = read(text)
        if value is None:
            raise wrong(text, why)
        return value

    return parse


parse_did = _parser(lambda text: text if is_did(text) else None, "is not a DID")
parse_new_did = _parser(
    lambda text: text if is_account_did(text) else None,
    "is not the DID of an account: did:plc: with 24 characters of a-z and 2-7, or did:web: with a host name",
)
"""Returns a DID that an account can have. One that is tracked already may be any DID."""
parse_account = _parser(normalize_account, "is neither a DID nor a handle")
"""Returns a DID, or a handle in lower case and without a leading @."""
parse_nsid = _parser(lambda text: normalize_nsid(text) if is_nsid(text) else None, "is not an NSID")
"""Returns the normalized NSID."""


def parse_record_uri(text: str) -> AtUri:
    """Return the URI of a record; raise `BadParameter` for anything else."""
    try:
        uri = AtUri.parse(text).normalized()
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    if uri.rkey is None:
        raise wrong(text, "is not the URI of a record: at://DID-or-handle/collection/rkey")
    return uri


Target = tuple[str | None, str | None, str | None]
"""DID or handle, collection and record key of a record; the first of an account; the second of a collection."""


def parse_target(text: str) -> Target:
    """Return the target of `redact` and `takedown`; raise `BadParameter` for anything else."""
    if is_did(text):
        return text, None, None
    if is_nsid(text):
        return None, text, None
    try:
        uri = AtUri.parse(text)  # paths are compared byte by byte, so it is not normalized
    except ValueError:
        uri = AtUri("")
    if uri.rkey is None:
        raise wrong(text, "is neither at://DID-or-handle/collection/rkey, nor a DID, nor the NSID of a collection")
    return uri.authority, uri.collection, uri.rkey


def parse_key(text: str) -> PublicKey:
    """Return the public key of a did:key; raise `BadParameter` if the protocol does not allow it."""
    try:
        return parse_did_key(text)
    except UpstreamError as error:
        raise click.BadParameter(f"not a did:key that the protocol allows: {error.detail}") from None


def parse_origin(text: str) -> str:
    """Return the HTTP base URL of a host from that URL or the URL of its stream; raise `BadParameter` otherwise."""
    try:
        parts = urlsplit(text.rstrip("/").removesuffix(STREAM_PATH))
        scheme = {"ws": "http", "wss": "https"}.get(parts.scheme, parts.scheme)
        known = scheme in {"http", "https"} and parts.hostname and parts.port != 0
    except ValueError:
        known = False
    if not known or parts.path.strip("/") or parts.query or parts.fragment:
        raise wrong(text, "is not the URL of a host")
    return f"{scheme}://{parts.netloc}"


def parse_listen_address(text: str) -> tuple[str, int]:
    """Return the host and the port of `HOST:PORT`; raise `BadParameter` if the text is not an address to listen on."""
    match = re.fullmatch(r"([A-Za-z0-9.-]+):([0-9]{1,5})", text)
    if match is None or not 0 < int(match[2]) <= _MAX_FIRST_PORT:
        raise wrong(text, f"is not HOST:PORT, with a port from 1 to {_MAX_FIRST_PORT}")
    return match[1], int(match[2])


def parse_position(text: str) -> Literal["live", "oldest"] | int:
    """Return a position in the stream of a relay; raise `BadParameter` if the text is not one."""
    if text == "live":
        return "live"
    if text == "oldest":
        return "oldest"
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(MAX_SEQ))) or int(text) > MAX_SEQ:
        raise wrong(text, "is not a sequence number, live or oldest")
    return int(text)


def given_dids(dids: tuple[str, ...], file: IO[str] | None, parse: Callable[[str], str]) -> Iterator[str]:
    """Return the DIDs of the arguments, of a file, or of standard input for the argument `-`.

    A file has one DID per line. Empty lines and lines that start with # are skipped. `parse` raises `BadParameter` for
    a text that is not a DID of the wanted kind.

    Raises:
        UsageError: There are arguments and a file, or neither.
        BadParameter: An argument is not a DID; or a line, when it is read.
    """
    if (file is None) != bool(dids) or (STDIN in dids and len(dids) > 1):
        raise click.UsageError("Give DIDs, or --file, or -.")
    if STDIN in dids:
        file = click.open_file(STDIN, errors="replace")
    try:
        return iter([parse(did) for did in dids]) if file is None else _read_dids(file, parse)
    except click.BadParameter as error:
        raise click.BadParameter(error.message, param_hint="'DID…|-'") from None


def _read_dids(file: IO[str], parse: Callable[[str], str]) -> Iterator[str]:
    for number, line in enumerate(file, 1):
        text = line.strip()
        if text and not text.startswith("#"):
            try:
                yield parse(text)
            except click.BadParameter as error:
                where = f"line {number} of {file.name}"
                raise click.BadParameter(f"{where}: {error.message}; earlier lines may have been read") from None
