"""Queries and messages of Jetstream subscribers."""

import json
from dataclasses import replace
from random import Random
from urllib.parse import urlencode

from indexer.readers.jetstream.events import ALL_EVENTS, EventFilter
from indexer.readers.jetstream.options import (
    MAX_COLLECTIONS,
    MAX_DIDS,
    BadOptionsError,
    parse_message,
    parse_query,
    parse_v2_query,
)
from tests.fuzz import syntax_reference as reference
from tests.fuzz.comparison import DifferenceError
from tests.fuzz.examples import DID, NSID
from tests.fuzz.fuzz_target import FuzzTarget, MutateBytes, TextTarget, text_of
from tests.fuzz.json_mutation import mutate_json
from tests.fuzz.outcome_counts import OutcomeCounts

MAX_SIZE = 2**32 - 1


class SubscriberQueries(TextTarget):
    """Queries of both wires, after a line with the header `Socket-Encoding`: options that can be repeated."""

    def __init__(self) -> None:
        self.counts = OutcomeCounts("refused", "all events", "with a filter", "with a cursor", "compressed")

    def seeds(self, random: Random, count: int) -> list[bytes]:
        """Return queries of up to four parameters."""
        parameters = [
            ("wantedCollections", NSID),
            ("wantedCollections", "app.bsky.*"),
            ("wantedCollections", "no pattern"),
            ("wantedDids", DID),
            ("wantedDids", "did:web:a.b"),
            ("maxMessageSizeBytes", "1000"),
            ("maxMessageSizeBytes", "-1"),
            ("cursor", "1725911162329308"),
            ("cursor", "-1"),
            ("cursor", "9" * 40),
            ("collections", NSID),
            ("kinds", "commit"),
            ("dids", DID),
            ("compress", "true"),
            ("requireHello", "true"),
            ("live", "true"),
            ("other", "é"),
        ]
        lines = ("", "zstd", "gzip")
        return [
            f"{lines[n % 3]}\n{urlencode(random.sample(parameters, random.randrange(5)))}".encode()
            for n in range(count)
        ]

    def compare(self, data: bytes) -> None:
        """Parse a query. Raises `DifferenceError`."""
        self.counts.executions += 1
        encoding, _, query = text_of(data).partition("\n")
        try:
            _check_filter(parse_v2_query(query, encoding).events)
        except BadOptionsError as error:
            _check_message(error)
        try:
            options = parse_query(query, encoding)
        except BadOptionsError as error:
            _check_message(error)
            self.counts.add("refused")
            return
        _check_filter(options.events)
        again = [
            *_parameters(options.events),
            ("cursor", "" if options.cursor is None else f"{options.cursor}"),
            ("compress", f"{options.compress}".lower()),
            ("requireHello", f"{options.require_hello}".lower()),
            ("live", f"{options.events.live_only}".lower()),
        ]
        repeated = parse_query(urlencode(again), "")
        if (
            _described(repeated.events) != _described(options.events)
            or replace(repeated, events=options.events) != options
        ):
            raise DifferenceError(f"{options} becomes {repeated}")
        self.counts.add("all events" if options.events.selects_all else "with a filter")
        self.counts.add("with a cursor", options.cursor is not None)
        self.counts.add("compressed", options.compress)


class SubscriberMessages(FuzzTarget):
    """Messages of subscribers: a filter that is the same when its message is sent again, or one line of explanation."""

    def __init__(self) -> None:
        self.counts = OutcomeCounts("refused", "of another type", "all events", "with a filter")

    def seeds(self, _: Random, count: int) -> list[bytes]:
        """Return messages with options of all kinds."""
        payloads: list[object] = [
            {},
            {"wantedCollections": [NSID, "app.bsky.*"], "wantedDids": [DID], "maxMessageSizeBytes": 1_000},
            {"wantedCollections": None, "maxMessageSizeBytes": -1},
            {"wantedDids": ["did:web:a.b"] * 3},
            {"wantedCollections": ["no pattern"]},
            [],
        ]
        made: list[object] = [{"type": "options_update", "payload": payload} for payload in payloads]
        made += [{"type": "other"}, []]
        return [json.dumps(made[number % len(made)]).encode() for number in range(count)]

    def mutate(self, data: bytes, random: Random, mutate_bytes: MutateBytes) -> bytes:
        """Return mutated JSON."""
        return mutate_json(data, random, mutate_bytes)

    def compare(self, data: bytes) -> None:
        """Parse a message. Raises `DifferenceError`."""
        self.counts.executions += 1
        before = replace(ALL_EVENTS, live_only=len(data) % 2 == 0)
        try:
            found = parse_message(data, before)
        except BadOptionsError as error:
            _check_message(error)
            self.counts.add("refused")
            return
        if found is None:
            self.counts.add("of another type")
            return
        _check_filter(found)
        payload = {
            "wantedCollections": list(found.collections.patterns) if found.collections else None,
            "wantedDids": sorted(found.dids),
            "maxMessageSizeBytes": found.max_bytes,
        }
        again = parse_message(json.dumps({"type": "options_update", "payload": payload}).encode(), before)
        if again is None or _described(again) != _described(found):
            raise DifferenceError(f"{found} becomes {again}")
        self.counts.add("all events" if found == before else "with a filter")


def _check_message(error: BadOptionsError) -> None:
    """Raise `DifferenceError` unless the message is one short line. It may quote 80 characters, each as up to 10."""
    if len(f"{error}") > 1_000 or not f"{error}".isprintable():
        raise DifferenceError(f"a message of {len(f'{error}')} characters") from error


def _check_filter(found: EventFilter) -> None:
    """Raise `DifferenceError` unless the filter is within the limits, with valid patterns and DIDs."""
    patterns = found.collections.patterns if found.collections else ()
    valid = all(map(reference.is_pattern, patterns)) and all(map(reference.is_did, found.dids))
    if not valid or len(patterns) > MAX_COLLECTIONS or len(found.dids) > MAX_DIDS:
        raise DifferenceError(f"a filter with {patterns} and {found.dids}")
    if not 0 <= found.max_bytes <= MAX_SIZE:
        raise DifferenceError(f"at most {found.max_bytes} bytes")


def _described(events: EventFilter) -> tuple[tuple[str, ...], frozenset[str], int, bool]:
    """Return the parts of a filter, which can be compared."""
    return events.collections.patterns if events.collections else (), events.dids, events.max_bytes, events.live_only


def _parameters(events: EventFilter) -> list[tuple[str, str]]:
    """Return the parameters of a query for a filter."""
    patterns, dids, max_bytes, _ = _described(events)
    return [
        *(("wantedCollections", pattern) for pattern in patterns),
        *(("wantedDids", did) for did in sorted(dids)),
        ("maxMessageSizeBytes", f"{max_bytes}"),
    ]
