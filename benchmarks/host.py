"""The load of `benchmarks.resync`, a process of its own: hosts with a world's exports, and a directory of its keys.

It says on its standard output, in lines of JSON: the directory's `url`, and the URLs of all `hosts`. It ends with its
standard input.
"""

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

import orjson
from aiohttp import hdrs, web

from benchmarks.world import Account, World
from indexer.atproto.cid import cid_text
from indexer.localnet.pds import CAR_TYPE, GET_LATEST_COMMIT, GET_REPO
from indexer.localnet.plc import Identity, did_document
from indexer.sync.shard import bucket_of

HOSTS = 16  # that share the accounts: a host of its own has places and a pace of its own in the daemon
PIECE = 1 << 18


def host_of(did: str, hosts: Sequence[str]) -> str:
    """The URL of an account's host."""
    return hosts[bucket_of(did) % len(hosts)]


class Host:
    def __init__(self, world: World) -> None:
        self._world = world
        self._accounts = {account.did: account for account in world.accounts}
        self.urls: list[str] = []

    async def run(self) -> None:
        application = web.Application()
        application.router.add_get(GET_REPO, self._repo)
        application.router.add_get(GET_LATEST_COMMIT, self._latest_commit)
        application.router.add_get("/{did}", self._document)
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        for _ in range(HOSTS):
            await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.urls = [f"http://127.0.0.1:{port}" for _, port in runner.addresses]
        for said in ({"url": self.urls[0]}, {"hosts": self.urls}):
            sys.stdout.buffer.write(orjson.dumps(said) + b"\n")
        sys.stdout.buffer.flush()
        await asyncio.to_thread(sys.stdin.read)
        await runner.cleanup()

    async def _repo(self, request: web.Request) -> web.StreamResponse:
        start, end = self._account(request).export
        response = web.StreamResponse(headers={hdrs.CONTENT_TYPE: CAR_TYPE})
        response.content_length = end - start
        await response.prepare(request)
        for place in range(start, end, PIECE):
            await response.write(self._world.exports[place : min(place + PIECE, end)])
        return response

    async def _latest_commit(self, request: web.Request) -> web.Response:
        head = self._account(request).after
        return web.json_response({"cid": cid_text(bytes.fromhex(head.commit)), "rev": head.rev})

    async def _document(self, request: web.Request) -> web.Response:
        account = self._accounts[request.match_info["did"]]
        identity = Identity("person.test", account.key, host_of(account.did, self.urls))
        return web.json_response(did_document(account.did, identity))

    def _account(self, request: web.Request) -> Account:
        return self._accounts[request.query["did"]]


if __name__ == "__main__":
    asyncio.run(Host(World(Path(sys.argv[1]))).run())
