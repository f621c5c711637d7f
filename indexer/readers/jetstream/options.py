"""The options of a Jetstream subscriber, of both versions: what its URL and its messages ask for."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import parse_qs

import orjson

from indexer.atproto.limits import max_items
from indexer.atproto.syntax import CollectionFilter, is_did
from indexer.readers.events import Kind
from indexer.readers.jetstream.events import EventFilter, Wire, dictionary, v1_message, v2_message

MAX_COLLECTIONS = 100
MAX_DIDS = 10_000
MAX_ITEMS = 16_384
"""Maximum number of items in the JSON of a message. They are counted before it is decoded."""
_MAX_SIZE = (1 << 32) - 1
_MAX_CURSOR = (1 << 63) - 1
_SHOWN_CHARACTERS = 80
_MIN_DOTS = 2  # in an NSID
BAD_REQUEST = "InvalidRequest"
_KINDS = frozenset[Kind]({"commit", "identity", "account", "sync"})
_OF_V1 = ("wantedDids", "wantedCollections", "requireHello")


class BadOptionsError(ValueError):
    """The options of a subscriber are invalid; the message is one line for a person, `name` the error of XRPC."""

    def __init__(self, message: str, name: str = BAD_REQUEST) -> None:
        super().__init__(message)
        self.name = name


@dataclass(frozen=True, slots=True)
class SubscriberOptions:
    """The options of one connection.

    Attributes:
        events: The events to send. A message can replace this filter.
        cursor: Replay the events from this number or time on (`log_reading.FIRST_TIME`); None: only new events. One
            after the newest event selects only new events, too. No clock is asked whether it is in the future: the
            times of events are those of the database's clock, which may be ahead, or may have been ahead.
        compress: Send binary messages, compressed with Jetstream's zstd dictionary.
        require_hello: Send nothing before the first valid `options_update` message.
    """

    events: EventFilter
    cursor: int | None
    compress: bool
    require_hello: bool = False
    wire: Wire = v1_message

    @property
    def is_v2(self) -> bool:
        """True for the second version of the stream."""
        return self.wire is v2_message


def parse_query(query: str, socket_encoding: str) -> SubscriberOptions:
    """Return the options in the query of the URL, and in the header `Socket-Encoding`; raise `BadOptionsError`."""
    parameters = parse_qs(query, keep_blank_values=True)

    def first(name: str) -> str:
        return parameters.get(name, [""])[0]

    events = _event_filter(
        parameters.get("wantedCollections", ()),
        parameters.get("wantedDids", ()),
        _decimal(first("maxMessageSizeBytes")) or 0,  # 0 for anything else, as Jetstream does
        live_only=first("live") == "true",
    )
    return SubscriberOptions(
        events=events,
        cursor=_parse_cursor(first("cursor")),
        compress=first("compress") == "true" or "zstd" in socket_encoding,
        require_hello=first("requireHello") == "true",
    )


def parse_v2_query(query: str, socket_encoding: str) -> SubscriberOptions:
    """Return the options in the query of a URL of the second version; raise `BadOptionsError`."""
    parameters = parse_qs(query, keep_blank_values=True)
    if of_v1 := next((name for name in _OF_V1 if name in parameters), None):
        raise BadOptionsError(f"{of_v1} is a parameter of /subscribe only")
    if "true" in parameters.get("compress", ()) or "zstd" in socket_encoding:
        raise BadOptionsError("this stream is compressed only with zstdDictionary")
    names, collections, dids = (parameters.get(name, []) for name in ("kinds", "collections", "dids"))
    if len(names) > len(_KINDS) or not _KINDS.issuperset(names):
        raise BadOptionsError(f"each of kinds is one of {', '.join(sorted(_KINDS))}; at most {len(_KINDS)} are allowed")
    events = _event_filter(collections, dids, _parse_number(parameters, "maxMessageSizeBytes", _MAX_SIZE) or 0)
    if names:
        events = replace(events, kinds=_KINDS.intersection(names))
    if len(collections) > MAX_COLLECTIONS or len(dids) > MAX_DIDS:
        raise BadOptionsError(f"more than {MAX_COLLECTIONS} collections, or {MAX_DIDS} DIDs")
    if collections and "commit" not in events.kinds:
        raise BadOptionsError("collections select only commits, but kinds does not name commit")
    if invalid := next((text for text in collections if "*" in text and text.count(".") < _MIN_DOTS), None):
        raise BadOptionsError(f"invalid collection: {invalid[:_SHOWN_CHARACTERS]!r}")
    chosen, current = _parse_number(parameters, "zstdDictionary", _MAX_SIZE), dictionary().dict_id
    if chosen not in {None, current}:
        raise BadOptionsError(f"the dictionary is {current}", "UnknownZstdDictionary")
    cursor = _parse_number(parameters, "cursor", _MAX_CURSOR)
    return SubscriberOptions(events, cursor, compress=chosen is not None, wire=v2_message)


def _parse_number(parameters: Mapping[str, Sequence[str]], name: str, maximum: int) -> int | None:
    """Return a number from 0 to `maximum`; None without the parameter."""
    if (values := parameters.get(name)) is None:
        return None
    text = ", ".join(values)
    if (number := _decimal(text)) is None or number > maximum:
        raise BadOptionsError(f"{name} is not one integer from 0 to {maximum}: {text[:_SHOWN_CHARACTERS]!r}")
    return number


def _decimal(text: str) -> int | None:
    """Return a number of less than `_SHOWN_CHARACTERS` digits; None for any other text."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < _SHOWN_CHARACTERS else None


