"""XRPC queries with JSON responses: lists of accounts and hosts, and the status of one account.

An error is `{"error": name, "message": text}` with any 4xx or 5xx status (docs/protocol.md#repo-lists).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Generic, NamedTuple, TypeVar
from urllib.parse import urlencode, urlsplit

import orjson

from indexer.atproto.limits import max_items
from indexer.atproto.syntax import is_did, is_handle, is_tid
from indexer.errors import UnavailableError
from indexer.net.http.http_client import OutboundClient
from indexer.reasons import FetchFailure
from indexer.sync.events import hosting_status, text_or_empty
from indexer.sync.resync import HOST_STATUSES

MAX_JSON_ITEMS = 16_384
"""Items of a JSON response. A page of 1,000 accounts has about 6,000."""
QUERY_TIMEOUT = 20.0
_ANSWER_BYTES = 65_536
_PAGE_SIZE = 1_000
_COLLECTION_PAGE_SIZE = 2_000
_PAGE_BYTES = 4 * 1024 * 1024
_PAGE_TIMEOUT = 60.0
_CURSOR_CHARACTERS = 2_048
_LOCAL_HOST = re.compile(r"(localhost|127\.0\.0\.1):[0-9]{1,5}").fullmatch
"""Matches the name of a host of a local network, which has a port and speaks http."""

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
Entry = TypeVar("Entry")
_TEMPORARY_STATUSES = frozenset({HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_EARLY, HTTPStatus.TOO_MANY_REQUESTS})


class XrpcError(UnavailableError):
    """An error response.

    Attributes:
        definite: True if the server itself answers that it refuses the request. The same request would fail again.
        name: The name of the error; "" without one.
    """

    def __init__(self, reason: FetchFailure, detail: str, *, definite: bool, name: str = "") -> None:
        super().__init__(reason, detail)
        self.definite = definite
        self.name = name


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
    max_bytes: int = _ANSWER_BYTES,
    timeout: float = QUERY_TIMEOUT,  # noqa: ASYNC109 - `outbound` enforces it
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


def xrpc_url(host: str, method: str, parameters: Mapping[str, str | Sequence[str]]) -> str:
    """Return the URL of a query. Only the origin of the base URL `host` is used. A list is a repeated parameter.

    Raises:
        UnavailableError: REFUSED_ADDRESS if `host` is not a URL.
    """
    try:
        parts = urlsplit(host)
    except ValueError as error:
        raise UnavailableError(FetchFailure.REFUSED_ADDRESS, f"{host[:200]!r}: {error}") from None
    return f"{parts.scheme}://{parts.netloc}/xrpc/{method}?{urlencode(parameters, doseq=True)}"


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
        return MethodNotOfferedError(FetchFailure.HTTP_STATUS, detail, definite=definite, name=name)
    definite = bool(name) and status // 100 == 4 and status not in _TEMPORARY_STATUSES  # noqa: PLR2004
    return XrpcError(FetchFailure.HTTP_STATUS, detail, definite=definite, name=name)


def _name_and_message(body: bytes) -> tuple[str, str]:
    try:
        error = _parse_json(body)
    except orjson.JSONDecodeError:  # HTML from a proxy, or truncated
        return "", ""
    if not isinstance(error, dict):
        return "", ""
    return text_or_empty(error, "error"), text_or_empty(error, "message")


class ListedAccount(NamedTuple):
    """An entry of a repo list. The list of a collection has only the DIDs.

    The relay of Bluesky lists accounts whose commits it has never received with an empty rev.
    """

    did: str
    rev: str | None = None  # None if the host does not know it
    active: bool = True
    status: str | None = None  # why the account is not active, as in `RepoStatus`


class ListedHost(NamedTuple):
    """An entry of the list of hosts that a relay consumes."""

    host: str  # the name, in lower case. Only one of a local network has a port
    accounts: int | None = None  # at the relay, those that it withholds included; None if it does not say
    status: str | None = None  # at the relay, as in `com.atproto.sync.defs#hostStatus`; None if it does not say

    @property
    def url(self) -> str:
        """The base URL of the host."""
        return f"http{'' if _LOCAL_HOST(self.host) else 's'}://{self.host}"


@dataclass(frozen=True, slots=True)
class ListPage(Generic[Entry]):
    """A page of a list, in the order of the host.

    `invalid` says what is wrong with each entry that names no account or host, and with other fields of accounts: the
    rest of such an entry is used.
    """

    entries: tuple[Entry, ...]
    invalid: tuple[str, ...]
    cursor: str | None  # of the next page; None on the last page


class RepoStatus(NamedTuple):
    """The hosting status of an account on one host; `status` is as in `hosting_status`, and may be an odd one."""

    active: bool
    status: str | None = None
    rev: str | None = None  # of the repo; None if the host does not tell it


async def list_repos(
    outbound: OutboundClient, host: str, collection: str, cursor: str | None
) -> ListPage[ListedAccount]:
    """Fetch the page after `cursor` from `host`. The host decides its length.

    With an empty `collection`, the list contains all accounts (`listRepos`). Otherwise it contains the accounts that
    may have records in the collection (`listReposByCollection`).

    Raises:
        UnavailableError: As `query` raises it, or BAD_ANSWER if the response is not a page.
    """
    method = "com.atproto.sync.listReposByCollection" if collection else "com.atproto.sync.listRepos"
    parameters = {"limit": str(_COLLECTION_PAGE_SIZE if collection else _PAGE_SIZE)}
    parameters |= {"collection": collection} if collection else {}
    entries, next_cursor = await _list_page(outbound, host, method, parameters, cursor, "repos")
    found = [_account(entry) for entry in entries]
    accounts, problems = [account for account, _ in found if account], [problem for _, problem in found if problem]
    return ListPage(tuple(accounts), tuple(problems), next_cursor)


async def list_hosts(outbound: OutboundClient, relay: str, cursor: str | None) -> ListPage[ListedHost]:
    """Fetch the page after `cursor` of the hosts that a relay consumes (`listHosts`).

    Raises:
        UnavailableError: As `list_repos` raises it.
    """
    parameters = {"limit": str(_PAGE_SIZE)}
    entries, next_cursor = await _list_page(outbound, relay, "com.atproto.sync.listHosts", parameters, cursor, "hosts")
    hosts = [_host(entry) for entry in entries]
    invalid = [f"no host name in {entry!r:.200}" for entry, host in zip(entries, hosts, strict=True) if host is None]
    return ListPage(tuple([host for host in hosts if host]), tuple(invalid), next_cursor)


async def _list_page(
    outbound: OutboundClient, host: str, method: str, parameters: dict[str, str], cursor: str | None, name: str
) -> tuple[list[Any], str | None]:
    """Return the entries of a page, and the cursor of the next one (None: it is the last page)."""
    parameters |= {"cursor": cursor} if cursor is not None else {}
    body = await query(outbound, host, method, parameters, max_bytes=_PAGE_BYTES, timeout=_PAGE_TIMEOUT)
    entries, next_cursor = body.get(name), body.get("cursor")
    if type(next_cursor) is int:
        next_cursor = str(next_cursor)
    if (
        not isinstance(entries, list)
        or not isinstance(next_cursor, str | None)
        or len(next_cursor or "") > _CURSOR_CHARACTERS
        or "\0" in (next_cursor or "")  # Postgres cannot store it
    ):
        raise UnavailableError(FetchFailure.BAD_ANSWER, f"{method}: the response is not a page of a list")
    if next_cursor is not None and next_cursor == cursor:
        raise UnavailableError(FetchFailure.BAD_ANSWER, f"{method}: the cursor {cursor!r:.100} leads to itself")
    return entries, next_cursor or None


async def fetch_repo_status(outbound: OutboundClient, host: str, did: str) -> RepoStatus:
    """Fetch the hosting status of an account (`getRepoStatus`).

    Raises:
        UnavailableError: As `query` raises it (REPO_NOT_FOUND: the host does not have the account), or BAD_ANSWER.
    """
    method = "com.atproto.sync.getRepoStatus"
    try:
        body = await query(outbound, host, method, {"did": did})
    except UnavailableError as error:
        return _status_of(error)
    active = body.get("active")
    if not isinstance(active, bool):
        raise UnavailableError(FetchFailure.BAD_ANSWER, f"{method}: the response is not a repo status")
    return RepoStatus(active, hosting_status(body), _rev_of(body))


async def fetch_host_status(outbound: OutboundClient, host: str, did: str) -> RepoStatus:
    """Fetch the hosting status of an account from its host: from `getLatestCommit` if that lacks `getRepoStatus`.

    The rev of an active account, an optional field of `getRepoStatus`, is also fetched from there.

    Raises:
        UnavailableError: As `fetch_repo_status` raises it.
    """
    try:
        status = await fetch_repo_status(outbound, host, did)
    except XrpcError as error:
        if not is_silent(error) or error.reason is FetchFailure.REPO_NOT_FOUND:
            raise
    else:
        if not status.active or status.rev is not None:
            return status
    try:
        body = await query(outbound, host, "com.atproto.sync.getLatestCommit", {"did": did})
    except UnavailableError as error:
        return _status_of(error)
    return RepoStatus(True, None, _rev_of(body))


def is_silent(error: UnavailableError) -> bool:
    """Return True if the host answers that it says nothing about the account: it lacks the method or the account."""
    return isinstance(error, MethodNotOfferedError) or (isinstance(error, XrpcError) and error.definite)


def _rev_of(body: Mapping[str, Any]) -> str | None:
    rev = body.get("rev")
    return rev if isinstance(rev, str) and is_tid(rev) else None


def _status_of(error: UnavailableError) -> RepoStatus:
    """Return the status that the name of an error means; raise the error if it means none."""
    if error.reason not in HOST_STATUSES:
        raise error
    return RepoStatus(False, HOST_STATUSES[error.reason])


def _account(entry: Any) -> tuple[ListedAccount | None, str | None]:
    """Return the account of an entry, and what is wrong with the entry. A field that is not valid counts as absent."""
    did = entry.get("did") if isinstance(entry, dict) else None
    if not isinstance(did, str) or not is_did(did):
        return None, f"no DID in {entry!r:.200}"
    rev, active = _rev_of(entry), entry.get("active", True)
    if not isinstance(active, bool):
        problem = f"{did}: active is {active!r:.100}"
    elif rev is None and entry.get("rev") not in (None, ""):
        problem = f"{did}: rev is {entry['rev']!r:.100}"
    else:
        problem = None
    status = hosting_status(entry) if active is False else None
    return ListedAccount(did, rev, active is not False, status), problem


def _host(entry: Any) -> ListedHost | None:
    """Return the host of an entry; None if it names none. A field that is not valid counts as absent."""
    name = entry.get("hostname") if isinstance(entry, dict) else None
    if not isinstance(name, str) or not (is_handle(name) or _LOCAL_HOST(name)):
        return None
    accounts = entry.get("accountCount")
    is_count = type(accounts) is int and 0 <= accounts < 1 << 53
    return ListedHost(name.lower(), accounts if is_count else None, hosting_status(entry))
