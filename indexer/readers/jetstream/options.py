"""The options of a Jetstream subscriber: parsed from the query of `/subscribe` and from `options_update` messages."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs

import orjson

from indexer.atproto.limits import max_items
from indexer.atproto.syntax import CollectionFilter, is_did
from indexer.db.change_log_reads import LoggedChange

MAX_COLLECTIONS = 100
MAX_DIDS = 10_000
MAX_ITEMS = 16_384
"""Maximum number of items in the JSON of a message. They are counted before it is decoded."""
_MAX_SIZE = (1 << 32) - 1
_SHOWN_CHARACTERS = 80


class BadOptionsError(ValueError):
    """The options of a subscriber are invalid; the message is one line for a person."""


@dataclass(frozen=True, slots=True)
class EventFilter:
    """Selects the events that a subscriber receives.

    Attributes:
        collections: The collections of commit events; None selects all. Other events have no collection.
        dids: The accounts; an empty set selects all.
        max_bytes: Events with longer JSON are left out; 0 means no limit.
        live_only: Leave out differences that a resync found.
    """

    collections: CollectionFilter | None = None
    dids: frozenset[str] = frozenset()
    max_bytes: int = 0
    live_only: bool = False

    def selects(self, change: LoggedChange) -> bool:
        """Return True if the event of a change is sent, unless it is too long."""
        return (
            (not self.dids or change.did in self.dids)
            and (self.collections is None or change.collection is None or self.collections.matches(change.collection))
            and (change.live or not self.live_only)
        )

    @property
    def selects_all(self) -> bool:
        """True if no event is left out."""
        return self == ALL_EVENTS


ALL_EVENTS = EventFilter()


@dataclass(frozen=True, slots=True)
class SubscriberOptions:
    """The options of one connection.

    Attributes:
        events: The events to send. A message can replace this filter.
        cursor: Replay the events from this time on, in microseconds since the Unix epoch; None: only new events. A time
            after the newest event selects only new events, too. No clock is asked whether it is in the future: the
            times of events are those of the database's clock, which may be ahead, or may have been ahead.
        compress: Send binary messages, compressed with Jetstream's zstd dictionary.
        require_hello: Send nothing before the first valid `options_update` message.
    """

    events: EventFilter
    cursor: int | None
    compress: bool
    require_hello: bool


def parse_query(query: str, socket_encoding: str) -> SubscriberOptions:
    """Return the options in the query of the URL, and in the header `Socket-Encoding`; raise `BadOptionsError`."""
    parameters = parse_qs(query, keep_blank_values=True)

    def first(name: str) -> str:
        return parameters.get(name, [""])[0]

    events = _event_filter(
        parameters.get("wantedCollections", ()),
        parameters.get("wantedDids", ()),
        _parse_size(first("maxMessageSizeBytes")),
        live_only=first("live") == "true",
    )
    return SubscriberOptions(
        events=events,
        cursor=_parse_cursor(first("cursor")),
        compress=first("compress") == "true" or "zstd" in socket_encoding,
        require_hello=first("requireHello") == "true",
    )


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
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdecimal() and len(digits) < _SHOWN_CHARACTERS):
        raise BadOptionsError(f"invalid cursor: {text[:_SHOWN_CHARACTERS]!r} is not a time in microseconds")
    return int(text)


def _parse_size(text: str) -> int:
    """Return the size; 0 for anything else, as Jetstream does."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < _SHOWN_CHARACTERS else 0


def _texts(payload: Mapping[str, Any], name: str) -> Sequence[str]:
    values = payload.get(name)
    if values is None:
        return ()
    if not (isinstance(values, list) and all(isinstance(value, str) for value in values)):
        raise BadOptionsError(f"{name} is not a list of strings")
    return values


def _event_filter(collections: Sequence[str], dids: Sequence[str], max_bytes: int, *, live_only: bool) -> EventFilter:
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