def parse_message(text: bytes, before: EventFilter) -> EventFilter | None:
    """Return the filter that a message of the subscriber asks for; None if the message has another type.

    An `options_update` replaces the collections, the DIDs and the size limit of `before`, also by their absence.

    Raises:
        BadOptionsError: The message has too many items or is not JSON, or its options are invalid.
    """
    if max_items(text) > MAX_ITEMS:
        raise BadOptionsError(f"the message has more than {MAX_ITEMS} items")
    try:
        message = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise BadOptionsError(f"the message is not JSON: {error}") from None
    if not isinstance(message, dict):
        raise BadOptionsError("the message is not a JSON object")
    if message.get("type") != "options_update":
        return None
    payload = message.get("payload")
    if not isinstance(payload, dict):
        raise BadOptionsError("the payload of options_update is not a JSON object")
    size = payload.get("maxMessageSizeBytes", 0)
    if type(size) is not int:
        raise BadOptionsError("maxMessageSizeBytes is not an integer")
    return _event_filter(
        _texts(payload, "wantedCollections"), _texts(payload, "wantedDids"), size, live_only=before.live_only
    )


def _parse_cursor(text: str) -> int | None:
    if not text:
        return None
    if _decimal(text.removeprefix("-")) is None:
        raise BadOptionsError(f"invalid cursor: {text[:_SHOWN_CHARACTERS]!r} is not a time in microseconds")
    return int(text)


def _texts(payload: Mapping[str, Any], name: str) -> Sequence[str]:
    values = payload.get(name)
    if values is None:
        return ()
    if not (isinstance(values, list) and all(isinstance(value, str) for value in values)):
        raise BadOptionsError(f"{name} is not a list of strings")
    return values


def _event_filter(
    collections: Sequence[str], dids: Sequence[str], max_bytes: int, *, live_only: bool = False
) -> EventFilter:
    patterns, accounts = dict.fromkeys(collections), frozenset(dids)
    if len(patterns) > MAX_COLLECTIONS:
        raise BadOptionsError(f"too many wanted collections: {len(patterns)}; at most {MAX_COLLECTIONS} are allowed")
    if len(accounts) > MAX_DIDS:
        raise BadOptionsError(f"too many wanted DIDs: {len(accounts)}; at most {MAX_DIDS} are allowed")
    try:
        wanted = CollectionFilter(patterns) if patterns else None
    except ValueError as error:
        raise BadOptionsError(f"invalid collection: {str(error)[: 2 * _SHOWN_CHARACTERS]}") from None
    invalid = next((did for did in dids if not is_did(did)), None)
    if invalid is not None:
        raise BadOptionsError(f"invalid DID: {invalid[:_SHOWN_CHARACTERS]!r}")
    return EventFilter(wanted, accounts, min(max(max_bytes, 0), _MAX_SIZE), live_only)
