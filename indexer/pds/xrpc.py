"""Errors as hosts tell them: `{"error": name, "message": text}` under some 4xx or 5xx (spec §2.2)."""

from typing import Any

import orjson

from indexer.errors import UnavailableError
from indexer.reasons import FetchFailure

_BY_NAME = {
    "RepoNotFound": FetchFailure.REPO_NOT_FOUND,
    "RepoDeleted": FetchFailure.REPO_NOT_FOUND,
    "RepoTakendown": FetchFailure.REPO_TAKENDOWN,
    "RepoSuspended": FetchFailure.REPO_SUSPENDED,
    "RepoDeactivated": FetchFailure.REPO_DEACTIVATED,
    "RateLimitExceeded": FetchFailure.THROTTLED,
}


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
