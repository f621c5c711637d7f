"""Questions whose answer is JSON, and errors as hosts tell them: `{"error": name, "message": text}` under some 4xx or
5xx (spec §2.2).
"""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any
from urllib.parse import urlencode, urlsplit

import orjson

from indexer.errors import UnavailableError
from indexer.outbound import Outbound
from indexer.reasons import FetchFailure

_BY_NAME = {
    "RepoNotFound": FetchFailure.REPO_NOT_FOUND,
    "RepoDeleted": FetchFailure.REPO_NOT_FOUND,
    "RepoTakendown": FetchFailure.REPO_TAKENDOWN,
    "RepoSuspended": FetchFailure.REPO_SUSPENDED,
    "RepoDeactivated": FetchFailure.REPO_DEACTIVATED,
    "RateLimitExceeded": FetchFailure.THROTTLED,
}


async def query(
    outbound: Outbound, host: str, method: str, parameters: Mapping[str, str], *, max_bytes: int, seconds: float
) -> dict[str, Any]:
    """The object that `method` answers with. Raises `UnavailableError`: what `Outbound` raises, what the error's name
    says, or BAD_ANSWER.
    """
    response = await outbound.get(xrpc_url(host, method, parameters), max_bytes=max_bytes, timeout=seconds)
    if response.status != HTTPStatus.OK:
        raise xrpc_error(response.status, response.body)
    try:
        answer: Any = orjson.loads(response.body)
    except orjson.JSONDecodeError as error:
        raise UnavailableError(FetchFailure.BAD_ANSWER, f"{method}: {error}") from None
    if not isinstance(answer, dict):
        raise UnavailableError(FetchFailure.BAD_ANSWER, f"{method}: not an object")
    return answer


def xrpc_url(host: str, method: str, parameters: Mapping[str, str]) -> str:
    """Of the base URL `host`, only the origin counts."""
    try:
        parts = urlsplit(host)
    except ValueError as error:
        raise UnavailableError(FetchFailure.REFUSED_ADDRESS, f"{host[:200]!r}: {error}") from None
    return f"{parts.scheme}://{parts.netloc}/xrpc/{method}?{urlencode(parameters)}"


def xrpc_error(status: int, body: bytes) -> UnavailableError:
    """What an answer that is no success means.

    The error's name decides, since hosts send the same one under 400, 403 and 404 (§9-45); without a name that we
    know it is HTTP_STATUS, which is tried again: a 404 may come from a proxy in front of a host that is down.
    """
    name, message = _told(body)
    failure = _BY_NAME.get(name, FetchFailure.HTTP_STATUS)
    return UnavailableError(failure, " ".join(filter(None, (str(status), name, message)))[:200])


def _told(body: bytes) -> tuple[str, str]:
    try:
        answer: Any = orjson.loads(body)
    except orjson.JSONDecodeError:  # a proxy's page, or cut
        return "", ""
    if not isinstance(answer, dict):
        return "", ""
    name, message = answer.get("error"), answer.get("message")
    return name if isinstance(name, str) else "", message if isinstance(message, str) else ""
