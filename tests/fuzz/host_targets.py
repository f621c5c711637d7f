"""Answers of hosts to requests: lists and states of repos, and errors."""

import json
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from indexer.atproto.cid import cid_text
from indexer.atproto.limits import DEFAULT_LIMITS
from indexer.errors import UnavailableError
from indexer.pds.pds_client import PdsClient
from indexer.pds.repo_list import ListedAccount, RepoStatus, fetch_repo_status, list_repos
from indexer.reasons import FetchFailure
from indexer.sync.frames import MAX_STATUS_CHARACTERS
from tests.fuzz import syntax_reference as reference
from tests.fuzz.comparison import DifferenceError
from tests.fuzz.examples import DID, TID
from tests.fuzz.fixed_response import HostAnswers
from tests.fuzz.outcome_counts import OutcomeCounts
from tests.fuzz.seeds import LINK

HOST = "https://pds.test"
STATUSES = (200, 200, 200, 400, 404, 429, 501, 503)
FAILURES = frozenset(
    {
        FetchFailure.BAD_ANSWER,
        FetchFailure.HTTP_STATUS,
        FetchFailure.REPO_DEACTIVATED,
        FetchFailure.REPO_NOT_FOUND,
        FetchFailure.REPO_SUSPENDED,
        FetchFailure.REPO_TAKENDOWN,
        FetchFailure.THROTTLED,
    }
)
"""The reasons that the answer of a host can be."""
CURSOR = "cursor-before"


class RepoLists(HostAnswers):
    """Pages of `listRepos` and, for half of the inputs, of `listReposByCollection`."""

    def __init__(self) -> None:
        super().__init__(STATUSES)
        self.counts = OutcomeCounts("pages", "last pages", "accounts", "invalid entries", "refused")

    def seeds(self, random: Random, count: int) -> list[bytes]:
        """Return pages of up to 30 accounts, and errors."""
        entries = [
            {"did": DID, "head": cid_text(LINK), "rev": TID, "active": True},
            {"did": DID, "head": "", "rev": "", "active": False, "status": "takendown"},
            {"did": "did:web:bob.test"},
            {"did": "did:plc:"},
            {"did": DID, "rev": "x"},
        ]
        pages = [
            {"cursor": cursor, "repos": random.choices(entries, k=size)}
            for size in (0, 1, 3, 30)
            for cursor in ("10", None, "", CURSOR)
        ]
        bodies = [json.dumps(page).encode() for page in [*pages, {"repos": []}, _error("RepoNotFound")]]
        return [bytes([n % len(STATUSES)]) + bodies[n % len(bodies)] for n in range(count)]

    def compare(self, data: bytes) -> None:
        """Read a page. Raises `DifferenceError`."""
        self.counts.executions += 1
        status, collection = self.answer(data), "app.bsky.feed.post" if len(data) % 2 else ""
        try:
            page = self._loop.run_until_complete(list_repos(self._client, HOST, collection, CURSOR))
        except UnavailableError as error:
            _check_failure(error, status)
            self.counts.add("refused")
            return
        body = json.loads(data[1:])
        accounts = [_listed(entry) for entry in body["repos"] if _is_account(entry)]
        expected = (accounts, len(body["repos"]) - len(accounts), body.get("cursor") or None)
        if status != 200 or (list(page.accounts), page.invalid_entries, page.cursor) != expected:
            raise DifferenceError(f"reference: {expected}\nfound: {page}")
        if page.cursor in ("", CURSOR) or "\0" in (page.cursor or "") or len(page.cursor or "") > 2_048:
            raise DifferenceError(f"the cursor {page.cursor!r} cannot be stored, or leads to itself")
        self.counts.add("pages" if page.cursor else "last pages")
        self.counts.add("accounts", len(page.accounts))
        self.counts.add("invalid entries", page.invalid_entries)


