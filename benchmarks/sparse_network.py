"""The network of `benchmarks.sparse`: a relay, a Jetstream, and PDSes with large repos whose commits cost little.

Programs use the servers through proxies on loopback that count bytes and requests.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from random import Random
from time import monotonic
from typing import Any

import orjson

from benchmarks.growing_tree import GrowingNode
from benchmarks.signing_accounts import SigningAccount, did_of
from indexer.atproto.cid import cid_of, cid_text
from indexer.atproto.limits import DEFAULT_LIMITS
from indexer.atproto.record import decode_record
from indexer.demo.http_server import LOOPBACK, HttpServer
from indexer.demo.local_account import commit_payload
from indexer.demo.local_network import LocalNetwork
from indexer.demo.local_pds import HostedRepo, LocalPds
from indexer.demo.local_plc import LocalIdentity
from indexer.demo.local_repo import LocalChange, LocalRepo, Write, car
from tests.local_jetstream import LocalJetstream

TIME = "2026-01-01T00:00:00.000Z"
_READ_BYTES = 1 << 16
_REQUEST_LINE = b" HTTP/1.1\r\n"
_STRANGERS = 1_000
_STRANGE_EVENTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("#identity", {"handle": "stranger.example.com"}),
    ("#account", {"active": True}),
)


@dataclass(slots=True)
class Proxy:
    """A proxy, and what has passed it.

    Attributes:
        url: Its URL.
        bytes: Bytes in both directions, without those of TCP.
        requests: HTTP requests, with those that open websockets.
    """

    url: str = ""
    bytes: int = 0
    requests: int = 0


@asynccontextmanager
async def counted(server: HttpServer) -> AsyncIterator[Proxy]:
    """Forward connections to a server that is running, and count their bytes."""
    proxy = Proxy()

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(_READ_BYTES):
                proxy.bytes += len(data)
                proxy.requests += data.count(_REQUEST_LINE)
                writer.write(data)
                await writer.drain()
        writer.close()

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_server, to_server = await asyncio.open_connection(server.host, server.port)
        await asyncio.gather(copy(reader, to_server), copy(from_server, writer))

    async with await asyncio.start_server(forward, LOOPBACK, 0) as listener:
        proxy.url = f"http://{LOOPBACK}:{listener.sockets[0].getsockname()[1]}"
        yield proxy


class GrowingRepo(LocalRepo):
    """The repo of a `SigningAccount`, whose commits cost little, however many records it has."""

    def __init__(self, account: SigningAccount, pds: LocalPds) -> None:
        self.did, self.records, self.head, self.account = account.did, account.records, account.head, account
        self.pds = pds

    def commit(self, collections: Sequence[str] = ()) -> LocalChange:
        """Make a commit; see `SigningAccount`."""
        change = self.account.commit(collections)
        self.head = change.commit
        return change

    def record_proof(self, path: str) -> bytes:
        """See `LocalRepo`."""
        blocks = [node.block for node in self.account.tree.search(path)]
        blocks += [self.records[path]] if path in self.records else []
        return car({self.head.cid: self.head.block} | {cid_of(block): block for block in blocks})

    def blocks(self) -> dict[bytes, bytes]:
        """See `LocalRepo`."""
        nodes = [item for item in self.account.tree.root.walk() if isinstance(item, GrowingNode)]
        entries = [entry for node in nodes for entry in zip(node.keys, node.values, strict=True)]
        records = {cid: self.records[path] for path, cid in entries}
        return {self.head.cid: self.head.block} | {node.cid: node.block for node in nodes} | records

    def export(self) -> Iterator[bytes]:
        """See `LocalRepo`."""
        yield self.account.export()


class SparseNetwork(LocalNetwork):
    """The network.

    Attributes:
        proxies: The proxies of the PDSes, whose URLs the directory has.
        repos: The repos of all tracked accounts.
    """

    def __init__(self, hosts: int) -> None:
        super().__init__(pds=hosts)
        self.jetstream = LocalJetstream(self)
        self.jetstream.rewrite = self._fill
        self.servers.append(self.jetstream)
        self.proxies: Sequence[Proxy] = ()
        self.repos: dict[str, GrowingRepo] = {}

    def host(self, account: SigningAccount) -> GrowingRepo:
        """Add an account, on the PDSes in turn."""
        number = len(self.repos) % len(self.pdses)
        pds = self.pdses[number]
        repo = self.repos[account.did] = GrowingRepo(account, pds)
        pds.hosted[repo.did] = HostedRepo(repo, _refuse)
        self.plc.publish(repo.did, LocalIdentity("", account.key.public.did_key(), self.proxies[number].url))
        return repo

    async def send(self, collection: str, wanted: int, events: int, rate: float, strangers: float) -> None:
        """Send commits at a rate per second, evenly `wanted` of them with a new record of the collection.

        There are also `strangers` per second of `#identity` and `#account` events, of accounts that are not tracked.
        """
        random, repos, began, sent = Random(events), list(self.repos.values()), monotonic(), 0
        for number in range(events):
            await asyncio.sleep(max(0.0, began + number / rate - monotonic()))
            due = number * wanted // events < (number + 1) * wanted // events
            repo = random.choice(repos)
            repo.pds.emit(repo.did, "#commit", commit_payload(repo.did, repo.commit([collection] * due), TIME))
            while sent < number * strangers / rate:
                kind, state = _STRANGE_EVENTS[sent % len(_STRANGE_EVENTS)]
                stranger = did_of(-random.randrange(1, _STRANGERS))
                repo.pds.emit(stranger, kind, {"did": stranger, "time": TIME} | state)
                sent += 1

    def _fill(self, event: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Add the record, as a Jetstream does: its bytes count."""
        commit = event.get("commit", {})
        if "record" in commit:
            block = self.repos[event["did"]].records[f"{commit['collection']}/{commit['rkey']}"]
            decoded = decode_record(block, commit["collection"], DEFAULT_LIMITS)
            commit |= {"record": orjson.Fragment(decoded.json or "null"), "cid": cid_text(cid_of(block))}
        yield event

    def records(self, collection: str) -> set[tuple[str, str, bytes]]:
        """Return DID, path and CID of all records of a collection."""
        return {
            (repo.did, path, cid_of(block))
            for repo in self.repos.values()
            for path, block in repo.records.items()
            if path.startswith(f"{collection}/")
        }


def _refuse(_writes: Sequence[Write]) -> LocalChange:
    raise NotImplementedError


@asynccontextmanager
async def sparse_network(hosts: int) -> AsyncIterator[SparseNetwork]:
    """Run the network, with so many PDSes."""
    async with SparseNetwork(hosts) as network, AsyncExitStack() as stack:
        network.proxies = [await stack.enter_async_context(counted(pds)) for pds in network.pdses]
        yield network
