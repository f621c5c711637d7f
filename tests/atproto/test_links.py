"""The links in the value of a record."""

import json
import random
from time import thread_time
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.atproto.links import (
    BYTES_OF_LINK,
    MAX_LINKS,
    MAX_PATH_BYTES,
    MAX_TARGET_CHARACTERS,
    MIN_LINKS,
    RecordLink,
    links_of,
)
from indexer.atproto.syntax import AtUri, is_did

ALICE, BOB = "did:plc:aaaaaaaaaaaaaaaaaaaaaaaa", "did:web:bob.test"
POST = f"at://{ALICE}/app.bsky.feed.post/3l"
CID = "bafkreibme22gw2h7y2h7tg2fhqotaqjucnbc24deqo72b6mkl2egezxhvy"


def found(value: object) -> list[tuple[str, str, str]]:
    return [(link.path, link.target, link.kind) for link in links_of(json.dumps(value, ensure_ascii=False))]


def test_paths_are_those_of_constellation() -> None:
    value = {
        "a": ALICE,
        "list": [ALICE, [BOB], {"x": POST}],
        "facets": [{"features": [{"$type": "app.bsky.richtext.facet#mention", "did": BOB}]}],
        "typed": [{"$type": "a.b#c", "uri": POST, "cid": CID}],
    }
    assert found(value) == [
        (".a", ALICE, "did"),
        (".facets[].features[app.bsky.richtext.facet#mention].did", BOB, "did"),
        (".list[]", ALICE, "did"),
        (".list[].x", POST, "at-uri"),
        (".list[][]", BOB, "did"),
        (".typed[a.b#c].uri", POST, "strong-ref"),
    ]
    assert found(ALICE) == [("", ALICE, "did")]
    assert found([POST]) == [("[]", POST, "at-uri")]


@pytest.mark.parametrize(
    "text",
    ["did:", "did:plc:", "at://", "at://x", f"at://{ALICE}/", f"{POST}#a", f"{POST}?a", f" {ALICE}", f"{ALICE} é",
     "did:PLC:a", f"at://{ALICE}/a/b", f"at://{ALICE}/app.bsky.feed.post/..", f"see {POST}"],
)  # fmt: skip
def test_texts_that_are_no_target_are_no_links(text: str) -> None:
    assert found({"a": text, "b": [text], "c": {"uri": text, "cid": CID}}) == []


def test_a_target_is_one_link_for_each_path_of_a_record() -> None:
    """A strong reference is one even if the same path also has the AT-URI alone."""
    for value in ([{"uri": POST}, {"uri": POST, "cid": CID}], [{"uri": POST, "cid": CID}, {"uri": POST}]):
        assert found(value) == [("[].uri", POST, "strong-ref")]


def test_only_the_member_uri_beside_a_cid_is_a_strong_reference() -> None:
    assert found({"uri": POST}) == [(".uri", POST, "at-uri")]
    assert found({"uri": POST, "cid": 7}) == [(".uri", POST, "at-uri")]
    assert found({"url": POST, "cid": CID}) == [(".url", POST, "at-uri")]
    assert found({"subject": {"uri": POST, "cid": CID}}) == [(".subject.uri", POST, "strong-ref")]
    assert found({"a": "at://alice.test/app.bsky.feed.post/3l"})[0][2] == "at-uri", "the authority may be a handle"


def test_number_of_links_grows_with_the_bytes_of_the_record() -> None:
    """Neither spaces nor long forms of numbers, as Postgres writes them, allow more links."""
    for count in (MIN_LINKS, 20, 90):
        value = {"a": [f"did:a:{number:02}" for number in range(count)], "b": [1e20]}
        allowed = MIN_LINKS + len(orjson.dumps(value)) // BYTES_OF_LINK
        assert len(found(value)) == min(count, allowed)
        assert links_of(json.dumps(value, indent=9).replace("1e+20", "1" + "0" * 20)) == links_of(json.dumps(value))
    assert len(found([f"did:web:{number}{'x' * BYTES_OF_LINK}" for number in range(MAX_LINKS)])) == MAX_LINKS


def test_number_and_size_of_links_are_bounded() -> None:
    assert len(found([f"{POST}{number:064}" for number in range(MAX_LINKS + 9)])) == MAX_LINKS
    prefix = f"at://{ALICE}/app.test.a/"
    longest = prefix + "x" * (512 - len(prefix))
    assert found([longest]) == [("[]", longest, "at-uri")]
    assert found(["did:web:" + "x" * MAX_TARGET_CHARACTERS]) == []
    longest = "did:web:" + "x" * (MAX_TARGET_CHARACTERS - 8)
    assert found([longest]) == [("[]", longest, "did")]
    assert found([longest + "x"]) == []
    longest = "a" + "é" * (MAX_PATH_BYTES // 2 - 1)
    assert found({longest: ALICE}) == [(f".{longest}", ALICE, "did")]
    assert found({longest + "a": ALICE}) == []
    assert found({"é" * (MAX_PATH_BYTES // 2): ALICE}) == []
    assert len(found({"é" * (MAX_PATH_BYTES // 2 - 1): ALICE})) == 1


def test_a_value_without_json_has_no_links() -> None:
    assert links_of(None) == ()


def reference(value: Any, path: str = "") -> set[tuple[str, str]]:
    """Return paths and targets in the obvious way, without kinds and bounds."""
    if isinstance(value, dict):
        return set().union(*[reference(child, f"{path}.{key}") for key, child in value.items()])
    if isinstance(value, list):
        types = [child.get("$type", "") if isinstance(child, dict) else "" for child in value]
        return set().union(
            *[
                reference(child, f"{path}[{type_ if isinstance(type_, str) else ''}]")
                for child, type_ in zip(value, types, strict=True)
            ]
        )
    if isinstance(value, str) and (is_did(value) or is_at_uri(value)):
        return {(path, value)}
    return set()


def is_at_uri(text: str) -> bool:
    try:
        AtUri.parse(text)
    except ValueError:
        return False
    return True


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.sampled_from([ALICE, BOB, POST, CID, "did:", "at://", "a"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["a", "uri", "cid", "$type", "é"]), inner, max_size=4)
    ),
    max_leaves=20,
)


@given(VALUES, st.integers())
def test_links_are_those_of_the_reference_in_any_order_of_members(value: Any, seed: int) -> None:
    links = links_of(json.dumps(value))
    assert {(link.path, link.target) for link in links} == reference(value)
    assert list(links) == sorted(links)
    assert links == links_of(orjson.dumps(shuffled(value, random.Random(seed))).decode())
    assert all(isinstance(link, RecordLink) for link in links)


def shuffled(value: Any, numbers: random.Random) -> Any:
    if isinstance(value, dict):
        keys = list(value)
        numbers.shuffle(keys)
        return {key: shuffled(value[key], numbers) for key in keys}
    return [shuffled(child, numbers) for child in value] if isinstance(value, list) else value


@pytest.mark.slow
def test_long_path_of_many_elements_takes_no_longer_than_a_short_one() -> None:
    def cost(key: str, text: str) -> float:
        value = orjson.dumps({"target": ALICE, key: [{}] * 5_000, "text": text}).decode()
        began = thread_time()
        assert len(links_of(value)) == 1
        return thread_time() - began

    long, short = "x" * 900_000, "x"
    ordinary = min(cost(short, long) for _ in range(5))
    assert min(cost(long, short) for _ in range(5)) < 10 * ordinary