def _is_account(entry: Any) -> bool:
    """Return True if an entry of a list has a DID, a TID or nothing as rev, and a boolean or nothing as `active`."""
    if not isinstance(entry, dict) or not isinstance(entry.get("active", True), bool):
        return False
    did, rev = entry.get("did"), entry.get("rev")
    has_rev = rev is None or rev == "" or (isinstance(rev, str) and reference.is_tid(rev))
    return has_rev and isinstance(did, str) and reference.is_did(did)


def _listed(entry: dict[str, Any]) -> ListedAccount:
    """Return the account of a valid entry."""
    return ListedAccount(entry["did"], entry.get("rev") or None, entry.get("active", True))


class RepoStates(HostAnswers):
    """Answers to `getRepoStatus` and `getLatestCommit`, and error bodies."""

    def __init__(self) -> None:
        super().__init__(STATUSES)
        self._directory = TemporaryDirectory(prefix="indexer-fuzz-")
        self._pds = PdsClient(self._client, DEFAULT_LIMITS, Path(self._directory.name))
        self.counts = OutcomeCounts("states", "commits", "errors", "known errors", "bad answers")

    def close(self) -> None:
        """Close the event loop, and remove the directory."""
        super().close()
        self._directory.cleanup()

    def seeds(self, _: Random, count: int) -> list[bytes]:
        """Return states, commits and errors."""
        names = ("RepoNotFound", "RepoTakendown", "RepoSuspended", "RepoDeactivated", "RateLimitExceeded", "Other")
        bodies = [
            {"did": DID, "active": True, "rev": TID},
            {"did": DID, "active": False, "status": "takendown" * 20},
            {"cid": cid_text(LINK), "rev": TID},
            *map(_error, (*names, "MethodNotImplemented")),
        ]
        made = [json.dumps(body).encode() for body in bodies] + [b"<html>", b""]
        return [bytes([n % len(STATUSES)]) + made[n % len(made)] for n in range(count)]

    def compare(self, data: bytes) -> None:
        """Read an answer as one to each of the two requests. Raises `DifferenceError`."""
        self.counts.executions += 1
        status = self.answer(data)
        try:
            state = self._loop.run_until_complete(fetch_repo_status(self._client, HOST, DID))
        except UnavailableError as error:
            self._count(error, status)
        else:
            body = json.loads(data[1:])
            text = body.get("status")
            expected = RepoStatus(body["active"], text and text[:MAX_STATUS_CHARACTERS], body.get("rev"))
            if status != 200 or state != expected or not isinstance(state.active, bool):
                raise DifferenceError(f"reference: {expected}\nfound: {state}")
            self.counts.add("states")
        try:
            cid, rev = self._loop.run_until_complete(self._pds.fetch_latest_commit(DID, HOST))
        except UnavailableError as error:
            self._count(error, status)
        else:
            body = json.loads(data[1:])
            if (cid_text(cid), rev) != (body["cid"], body["rev"]) or not reference.is_tid(rev) or status != 200:
                raise DifferenceError(f"the latest commit {cid_text(cid)} at {rev}")
            self.counts.add("commits")

    def _count(self, error: UnavailableError, status: int) -> None:
        _check_failure(error, status)
        known = FAILURES - {FetchFailure.BAD_ANSWER, FetchFailure.HTTP_STATUS}
        self.counts.add("bad answers" if status == 200 else "known errors" if error.reason in known else "errors")


def _error(name: str) -> dict[str, str]:
    return {"error": name, "message": f"Could not do it: {name}"}


def _check_failure(error: UnavailableError, status: int) -> None:
    """Raise `DifferenceError` unless the reason is documented, and that of a bad answer has the status 200."""
    if error.reason not in FAILURES or (error.reason is FetchFailure.BAD_ANSWER) != (status == 200):
        raise DifferenceError(f"undocumented reason {error.reason} for the status {status}") from error
    if len(str(error)) > 500:
        raise DifferenceError(f"a message of {len(str(error))} characters") from error
