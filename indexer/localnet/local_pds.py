"""A PDS of the local network: serves the repos of its accounts and emits their events."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import hdrs, web

from indexer.atproto import cid
from indexer.localnet.http_server import HttpServer, ServerResponse, XrpcError, json_response
from indexer.localnet.local_repo import LocalRepo

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
class HostedRepo:
    """The state of one account on one PDS.

    Attributes:
        repo: The repo of the account.
        handle: The handle for which the PDS serves `/.well-known/atproto-did`.
        status: The hosting status; None: active.
    """

    repo: LocalRepo
    handle: str
    status: str | None = None


class LocalPds(HttpServer):
    """A PDS.

    Attributes:
        hosted: The accounts by DID. One that migrated away stays as `deactivated`, a deleted one as `deleted`.
        listeners: Called for each event with this PDS, the DID, the message type (`#commit`, …) and the payload
            without `seq`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.hosted: dict[str, HostedRepo] = {}
        self.listeners: list[Callable[[LocalPds, str, str, dict[str, Any]], None]] = []
        self.route(GET_REPO, self._get_repo)
        self.route(GET_LATEST_COMMIT, self._get_latest_commit)
        self.route(GET_REPO_STATUS, self._get_repo_status)
        self.route(LIST_REPOS, self._list_repos)
        self.route("/.well-known/atproto-did", self._resolve_handle)

    def emit(self, did: str, kind: str, payload: dict[str, Any]) -> None:
        """Pass an event to all listeners."""
        for listener in self.listeners:
            listener(self, did, kind, payload)

    def _get_repo(self, request: web.Request) -> ServerResponse:
        return ServerResponse(self._active(request).repo.export(), headers={hdrs.CONTENT_TYPE: CAR_TYPE})

    def _get_latest_commit(self, request: web.Request) -> ServerResponse:
        head = self._active(request).repo.head
        return json_response({"cid": cid.cid_text(head.cid), "rev": head.rev})

    def _get_repo_status(self, request: web.Request) -> ServerResponse:
        hosted = self._hosted(request)
        state = {"did": hosted.repo.did, "active": hosted.status is None}
        detail = {"status": hosted.status} if hosted.status else {"rev": hosted.repo.head.rev}
        return json_response(state | detail)

    def _list_repos(self, request: web.Request) -> ServerResponse:
        entries = [
            None
            if hosted.status == "deleted"
            else repo_entry(did, hosted.repo.head.cid, hosted.repo.head.rev, hosted.status)
            for did, hosted in self.hosted.items()
        ]
        return page_response(request, entries, cursor_on_last_page=True)

    def _resolve_handle(self, request: web.Request) -> ServerResponse:
        for did, hosted in self.hosted.items():
            if hosted.handle == request.url.host and hosted.status is None:
                return ServerResponse((did.encode(),), headers={hdrs.CONTENT_TYPE: "text/plain"})
        return ServerResponse((b"User not found",), 404, {hdrs.CONTENT_TYPE: "text/plain"})

    def _hosted(self, request: web.Request) -> HostedRepo:
        did = request.query.get("did", "")
        hosted = self.hosted.get(did)
        if hosted is None or hosted.status == "deleted":
            raise XrpcError("RepoNotFound", f"Could not find repo for DID: {did}")
        return hosted

    def _active(self, request: web.Request) -> HostedRepo:
        hosted = self._hosted(request)
        if hosted.status is not None:
            raise XrpcError(_STATUS_ERRORS[hosted.status], f"Repo has been {hosted.status}: {hosted.repo.did}")
        return hosted


def repo_entry(did: str, head: bytes, rev: str, status: str | None) -> dict[str, Any]:
    """Return an entry of `listRepos`."""
    entry = {"did": did, "head": cid.cid_text(head), "rev": rev, "active": status is None}
    return entry | {"status": status} if status else entry


def page_response(
    request: web.Request,
    entries: Sequence[dict[str, Any] | None],
    *,
    cursor_on_last_page: bool,
    max_limit: int = 1_000,
) -> ServerResponse:
    """Return one page of a list.

    Args:
        request: The request with `cursor` and `limit`.
        entries: The whole list; None for an entry that no longer exists.
        cursor_on_last_page: Send a cursor until a page is empty, as reference PDSes do. Relays omit the cursor on the
            last page.
        max_limit: The highest `limit` that is accepted.

    Raises:
        XrpcError: `cursor` or `limit` is invalid.
    """
    try:
        start, limit = int(request.query.get("cursor", "0")), int(request.query.get("limit", "500"))
    except ValueError:
        raise XrpcError("InvalidRequest", "cursor and limit must be integers") from None
    if start < 0 or not 0 < limit <= max_limit:
        raise XrpcError("InvalidRequest", f"limit must be 1 to {max_limit}")
    end = start + limit
    body: dict[str, Any] = {"repos": [entry for entry in entries[start:end] if entry is not None]}
    if end < len(entries) or (cursor_on_last_page and start < len(entries)):
        body["cursor"] = str(min(end, len(entries)))
    return json_response(body)
