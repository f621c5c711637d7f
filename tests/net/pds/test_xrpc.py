import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.net.pds.xrpc import MethodNotOfferedError, XrpcError, xrpc_error
from indexer.reasons import FetchFailure
from tests.net.pds.missing_methods import MISSING_METHOD_ANSWERS, MissingMethodAnswer


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("RepoNotFound", FetchFailure.REPO_NOT_FOUND),
        ("RepoDeleted", FetchFailure.REPO_NOT_FOUND),
        ("RepoTakendown", FetchFailure.REPO_TAKENDOWN),
        ("RepoSuspended", FetchFailure.REPO_SUSPENDED),
        ("RepoDeactivated", FetchFailure.REPO_DEACTIVATED),
        ("RateLimitExceeded", FetchFailure.THROTTLED),
        ("InvalidRequest", FetchFailure.HTTP_STATUS),
        ("RepoInactive", FetchFailure.HTTP_STATUS),
        ("repotakendown", FetchFailure.HTTP_STATUS),
        (None, FetchFailure.HTTP_STATUS),
        (["RepoNotFound"], FetchFailure.HTTP_STATUS),
    ],
)
def test_name_of_the_error_decides_and_not_the_status(name: object, reason: FetchFailure) -> None:
    for status in (400, 403, 404, 500):
        error = xrpc_error(status, json.dumps({"error": name, "message": "Could not find it"}).encode())
        assert error.reason is reason
        assert str(status) in error.detail
        assert "Could not find it" in error.detail


def test_error_is_read_despite_a_byte_order_mark_and_bytes_that_are_not_utf8() -> None:
    error = xrpc_error(400, b'\xef\xbb\xbf{"error": "RepoTakendown", "message": "\xff"}')
    assert (error.reason, error.detail) == (FetchFailure.REPO_TAKENDOWN, "400 RepoTakendown \ufffd")


@given(st.integers(300, 599), st.binary(max_size=100) | st.sampled_from([b"[" * 50_000, b"[]", b'"x"', b"null", b"1"]))
def test_body_without_a_known_name_is_http_status(status: int, body: bytes) -> None:
    assert xrpc_error(status, body).reason is FetchFailure.HTTP_STATUS


@pytest.mark.parametrize("answer", MISSING_METHOD_ANSWERS, ids=lambda answer: answer.server)
def test_answer_of_each_server_to_a_method_that_it_does_not_offer_is_recognized(answer: MissingMethodAnswer) -> None:
    body = {"error": answer.name, "message": f"{answer.message} com.atproto.sync.listReposByCollection"}
    error = xrpc_error(answer.status, json.dumps(body).encode() if answer.name else b"Not Found")
    assert isinstance(error, MethodNotOfferedError)
    assert error.definite is bool(answer.name), "without a name it may be a proxy before a host that is down"


@pytest.mark.parametrize(
    ("status", "name", "definite"),
    [(400, "InvalidRequest", True), (403, "Forbidden", True), (400, "", False), (408, "Timeout", False),
     (500, "InternalServerError", False), (400, "RateLimitExceeded", False)],
)  # fmt: skip
def test_other_errors_say_nothing_about_the_method(status: int, name: str, definite: bool) -> None:
    error = xrpc_error(status, json.dumps({"error": name, "message": "Malformed cursor"}).encode() if name else b"")
    assert (type(error) is XrpcError, error.definite) == (True, definite)
