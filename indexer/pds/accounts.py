"""The accounts of a relay or a PDS: listed page by page, and asked for one by one (spec §2.2)."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from indexer.atproto.syntax import is_did, is_tid
from indexer.errors import UnavailableError
from indexer.outbound import Outbound
from indexer.pds.xrpc import query
from indexer.reasons import FetchFailure

_PAGE = 1_000
_PAGE_OF_COLLECTION = 2_000
_PAGE_BYTES = 4 * 1024 * 1024
_PAGE_SECONDS = 60.0
_CURSOR_CHARACTERS = 2_048
_STATUS_BYTES = 65_536
_STATUS_SECONDS = 20.0


class Account(NamedTuple):
    """An entry: `rev` is None in the list of a collection, which tells of active accounts as of others."""

    did: str
    rev: str | None = None
    active: bool = True


@dataclass(frozen=True, slots=True)
class Page:
    """Accounts in the host's order; `refused` entries were none. `cursor` is None on the last page."""

    accounts: tuple[Account, ...]
    refused: int
    cursor: str | None


@dataclass(frozen=True, slots=True)
class RepoStatus:
    """What a host says of an account: `active` decides, `status` explains (an open set), `rev` if active."""

    active: bool
    status: str | None
    rev: str | None


async def list_repos(outbound: Outbound, host: str, collection: str, cursor: str | None) -> Page:
    """The page behind `cursor` of all accounts of `host` (`listRepos`), or, unless it is empty, of those that may have
    records of `collection` (`listReposByCollection`).

    The pages are as long as `host` will have them. Raises `UnavailableError`, BAD_ANSWER for what is no page.
    """
    method = "com.atproto.sync.listReposByCollection" if collection else "com.atproto.sync.listRepos"
    parameters = {"limit": str(_PAGE_OF_COLLECTION if collection else _PAGE)}
    parameters |= {"collection": collection} if collection else {}
    parameters |= {"cursor": cursor} if cursor is not None else {}
    answer = await query(outbound, host, method, parameters, max_bytes=_PAGE_BYTES, seconds=_PAGE_SECONDS)
    entries, behind = answer.get("repos"), answer.get("cursor")
    if not isinstance(entries, list) or not isinstance(behind, str | None) or len(behind or "") > _CURSOR_CHARACTERS:
        raise UnavailableError(FetchFailure.BAD_ANSWER, f"{method}: not a page")
    if behind is not None and behind == cursor:
        raise UnavailableError(FetchFailure.BAD_ANSWER, f"{method}: the list goes round at {cursor!r:.100}")
    accounts = [account for entry in entries if (account := _account(entry))]
    return Page(tuple(accounts), len(entries) - len(accounts), behind or None)


async def repo_status(outbound: Outbound, host: str, did: str) -> RepoStatus:
    """The account's hosting status (`getRepoStatus`). Raises `UnavailableError`: REPO_NOT_FOUND if it isn't there."""
    method = "com.atproto.sync.getRepoStatus"
    answer = await query(outbound, host, method, {"did": did}, max_bytes=_STATUS_BYTES, seconds=_STATUS_SECONDS)
    active, status, rev = answer.get("active"), answer.get("status"), answer.get("rev")
    if not isinstance(active, bool) or not isinstance(status, str | None) or not isinstance(rev, str | None):
        raise UnavailableError(FetchFailure.BAD_ANSWER, f"no status: {answer}"[:200])
    return RepoStatus(active, status, rev)


def _account(entry: Any) -> Account | None:
    if not isinstance(entry, dict):
        return None
    did, rev, active = entry.get("did"), entry.get("rev"), entry.get("active", True)
    if not isinstance(did, str) or not is_did(did) or not isinstance(active, bool):
        return None
    if rev is not None and not (isinstance(rev, str) and is_tid(rev)):
        return None
    return Account(did, rev, active)
