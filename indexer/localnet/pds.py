"""A personal data server: what it serves of its accounts' repositories, and the events that it emits."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import hdrs, web

from indexer.atproto import cid
from indexer.localnet.repo import Repo
from indexer.localnet.server import Answer, Refused, Server, json_answer

CAR_TYPE = "application/vnd.ipld.car"
GET_REPO = "/xrpc/com.atproto.sync.getRepo"
GET_LATEST_COMMIT = "/xrpc/com.atproto.sync.getLatestCommit"
GET_REPO_STATUS = "/xrpc/com.atproto.sync.getRepoStatus"
LIST_REPOS = "/xrpc/com.atproto.sync.listRepos"

_STATUS_ERRORS = {
    "deactivated": "RepoDeactivated",
    "takendown": "RepoTakendown",
    "suspended": "RepoSuspended",
}


@dataclass
class Hosted:
    """One account as one host has it; `status` None is active."""

    repo: Repo
    handle: str
    status: str | None = None


class Pds(Server):
    """`hosted` by DID: accounts that have moved away stay there deactivated, deleted ones stay as deleted.

    Every one of `listeners` gets each event: this host, the DID, the message type (`#commit` …), the payload
    without its `seq`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.hosted: dict[str, Hosted] = {}
        self.listeners: list[Callable[[Pds, str, str, dict[str, Any]], None]] = []
        self.route(GET_REPO, self._get_repo)
        self.route(GET_LATEST_COMMIT, self._get_latest_commit)
        self.route(GET_REPO_STATUS, self._get_repo_status)
        self.route(LIST_REPOS, self._list_repos)
        self.route("/.well-known/atproto-did", self._resolve_handle)

    def emit(self, did: str, kind: str, payload: dict[str, Any]) -> None:
        for listener in self.listeners:
            listener(self, did, kind, payload)

    def _get_repo(self, request: web.Request) -> Answer:
        return Answer(self._active(request).repo.export(), headers={hdrs.CONTENT_TYPE: CAR_TYPE})

    def _get_latest_commit(self, request: web.Request) -> Answer:
        head = self._active(request).repo.head
        return json_answer({"cid": cid.cid_text(head.cid), "rev": head.rev})

    def _get_repo_status(self, request: web.Request) -> Answer:
        hosted = self._hosted(request)
        state = {"did": hosted.repo.did, "active": hosted.status is None}
        detail = {"status": hosted.status} if hosted.status else {"rev": hosted.repo.head.rev}
        return json_answer(state | detail)

    def _list_repos(self, request: web.Request) -> Answer:
        rows = [
            None
            if hosted.status == "deleted"
            else repo_row(did, hosted.repo.head.cid, hosted.repo.head.rev, hosted.status)
            for did, hosted in self.hosted.items()
        ]
        return page_answer(request, rows, cursor_on_last_page=True)

    def _resolve_handle(self, request: web.Request) -> Answer:
        for did, hosted in self.hosted.items():
            if hosted.handle == request.url.host and hosted.status is None:
                return Answer((did.encode(),), headers={hdrs.CONTENT_TYPE: "text/plain"})
        return Answer((b"User not found",), 404, {hdrs.CONTENT_TYPE: "text/plain"})

    def _hosted(self, request: web.Request) -> Hosted:
        did = request.query.get("did", "")
        hosted = self.hosted.get(did)
        if hosted is None or hosted.status == "deleted":
            raise Refused("RepoNotFound", f"Could not find repo for DID: {did}")
        return hosted

    def _active(self, request: web.Request) -> Hosted:
        hosted = self._hosted(request)
        if hosted.status is not None:
            raise Refused(_STATUS_ERRORS[hosted.status], f"Repo has been {hosted.status}: {hosted.repo.did}")
        return hosted


def repo_row(did: str, head: bytes, rev: str, status: str | None) -> dict[str, Any]:
    """An entry of `listRepos`."""
    row = {"did": did, "head": cid.cid_text(head), "rev": rev, "active": status is None}
    return row | {"status": status} if status else row


def page_answer(
    request: web.Request, rows: Sequence[dict[str, Any] | None], *, cursor_on_last_page: bool, most: int = 1_000
) -> Answer:
    """One page of `listRepos`, of at most `most` entries: `rows` are all, None at the place of one that is gone.

    A reference host gives a cursor until a page is empty, a relay omits it on the last page.
    """
    try:
        start, limit = int(request.query.get("cursor", "0")), int(request.query.get("limit", "500"))
    except ValueError:
        raise Refused("InvalidRequest", "cursor and limit must be integers") from None
    if start < 0 or not 0 < limit <= most:
        raise Refused("InvalidRequest", f"limit must be 1 to {most}")
    end = start + limit
    body: dict[str, Any] = {"repos": [row for row in rows[start:end] if row is not None]}
    if end < len(rows) or (cursor_on_last_page and start < len(rows)):
        body["cursor"] = str(min(end, len(rows)))
    return json_answer(body)
