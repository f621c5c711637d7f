"""Lists of the accounts of a relay or PDS, and the status of one account (docs/protocol.md#repo-lists)."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from indexer.atproto.syntax import is_did, is_tid
from indexer.errors import UnavailableError
from indexer.net.http.http_client import OutboundClient
from indexer.net.pds.xrpc import MethodNotOfferedError, XrpcError, query
from indexer.reasons import FetchFailure
from indexer.sync.events import hosting_status
from indexer.sync.resync import HOST_STATUSES

_PAGE_SIZE = 1_000
_COLLECTION_PAGE_SIZE = 2_000
_PAGE_BYTES = 4 * 1024 * 1024
_PAGE_TIMEOUT = 60.0
_CURSOR_CHARACTERS = 2_048
_STATUS_BYTES = 65_536
_STATUS_TIMEOUT = 20.0


class ListedAccount(NamedTuple):
    """An entry of a repo list.

    Attributes:
        rev: None in the list of a collection, and if the host does not know it. A relay does not know it of accounts
            whose commits it has never received: the relay of Bluesky lists these with an empty rev.
        active: Always True in the list of a collection, which does not contain the hosting status.
        status: Why the account is not active, as in `RepoStatus`.
    """

    did: str
    rev: str | None = None
    active: bool = True
    status: str | None = None


@dataclass(frozen=True, slots=True)
class RepoListPage:
    """A page of a repo list, in the order of the host.

    Attributes:
        invalid_entries: Number of entries that are no account, or have a field that is not valid. Of the latter, the
            DID and the other fields are used.
        cursor: Position of the next page; None on the last page.
        first_invalid: What is wrong with the first of these entries; empty if there is none.
    """

    accounts: tuple[ListedAccount, ...]
    invalid_entries: int
    cursor: str | None
    first_invalid: str = ""


class RepoStatus(NamedTuple):
    """The hosting status of an account on one host; `status` is as in `hosting_status`, and may be an odd one."""

    active: bool
    status: str | None = None


async def list_repos(outbound: OutboundClient, host: str, collection: str, cursor: str | None) -> RepoListPage:
    """Fetch the page after `cursor` from `host`. The host decides its length.

    With an empty `collection`, the list contains all accounts (`listRepos`). Otherwise it contains the accounts that
    may have records in the collection (`listReposByCollection`).

    Raises:
        UnavailableError: As `query` raises it, or BAD_ANSWER if the response is not a page.
    """
    method = "com.atproto.sync.listReposByCollection" if collection else "com.atproto.sync.listRepos"
    parameters = {"limit": str(_COLLECTION_PAGE_SIZE if collection else _PAGE_SIZE)}
    parameters |= {"collection": collection} if collection else {}
    parameters |= {"cursor": cursor} if cursor is not None else {}
    body = await query(outbound, host, method, parameters, max_bytes=_PAGE_BYTES, timeout=_PAGE_TIMEOUT)
    entries, next_cursor = body.get("repos"), body.get("cursor")
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
    accounts, invalid = [], []
    for entry in entries:
        account, problem = _account(entry)
        accounts += [account] if account else []
        invalid += [problem] if problem else []
    return RepoListPage(tuple(accounts), len(invalid), next_cursor or None, next(iter(invalid), ""))


async def fetch_repo_status(outbound: OutboundClient, host: str, did: str) -> RepoStatus:
    """Fetch the hosting status of an account (`getRepoStatus`).

    Raises:
        UnavailableError: As `query` raises it (REPO_NOT_FOUND: the host does not have the account), or BAD_ANSWER.
    """
    method = "com.atproto.sync.getRepoStatus"
    try:
        body = await query(outbound, host, method, {"did": did}, max_bytes=_STATUS_BYTES, timeout=_STATUS_TIMEOUT)
    except UnavailableError as error:
        return _status_of(error)
    active = body.get("active")
    if not isinstance(active, bool):
        raise UnavailableError(FetchFailure.BAD_ANSWER, f"{method}: the response is not a repo status")
    return RepoStatus(active, hosting_status(body))


async def fetch_host_status(outbound: OutboundClient, host: str, did: str) -> RepoStatus:
    """Fetch the hosting status of an account from its host: from `getLatestCommit` if that lacks `getRepoStatus`.

    Raises:
        UnavailableError: As `fetch_repo_status` raises it.
    """
    try:
        return await fetch_repo_status(outbound, host, did)
    except XrpcError as error:
        if not is_silent(error) or error.reason is FetchFailure.REPO_NOT_FOUND:
            raise
    method = "com.atproto.sync.getLatestCommit"
    try:
        await query(outbound, host, method, {"did": did}, max_bytes=_STATUS_BYTES, timeout=_STATUS_TIMEOUT)
    except UnavailableError as error:
        return _status_of(error)
    return RepoStatus(True)


def is_silent(error: UnavailableError) -> bool:
    """Return True if the host answers that it says nothing about the account: it lacks the method or the account."""
    return isinstance(error, MethodNotOfferedError) or (isinstance(error, XrpcError) and error.definite)


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
    rev, active = entry.get("rev"), entry.get("active", True)
    has_rev = isinstance(rev, str) and is_tid(rev)
    if not isinstance(active, bool):
        problem = f"{did}: active is {active!r:.100}"
    elif not has_rev and rev not in (None, ""):
        problem = f"{did}: rev is {rev!r:.100}"
    else:
        problem = None
    status = hosting_status(entry) if active is False else None
    return ListedAccount(did, rev if has_rev else None, active is not False, status), problem
