"""Secrets are removed from a text by their form, and nothing else is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.redaction import without_secrets


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("no route to postgresql://me:hunter2@db.example/x", "no route to postgresql://me:***@db.example/x"),
        ("connect(password='hunter2', sslpassword=hunter2)", "connect(password=***, sslpassword=***)"),
        ("{'x-api-key': 'hunter2', 'a': 1}", "{'x-api-key': ***, 'a': 1}"),
        ("Authorization: Basic hunter2", "Authorization: ***"),
        ("the host refused Bearer hunter2.hunter2", "the host refused Bearer ***"),
    ],
)
def test_secret_of_each_form_is_removed(text: str, expected: str) -> None:
    assert without_secrets(text) == expected


@pytest.mark.parametrize("text", ["unexpected token: x", "the bearer of it", "https://example.com:443/x@y", "a=b"])
def test_text_without_a_secret_stays(text: str) -> None:
    assert without_secrets(text) == text


PIECES = ["://", ":", "@", "password", "token=", "Authorization: ", "Bearer ", "'", '"', "=", "\n", "{", "a"]


@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=9)).map("".join))
def test_no_text_before_a_secret_makes_it_visible(text: str) -> None:
    secret = "hunter2-Canary"
    forms = f"\npostgresql://me:{secret}@db.test/mine\npassword={secret}\nAuthorization: Bearer {secret}\n"
    assert secret not in without_secrets(text + forms)
