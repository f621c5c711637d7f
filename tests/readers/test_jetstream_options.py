"""The options of a Jetstream subscriber: what is accepted, and one clear line for everything else."""

from urllib.parse import urlencode

import orjson
import pytest

from indexer.readers.jetstream.events import ALL_EVENTS, EventFilter
from indexer.readers.jetstream.options import (
    MAX_COLLECTIONS,
    MAX_DIDS,
    BadOptionsError,
    parse_message,
    parse_query,
)

ADA, BOB = "did:plc:ada", "did:web:bob.example"


def query(*parameters: tuple[str, str]) -> str:
    return urlencode(parameters)


def message(**payload: object) -> bytes:
    return orjson.dumps({"type": "options_update", "payload": payload})


def test_repeated_parameters_select_collections_and_accounts() -> None:
    options = parse_query(
        query(
            ("wantedCollections", "app.bsky.feed.post"),
            ("wantedCollections", "app.bsky.graph.*"),
            ("wantedDids", ADA),
            ("wantedDids", BOB),
            ("maxMessageSizeBytes", "1000"),
            ("cursor", "1725911162329308"),
            ("compress", "true"),
            ("requireHello", "true"),
            ("live", "true"),
        ),
        "",
    )
    collections = options.events.collections
    assert collections is not None
    wanted = ["app.bsky.feed.post", "app.bsky.graph.follow", "app.bsky.graph.a.b"]
    assert all(map(collections.matches, wanted))
    assert not any(map(collections.matches, ["app.bsky.feed.posts", "app.bsky.graphs.a", "app.bsky.feed.like"]))
    assert options.events.dids == {ADA, BOB}
    assert (options.events.max_bytes, options.events.live_only) == (1_000, True)
    assert (options.cursor, options.compress, options.require_hello) == (1_725_911_162_329_308, True, True)
    assert not options.events.selects_all


def test_unknown_parameters_are_ignored() -> None:
    options = parse_query("wanted=x&Cursor=y&live=maybe&", "")
    assert options == parse_query("", "")
    assert options.events.selects_all
    assert (options.cursor, options.compress, options.require_hello) == (None, False, False)
    assert parse_query("", "zstd").compress, "the header asks for compression"


@pytest.mark.parametrize("cursor", [0, -5, int("9" * 40)])
def test_any_integer_is_a_cursor(cursor: int) -> None:
    assert parse_query(query(("cursor", str(cursor))), "").cursor == cursor


@pytest.mark.parametrize("size", ["", "-1", "many", "9" * 5_000, "\u0663"])
def test_size_limit_that_is_no_number_is_ignored(size: str) -> None:
    assert parse_query(query(("maxMessageSizeBytes", size)), "").events.max_bytes == 0


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("cursor", "yesterday", "invalid cursor: 'yesterday' is not a time in microseconds"),
        ("cursor", "1" * 9_000, "invalid cursor: '1111"),
        ("cursor", "1.5", "invalid cursor: '1.5'"),
        ("wantedCollections", "post", "invalid collection: 'post' is neither an NSID"),
        ("wantedCollections", "app.bsky.gra*", "invalid collection"),
        ("wantedCollections", "x" * 9_000, "invalid collection"),
        ("wantedDids", "ada.example", "invalid DID: 'ada.example'"),
    ],
)
def test_bad_parameter_gives_one_clear_line(name: str, value: str, problem: str) -> None:
    with pytest.raises(BadOptionsError) as raised:
        parse_query(query((name, value)), "")
    assert str(raised.value).startswith(problem)
    assert len(str(raised.value)) < 250
    assert "\n" not in str(raised.value)


def test_filters_are_bounded() -> None:
    collections = [f"app.test.c{number}" for number in range(MAX_COLLECTIONS + 1)]
    dids = [f"did:plc:{number}" for number in range(MAX_DIDS + 1)]
    parse_message(message(wantedCollections=collections[1:], wantedDids=dids[1:]), ALL_EVENTS)
    with pytest.raises(BadOptionsError, match="too many wanted collections: 101; at most 100"):
        parse_message(message(wantedCollections=collections), ALL_EVENTS)
    with pytest.raises(BadOptionsError, match="too many wanted DIDs: 10001; at most 10000"):
        parse_message(message(wantedDids=dids), ALL_EVENTS)


def test_options_update_replaces_the_filter_also_by_what_it_leaves_out() -> None:
    assert parse_message(b'{"type": "hello"}', ALL_EVENTS) is None
    before = EventFilter(dids=frozenset({ADA}), max_bytes=10, live_only=True)
    assert parse_message(message(wantedDids=[BOB]), before) == EventFilter(dids=frozenset({BOB}), live_only=True)
    assert parse_message(message(wantedCollections=None, maxMessageSizeBytes=5), ALL_EVENTS) == EventFilter(max_bytes=5)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (b"{", "the message is not JSON"),
        (b"\xff", "the message is not JSON"),
        (b"[" * 10_000, "the message is not JSON"),
        (b"[" * 100_000, "the message has more than 16384 items"),
        (b"{}," * 10_000, "the message has more than 16384 items"),
        (b"[]", "the message is not a JSON object"),
        (b'{"type": "options_update"}', "the payload of options_update is not a JSON object"),
        (message(wantedDids="did:plc:ada"), "wantedDids is not a list of strings"),
        (message(wantedCollections=[1]), "wantedCollections is not a list of strings"),
        (message(maxMessageSizeBytes="5"), "maxMessageSizeBytes is not an integer"),
        (message(wantedDids=["x"]), "invalid DID: 'x'"),
    ],
)
def test_bad_message_gives_one_clear_line(text: bytes, problem: str) -> None:
    with pytest.raises(BadOptionsError) as raised:
        parse_message(text, ALL_EVENTS)
    assert str(raised.value).startswith(problem)
    assert "\n" not in str(raised.value)
