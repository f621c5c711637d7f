"""XRPC queries with JSON responses, and XRPC errors (docs/protocol.md#exports).

An error is `{"error": name, "message": text}` with any 4xx or 5xx status.
"""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any
from urllib.parse import urlencode, urlsplit

import orjson

from indexer.atproto.limits import max_items
from indexer.errors import UnavailableError
from indexer.net.http.http_client import OutboundClient
from indexer.reasons import FetchFailure

MAX_JSON_ITEMS = 16_384
"""Items of a JSON response. A page of 1,000 accounts has about 6,000."""

_FAILURES = {
    "RepoNotFound": FetchFailure.REPO_NOT_FOUND,
    "RepoDeleted": FetchFailure.REPO_NOT_FOUND,
    "RepoTakendown": FetchFailure.REPO_TAKENDOWN,
    "RepoSuspended": FetchFailure.REPO_SUSPENDED,
    "RepoDeactivated": FetchFailure.REPO_DEACTIVATED,
    "RateLimitExceeded": FetchFailure.THROTTLED,
}


_MISSING_METHOD = {
    "InvalidRequest": "No service configured for",
    "AuthMissing": "Authentication Required",
    "Unauthorized": "",
    "MethodNotImplemented": "",
    "XRPCNotSupported": "",
    "Not Found": "",
    "NotFound": "endpoint not found",
}
"""Errors of servers that do not offer a method, with the beginning of the message.

A server that would pass an unknown method on to another service asks for a login first. No method that this program
calls needs one.
"""
_TEMPORARY_STATUSES = frozenset({HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_EARLY, HTTPStatus.TOO_MANY_REQUESTS})


class XrpcError(UnavailableError):
    """An error response.

    Attributes:
        definite: True if the server itself answers that it refuses the request. The same request would fail again.
    """

    def __init__(self, reason: FetchFailure, detail: str, *, definite: bool) -> None:
        super().__init__(reason, detail)
        self.definite = definite


class MethodNotOfferedError(XrpcError):
    """The host answers that it does not have the method.

    If that is not `definite`, the answer may also come from a proxy before a host that is down.
    """


async def query(
    outbound: OutboundClient,
    host: str,
    method: str,
    parameters: Mapping[str, str],
    *,
    max_bytes: int,
    timeout: float,  # noqa: ASYNC109 - `outbound` enforces it
) -> dict[str, Any]:
    """Call `method` and return the JSON object in the response.

    Raises:
        UnavailableError: As `OutboundClient.get` raises it, from an XRPC error, or BAD_ANSWER if it is no JSON object.
    """
    response = await outbound.get(xrpc_url(host, method, parameters), max_bytes=max_bytes, timeout=timeout)
    if response.status != HTTPStatus.OK:
        raise xrpc_error(response.status, response.body)
    if max_items(response.body) > MAX_JSON_ITEMS:
        raise UnavailableError(FetchFailure.BAD_ANSWER, f"{method}: the response has over {MAX_JSON_ITEMS} items")
    try:
        body = _parse_json(response.body)
    except orjson.JSONDecodeError as error:
        raise UnavailableError(FetchFailure.BAD_ANSWER, f"{method}: {error}") from None
    if not isinstance(body, dict):
        raise UnavailableError(FetchFailure.BAD_ANSWER, f"{method}: the response is not a JSON object")
    return body


def _parse_json(body: bytes) -> Any:
    """Decode JSON as a browser does: without a byte order mark, and with U+FFFD in place of bytes that are not UTF-8.

    Raises:
        orjson.JSONDecodeError: It is not JSON.
    """
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        return orjson.loads(body.decode("utf-8-sig", "replace"))


def xrpc_url(host: str, method: str, parameters: Mapping[str, str]) -> str:
    """Return the URL of a query. Only the origin of the base URL `host` is used.

    Raises:
        UnavailableError: REFUSED_ADDRESS if `host` is not a URL.
    """
    try:
        parts = urlsplit(host)
    except ValueError as error:
        raise UnavailableError(FetchFailure.REFUSED_ADDRESS, f"{host[:200]!r}: {error}") from None
    return f"{parts.scheme}://{parts.netloc}/xrpc/{method}?{urlencode(parameters)}"


def xrpc_error(status: int, body: bytes) -> XrpcError:
    """Return the failure that an error response means: `MethodNotOfferedError` if the host does not have the method.

    The name in the body decides, because hosts send the same name with status 400, 403 and 404. An unknown name or no
    name means HTTP_STATUS.
    """
    name, message = _name_and_message(body)
    detail = " ".join(filter(None, (str(status), name, message)))[:200]
    if name in _FAILURES:
        return XrpcError(_FAILURES[name], detail, definite=_FAILURES[name].is_permanent)
    is_missing = name in _MISSING_METHOD and message.startswith(_MISSING_METHOD[name])
    if status in (HTTPStatus.NOT_FOUND, HTTPStatus.NOT_IMPLEMENTED) or (is_missing and status // 100 == 4):  # noqa: PLR2004
        definite = bool(name) or status == HTTPStatus.NOT_IMPLEMENTED
        if definite:
            detail = f"the host does not offer this method: {detail}"
        return MethodNotOfferedError(FetchFailure.HTTP_STATUS, detail, definite=definite)
    definite = bool(name) and status // 100 == 4 and status not in _TEMPORARY_STATUSES  # noqa: PLR2004
    return XrpcError(FetchFailure.HTTP_STATUS, detail, definite=definite)


def _name_and_message(body: bytes) -> tuple[str, str]:
    try:
        error = _parse_json(body)
    except orjson.JSONDecodeError:  # HTML from a proxy, or truncated
        return "", ""
    if not isinstance(error, dict):
        return "", ""
    name, message = error.get("error"), error.get("message")
    return name if isinstance(name, str) else "", message if isinstance(message, str) else ""
