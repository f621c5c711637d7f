"""The hosts of `benchmarks.resync` and `benchmarks.peers`, a separate process: PDSes with exports, and a PLC directory.

Standard output has one JSON object per line: the `url` of the directory, and the URLs of all `hosts`. The process ends
when its standard input ends.
"""

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

import orjson
from aiohttp import hdrs, web

from benchmarks.workload import Workload, WorkloadAccount
from indexer.atproto.cid import cid_text
from indexer.demo.local_pds import CAR_TYPE, GET_LATEST_COMMIT, GET_REPO
from indexer.demo.local_plc import LocalIdentity, did_document
from indexer.sync.shard import bucket_of

HOSTS = 16
"""PDSes that share the accounts. The daemon limits concurrency and rate per host."""
CHUNK_BYTES = 1 << 18


def host_of(did: str, hosts: Sequence[str]) -> str:
    """Return the URL of an account's PDS."""
    return hosts[bucket_of(did) % len(hosts)]


class ExportHost:
    """An HTTP server on several ports.

    Attributes:
        urls: The URLs of the ports.
    """

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._accounts = {account.did: account for account in workload.accounts}
        self.urls: list[str] = []

    async def run(self) -> None:
        """Serve until standard input ends."""
        application = web.Application()
        application.router.add_get(GET_REPO, self._repo)
        application.router.add_get(GET_LATEST_COMMIT, self._latest_commit)
        application.router.add_get("/{did}", self._document)
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        for _ in range(HOSTS):
            await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.urls = [f"http://127.0.0.1:{port}" for _, port in runner.addresses]
        for fields in ({"url": self.urls[0]}, {"hosts": self.urls}):
            sys.stdout.buffer.write(orjson.dumps(fields) + b"\n")
        sys.stdout.buffer.flush()
        await asyncio.to_thread(sys.stdin.read)
        await runner.cleanup()

    async def _repo(self, request: web.Request) -> web.StreamResponse:
        start, end = self._account(request).export
        response = web.StreamResponse(headers={hdrs.CONTENT_TYPE: CAR_TYPE})
        response.content_length = end - start
        await response.prepare(request)
        for offset in range(start, end, CHUNK_BYTES):
            await response.write(self._workload.exports[offset : min(offset + CHUNK_BYTES, end)])
        return response

    async def _latest_commit(self, request: web.Request) -> web.Response:
        head = self._account(request).exported
        return web.json_response({"cid": cid_text(bytes.fromhex(head.commit)), "rev": head.rev})

    async def _document(self, request: web.Request) -> web.Response:
        account = self._accounts[request.match_info["did"]]
        identity = LocalIdentity("", account.key, host_of(account.did, self.urls))
        # Without a handle nobody looks one up: that would be the only request that leaves this machine.
        return web.json_response(did_document(account.did, identity) | {"alsoKnownAs": []})

    def _account(self, request: web.Request) -> WorkloadAccount:
        return self._accounts[request.query["did"]]


if __name__ == "__main__":
    asyncio.run(ExportHost(Workload(Path(sys.argv[1]))).run())
