"""A PDS of the local network: serves the repos of its accounts, accepts records, and emits events."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import orjson
from aiohttp import web

from indexer.atproto import cid
from indexer.demo.http_server import HttpServer, XrpcError
from indexer.demo.local_repo import LocalChange, LocalRepo, TidClock, Write, car

CAR_TYPE = "application/vnd.ipld.car"
GET_REPO = "/xrpc/com.atproto.sync.getRepo"
GET_RECORD = "/xrpc/com.atproto.sync.getRecord"
GET_BLOCKS = "/xrpc/com.atproto.sync.getBlocks"
GET_LATEST_COMMIT = "/xrpc/com.atproto.sync.getLatestCommit"
GET_REPO_STATUS = "/xrpc/com.atproto.sync.getRepoStatus"
LIST_REPOS = "/xrpc/com.atproto.sync.listRepos"

_STATUS_ERRORS = {"deactivated": "RepoDeactivated", "takendown": "RepoTakendown", "suspended": "RepoSuspended"}


@dataclass
class HostedRepo:
    """The state of one account on one PDS. `apply_writes` makes a commit, for clients that write records.

    Attributes:
        status: The hosting status; None: active.
    """

    repo: LocalRepo
    apply_writes: Callable[[Sequence[Write]], LocalChange]
    status: str | None = None


class LocalPds(HttpServer):
    """A PDS. It accepts records from everybody, without a password.

    Attributes:
        hosted: The accounts by DID. One that migrated away stays as `deactivated`, a deleted one as `deleted`.
        listeners: Called for each event with this PDS, the DID, the message type (`#commit`, …) and the payload
            without `seq`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.hosted: dict[str, HostedRepo] = {}
        self.listeners: list[Callable[[LocalPds, str, str, dict[str, Any]], None]] = []
        self._rkeys = TidClock()
        self.route(GET_REPO, self._get_repo)
        self.route(GET_RECORD, self._get_record)
        self.route(GET_BLOCKS, self._get_blocks)
        self.route(GET_LATEST_COMMIT, self._get_latest_commit)
        self.route(GET_REPO_STATUS, self._get_repo_status)
        self.route(LIST_REPOS, self._list_repos)
        self.route("/xrpc/com.atproto.repo.createRecord", partial(self._write_record, replace=False), "POST")
        self.route("/xrpc/com.atproto.repo.putRecord", partial(self._write_record, replace=True), "POST")
        self.route("/xrpc/com.atproto.repo.deleteRecord", self._delete_record, "POST")

    def emit(self, did: str, kind: str, payload: dict[str, Any]) -> None:
        """Pass an event to all listeners."""
        for listener in self.listeners:
            listener(self, did, kind, payload)

    async def _get_repo(self, request: web.Request) -> web.Response:
        return web.Response(body=b"".join(self._active(request.query.get("did")).repo.export()), content_type=CAR_TYPE)

    async def _get_record(self, request: web.Request) -> web.Response:
        repo = self._active(request.query.get("did")).repo
        proof = repo.record_proof(f"{request.query.get('collection', '')}/{request.query.get('rkey', '')}")
        return web.Response(body=proof, content_type=CAR_TYPE)

    async def _get_blocks(self, request: web.Request) -> web.Response:
        blocks = self._active(request.query.get("did")).repo.blocks()
        wanted = {cid.parse_cid(text): text for text in request.query.getall("cids", [])}
        if missing := [text for wanted_cid, text in wanted.items() if wanted_cid not in blocks]:
            raise XrpcError("InvalidRequest", f"Could not find cids: {','.join(missing)}")
        body = car({wanted_cid: blocks[wanted_cid] for wanted_cid in wanted}, rootless=True)
        return web.Response(body=body, content_type=CAR_TYPE)

    async def _get_latest_commit(self, request: web.Request) -> web.Response:
        head = self._active(request.query.get("did")).repo.head
        return web.json_response({"cid": cid.cid_text(head.cid), "rev": head.rev})

    async def _get_repo_status(self, request: web.Request) -> web.Response:
        hosted = self._hosted(request.query.get("did"))
        state = {"did": hosted.repo.did, "active": hosted.status is None}
        detail = {"status": hosted.status} if hosted.status else {"rev": hosted.repo.head.rev}
        return web.json_response(state | detail)

    async def _list_repos(self, request: web.Request) -> web.Response:
        entries = [
            None
            if hosted.status == "deleted"
            else repo_entry(did, hosted.repo.head.cid, hosted.repo.head.rev, hosted.status)
            for did, hosted in self.hosted.items()
        ]
        return page_response(request, entries, cursor_on_last_page=True)

    async def _write_record(self, request: web.Request, *, replace: bool) -> web.Response:
        """Create a record, or replace it if that is allowed."""
        hosted, path, fields = await self._written(request)
        exists, record = path in hosted.repo.records, fields.get("record")
        if exists and not replace:
            raise XrpcError("InvalidRequest", f"Record already exists: {path}")
        if not isinstance(record, dict):
            raise XrpcError("InvalidRequest", "record must be an object")
        record = {"$type": path.partition("/")[0], **record}
        try:
            write = Write.update(path, record) if exists else Write.create(path, record)
        except (TypeError, OverflowError) as error:
            raise XrpcError("InvalidRequest", f"record has a value without a DAG-CBOR form: {error}") from None
        commit = _commit(hosted.apply_writes([write]))
        written = cid.cid_text(cid.cid_of(hosted.repo.records[path]))
        return web.json_response({"uri": f"at://{hosted.repo.did}/{path}", "cid": written, "commit": commit})

    async def _delete_record(self, request: web.Request) -> web.Response:
        """Delete a record; do nothing if it does not exist."""
        hosted, path, _ = await self._written(request)
        if path not in hosted.repo.records:
            return web.json_response({})
        return web.json_response({"commit": _commit(hosted.apply_writes([Write.delete(path)]))})

    async def _written(self, request: web.Request) -> tuple[HostedRepo, str, dict[str, Any]]:
        """Return the repo and the path that a request writes, and the fields of the request."""
        try:
            fields = orjson.loads(await request.read())
        except orjson.JSONDecodeError as error:
            raise XrpcError("InvalidRequest", f"the body is not JSON: {error}") from None
        if not isinstance(fields, dict) or not isinstance(fields.get("collection"), str):
            raise XrpcError("InvalidRequest", "the body must be an object with repo, collection and record")
        path = f"{fields['collection']}/{fields.get('rkey') or self._rkeys.tid()}"
        return self._active(fields.get("repo")), path, fields

    def _hosted(self, did: str | None) -> HostedRepo:
        hosted = self.hosted.get(did or "")
        if hosted is None or hosted.status == "deleted":
            raise XrpcError("RepoNotFound", f"Could not find repo for DID: {did}")
        return hosted

    def _active(self, did: str | None) -> HostedRepo:
        hosted = self._hosted(did)
        if hosted.status is not None:
            raise XrpcError(_STATUS_ERRORS[hosted.status], f"Repo has been {hosted.status}: {hosted.repo.did}")
        return hosted


def _commit(change: LocalChange) -> dict[str, str]:
    return {"cid": cid.cid_text(change.commit.cid), "rev": change.commit.rev}


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
    name: str = "repos",
) -> web.Response:
    """Return the page of a list that `cursor` and `limit` of the request name. It leaves out entries that are None.

    With `cursor_on_last_page`, pages have a cursor until one is empty, as at reference PDSes. Relays omit the last one.
    """
    start, limit = _parse_number(request, "cursor", 0, 1 << 31), _parse_number(request, "limit", 500, max_limit)
    end = start + limit
    body: dict[str, Any] = {name: [entry for entry in entries[start:end] if entry is not None]}
    if end < len(entries) or (cursor_on_last_page and start < len(entries)):
        body["cursor"] = str(min(end, len(entries)))
    return web.json_response(body)


def _parse_number(request: web.Request, name: str, default: int, maximum: int) -> int:
    text = request.query.get(name, str(default))
    if not text.isdecimal() or int(text) > maximum:
        raise XrpcError("InvalidRequest", f"{name} must be at most {maximum}")
    return int(text)
