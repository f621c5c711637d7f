"""Queries and messages of Jetstream subscribers, acknowledgements of tap clients, and credentials."""

import asyncio
import json
from base64 import b64decode, b64encode
from collections.abc import Mapping
from dataclasses import replace
from random import Random
from typing import Any, NamedTuple
from urllib.parse import urlencode

from aiohttp import web

from indexer.db.change_log_reads import LoggedChange
from indexer.db.tap_feed import DeliveryProgress
from indexer.readers.access import Access
from indexer.readers.jetstream.events import ALL_EVENTS, EventFilter
from indexer.readers.jetstream.options import (
    MAX_COLLECTIONS,
    MAX_DIDS,
    BadOptionsError,
    parse_message,
    parse_query,
    parse_v2_query,
)
from indexer.readers.tap.channel import acknowledged_seq
from indexer.readers.tap.delivery_window import DeliveryWindow
from tests.fuzz import syntax_reference as reference
from tests.fuzz.comparison import DifferenceError
from tests.fuzz.examples import DID, NSID
from tests.fuzz.fuzz_target import FuzzTarget, MutateBytes, TextTarget, text_of
from tests.fuzz.json_mutation import mutate_json
from tests.fuzz.outcome_counts import OutcomeCounts

MAX_SIZE = 2**32 - 1
CHANGES = 12
PASSWORD = "pässword:x"


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


class Acknowledgements(TextTarget):
    """Messages of a client of tap, one in each line: each change is delivered until it is acknowledged, and in order.

    Before each message, the client takes up to three changes of three repos. An empty message stands for a lost
    connection.
    """

    def __init__(self) -> None:
        self.counts = OutcomeCounts("acknowledged", "without effect", "lost connections", "delivered again")

    def seeds(self, random: Random, count: int) -> list[bytes]:
        """Return acknowledgements in any order, other messages and lost connections."""
        others = ["", '{"type":"ack"}', '{"type":"ack","id":true}', '{"type":"ack","id":1e30}', "[]", "x", '{"id":1}']
        return [
            "\n".join(
                random.choice((f'{{"type":"ack","id":{random.randrange(CHANGES + 2)}}}', random.choice(others)))
                for _ in range(random.randrange(2 * CHANGES))
            ).encode()
            for _ in range(count)
        ]

    def compare(self, data: bytes) -> None:
        """Deliver twelve changes. Raises `DifferenceError`."""
        self.counts.executions += 1
        one_per_repo = len(data) % 2 == 0
        window = DeliveryWindow(DeliveryProgress(0, 0), one_per_repo=one_per_repo)
        left = {seq: _change(seq, live=len(data) % 3 > 0) for seq in range(1, CHANGES + 1)}
        window.add(left.values())
        in_flight: set[int] = set()
        for line in text_of(data).split("\n")[:200]:
            self._take(window, left, in_flight, one_per_repo=one_per_repo)
            if not line:
                self.counts.add("lost connections")
                window.give_back(in_flight)
                self.counts.add("delivered again", len(in_flight))
                in_flight.clear()
            elif (seq := acknowledged_seq(line)) is None or not window.acknowledge(seq):
                if seq in left:
                    raise DifferenceError(f"the acknowledgement of {seq} has no effect")
                self.counts.add("without effect")
            else:
                del left[seq]
                in_flight.discard(seq)
                self.counts.add("acknowledged")
        window.give_back(in_flight)
        self._drain(window, left)

    def _take(
        self, window: DeliveryWindow, left: dict[int, LoggedChange], in_flight: set[int], *, one_per_repo: bool
    ) -> None:
        """Take changes. None of them is in flight, and no live change overtakes an earlier one of its repo."""
        before = set(in_flight)
        for change in window.take(3):
            together = in_flight - before if one_per_repo else set[int]()
            earlier = [seq for seq in left if seq < change.seq and left[seq].did == change.did and seq not in together]
            if change.seq not in left or change.seq in in_flight or (change.live and earlier):
                raise DifferenceError(f"{change} is delivered before {earlier}, with {in_flight} in flight")
            if one_per_repo and any(left[seq].did == change.did for seq in before):
                raise DifferenceError(f"{change} is delivered with {before} of the same repo in flight")
            in_flight.add(change.seq)

    def _drain(self, window: DeliveryWindow, left: dict[int, LoggedChange]) -> None:
        """Deliver and acknowledge all that is left."""
        while taken := window.take(CHANGES):
            for change in taken:
                del left[change.seq]
                window.acknowledge(change.seq)
        if left or len(window) or window.progress() != DeliveryProgress(CHANGES, CHANGES):
            raise DifferenceError(f"{list(left)} are never delivered: {window.progress()}")


def _change(seq: int, *, live: bool) -> LoggedChange:
    return LoggedChange(seq, f"did:web:{seq % 3}.test", NSID, f"{seq % 5}", "create", None, "rev", live, 0)


class Request(NamedTuple):
    """The part of a request that decides if it is admitted."""

    headers: Mapping[str, str]


class Credentials(FuzzTarget):
    """Headers `Authorization`: only the right user with the right password is admitted."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._guarded = Access(PASSWORD).guard(_greet)
        self.counts = OutcomeCounts("admitted", "refused")

    def close(self) -> None:
        """Close the event loop."""
        self._loop.close()

    def seeds(self, _: Random, count: int) -> list[bytes]:
        """Return headers with the right credentials in several forms, and with wrong ones."""
        right = b64encode(f"admin:{PASSWORD}".encode())
        wrong = [b64encode(text) for text in (b"admin:", PASSWORD.encode(), b"other:x", b"\xff", b"")]
        headers = [b"Basic " + right, b"basic  " + right, b"BASIC\t" + right, b"Bearer " + right, right, b""]
        headers += [b"Basic " + text for text in wrong]
        return [headers[number % len(headers)] for number in range(count)]

    def compare(self, data: bytes) -> None:
        """Send a request with the header, as the HTTP library decodes it. Raises `DifferenceError`."""
        self.counts.executions += 1
        header = data.decode(errors="surrogateescape")
        request: Any = Request({"Authorization": header})
        response = self._loop.run_until_complete(self._guarded(request))
        scheme, _, sent = header.partition(" ")
        try:
            credentials = b64decode(sent.strip().encode(errors="replace"), validate=True)
        except ValueError:
            credentials = b""
        right = scheme.lower() == "basic" and credentials == f"admin:{PASSWORD}".encode()
        usual = header == "Basic " + b64encode(f"admin:{PASSWORD}".encode()).decode()
        allowed = {200} if usual else {200, 401} if right else {401}  # of several forms of base64, one is accepted
        if response.status not in allowed:
            raise DifferenceError(f"status {response.status} for {header!r}")
        self.counts.add("admitted" if response.status == 200 else "refused")


async def _greet(_: web.Request) -> web.StreamResponse:
    return web.Response()
