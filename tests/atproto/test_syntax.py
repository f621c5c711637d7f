import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.atproto.syntax import (
    MAX_NSID_CHARACTERS,
    AtUri,
    CollectionFilter,
    is_did,
    is_handle,
    is_nsid,
    is_record_key,
    is_resolvable,
    is_tid,
    normalize_account,
    split_path,
    tid_micros,
    tid_of,
)
from indexer.errors import UpstreamError


def test_trailing_newline_is_rejected() -> None:
    for check, valid in (
        (is_did, "did:plc:ewvi7nxzyoun6zhxrhs64oiz"),
        (is_handle, "alice.test"),
        (is_nsid, "com.example.thing"),
        (is_record_key, "self"),
        (is_tid, "3jzfcijpj2z2a"),
    ):
        assert check(valid)
        assert not check(valid + "\n")
    with pytest.raises(ValueError, match="record key"):
        AtUri.parse("at://alice.test/com.example.thing/self\n")


@given(st.integers(0, 2**53 - 1), st.integers(0, 1023))
def test_tid_encodes_its_time_and_sorts_by_it(micros: int, clock_id: int) -> None:
    tid = tid_of(micros, clock_id)
    assert is_tid(tid)
    assert tid_micros(tid) == micros
    assert tid_of(micros + 1) > tid


def test_longest_nsid_is_accepted() -> None:
    authority = ".".join(["a" * 63, "a" * 63, "a" * 63, "a" * 61])
    longest = f"{authority}.{'b' * 63}"
    assert len(longest) == MAX_NSID_CHARACTERS
    assert is_nsid(longest)
    assert not is_nsid(f"a{longest}")


def test_account_is_a_did_or_a_handle_in_lower_case() -> None:
    for text in ("alice.test", "did:web:Example.com"):
        assert normalize_account(text) == text
    assert normalize_account("@Alice.Test") == "alice.test"
    for text in ("@did:web:example.com", "alice", "alice.test@", "@@alice.test"):
        assert normalize_account(text) is None


def test_reserved_names_are_not_resolvable() -> None:
    for host in ("alice.example.com", "test.com", "local.onion.com"):
        assert is_resolvable(host, local=False) is is_resolvable(host, local=True) is True
    for host in ("alice.test", "alice.TEST"):
        assert (is_resolvable(host, local=False), is_resolvable(host, local=True)) == (False, True)
    for host in ("alice.local", "pds.internal.Onion", "localhost"):
        assert is_resolvable(host, local=False) is is_resolvable(host, local=True) is False


def test_published_tid() -> None:
    assert tid_of(0) == "2222222222222"
    assert tid_micros("3jzfcijpj2z2a") == 1688137381887007
    assert tid_of(1688137381887007, 6) == "3jzfcijpj2z2a"


def test_at_uri_keeps_its_text_and_can_be_normalized() -> None:
    for text in ("at://alice.test", "at://did:web:a.b/com.Example.fooBar", "at://Alice.Test/Com.Example.fooBar/Self"):
        assert str(AtUri.parse(text)) == text
    assert str(AtUri.parse("at://Alice.Test/Com.Example.fooBar/Self").normalized()) == (
        "at://alice.test/com.example.fooBar/Self"
    )
    assert str(AtUri.parse("at://did:web:A.b").normalized()) == "at://did:web:A.b"


def test_error_says_what_is_wrong_with_an_at_uri() -> None:
    for text, fault in {
        "https://alice.test": "not at://",
        "at://alice.test/com.example.thing/self/more": "not at://",
        "at://did:web:" + "a" * 9_000: "not at://",
        "at:///com.example.thing": "neither a DID nor a handle",
        "at://alice.test/": "not an NSID",
        "at://alice.test/com.example.thing/": "not a record key",
    }.items():
        with pytest.raises(ValueError, match=fault):
            AtUri.parse(text)


def test_path_is_split_into_collection_and_record_key() -> None:
    assert split_path("net.example.Thing.camelCase/a") == ("net.example.Thing.camelCase", "a")
    assert split_path("com.example.thing/pre:fix") == ("com.example.thing", "pre:fix")
    for invalid in ("com.example.thing", "com.example.thing/", "/self", "com.example.thing/a/b", ""):
        with pytest.raises(UpstreamError):
            split_path(invalid)


def test_collection_filter_matches_whole_segments() -> None:
    collections = CollectionFilter(["app.bsky.*", "com.example.thing"])
    assert collections.matches("app.bsky.feed.post")
    assert collections.matches("com.example.thing")
    assert not collections.matches("app.bskyx.feed.post")
    assert not collections.matches("com.example.things")
    assert CollectionFilter().matches("anything.at.all")
    assert CollectionFilter(["com.example.thing", "*"]).matches_all
    assert not collections.matches_all
    for shortest in ("com.*", "com.a.*"):
        assert CollectionFilter([shortest]).matches("com.a.thing")
    assert str(collections) == "app.bsky.*,com.example.thing"


@pytest.mark.parametrize("pattern", ["", "app.bsky*", "*.bsky", "app.*.post", ".*", "app..b.*", "app bsky"])
def test_invalid_pattern_is_named_in_the_error(pattern: str) -> None:
    with pytest.raises(ValueError, match="neither an NSID"):
        CollectionFilter([pattern])
