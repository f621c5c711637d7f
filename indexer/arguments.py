"""The arguments of the command line that the protocol has names for, checked before anything is opened."""

from collections.abc import Callable, Iterator
from typing import IO, TypeVar
from urllib.parse import urlsplit

import click

from indexer.atproto.crypto import PublicKey, parse_did_key
from indexer.atproto.syntax import AtUri, is_did, is_handle, is_nsid, normalize_nsid
from indexer.errors import UpstreamError
from indexer.reasons import Rejection

STDIN = "-"
_SHOWN = 80

T = TypeVar("T")


class Checked(click.ParamType[T]):
    """What `parse` understands; it refuses with a ValueError that says why."""

    def __init__(self, name: str, parse: Callable[[str], T]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: str | T, param: click.Parameter | None, ctx: click.Context | None) -> T:
        if not isinstance(value, str):
            return value
        try:
            return self._parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def parse_did(text: str) -> str:
    if not is_did(text):
        raise ValueError(f"{text[:_SHOWN]!r} is not a DID")
    return text


def parse_account(text: str) -> str:
    """A DID, or a handle, in lower case and without an @ before it."""
    handle = text.removeprefix("@").lower()
    if not (is_did(text) or is_handle(handle)):
        raise ValueError(f"{text[:_SHOWN]!r} is neither a DID nor a handle")
    return text if is_did(text) else handle


def parse_record_uri(text: str) -> AtUri:
    uri = AtUri.parse(text).normalized()
    if uri.rkey is None:
        raise ValueError(f"{text[:_SHOWN]!r} names no record: at://DID-or-handle/collection/rkey")
    return uri


def parse_nsid(text: str) -> str:
    nsid = normalize_nsid(text) if is_nsid(text) else ""
    if not nsid:
        raise ValueError(f"{text[:_SHOWN]!r} is not an NSID")
    return nsid


def parse_key(text: str) -> PublicKey:
    try:
        return parse_did_key(text)
    except UpstreamError as error:
        raise ValueError(f"not a did:key of the protocol: {error.detail}") from None


def parse_origin(text: str) -> str:
    """The base URL of a host, which may be written as that of its stream."""
    try:
        parts = urlsplit(text)
        scheme = {"ws": "http", "wss": "https"}.get(parts.scheme, parts.scheme)
        known = scheme in {"http", "https"} and parts.hostname and parts.port != 0
    except ValueError:
        known = False
    if not known or parts.path.strip("/") or parts.query or parts.fragment:
        raise ValueError(f"{text[:_SHOWN]!r} is not the URL of a host")
    return f"{scheme}://{parts.netloc}"


def parse_reason(text: str) -> Rejection:
    reason = next((reason for reason in Rejection if reason == text), None)
    if reason is None:
        raise ValueError(f"{text[:_SHOWN]!r} is none of {', '.join(Rejection)}")
    return reason


DID = Checked("did", parse_did)
DID_OR_STDIN = Checked("did", lambda text: text if text == STDIN else parse_did(text))
ACCOUNT = Checked("account", parse_account)
RECORD_URI = Checked("uri", parse_record_uri)
KEY = Checked("key", parse_key)
NSID = Checked("nsid", parse_nsid)
ORIGIN = Checked("url", parse_origin)
REASON = Checked("reason", parse_reason)
LETTER = click.IntRange(1, 2**63 - 1)


def dids_of(file: IO[str]) -> Iterator[str]:
    """One a line; empty lines and lines that begin with # are left out. Raises `click.BadParameter`."""
    for number, line in enumerate(file, 1):
        text = line.strip()
        if text and not text.startswith("#"):
            if not is_did(text):
                where = f"{text[:_SHOWN]!r} on line {number} of {file.name}"
                raise click.BadParameter(f"{where} is not a DID; those before it may have been added")
            yield text
