"""Sparse resyncs from Bluesky's own PDS prove the same records as its exports, also while the repo is written.

The second time, the records of the first time are stored.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from indexer.atproto.crypto import PublicKey, parse_did_key
from indexer.atproto.limits import DEFAULT_LIMITS
from indexer.atproto.syntax import CollectionFilter
from indexer.core.spool import Spool
from indexer.net.http.http_client import OutboundClient, OutboundSettings, Response
from indexer.net.pds.pds_client import PdsClient
from indexer.resync.sparse import SparseFetch, Stored
from indexer.sync.export import Snapshot
from indexer.sync.policy import Policy
from indexer.sync.scope import Scope
from tests.realnet.real_network import RealAccount, RealNetwork, real_network

pytestmark = pytest.mark.proof("realnet")

COLLECTIONS = ("com.example.a", "com.example.a.sub", "com.example.ax", "com.example.b", "org.other.z")
PATTERNS = (["com.example.a"], ["com.example.a.*", "org.other.z"], ["com.example.*"], ["net.none.here"])
WRITES_PER_COMMIT = 200

Records = dict[bytes, bytes | None]
"""The block of each record by its path."""


class WritingClient(PdsClient):
    """A client after whose first proof the account writes: its head moves."""

    writer: "RandomWriter | None" = None

    async def fetch_record_proof(self, *arguments: Any) -> Response:
        response = await super().fetch_record_proof(*arguments)
        writer, self.writer = self.writer, None
        if writer is not None:
            await asyncio.to_thread(writer.write, 40)
        return response


class RandomWriter:
    """Creates, updates and deletes random records of an account. All calls block."""

    def __init__(self, account: RealAccount, seed: int) -> None:
        self.account = account
        self._random = Random(seed)
        self._paths: set[tuple[str, str]] = set()

    def write(self, count: int) -> None:
        """Write records in commits of the largest size."""
        for start in range(0, count, WRITES_PER_COMMIT):
            writes = {
                path: self._write(*path) for path in dict.fromkeys(self._some(min(WRITES_PER_COMMIT, count - start)))
            }
            self.account.apply(list(writes.values()))

    def _some(self, count: int) -> Sequence[tuple[str, str]]:
        weights = [1, 2, 2, 10, 10]
        return [
            (name, f"{self._random.randrange(400):03}") for name in self._random.choices(COLLECTIONS, weights, k=count)
        ]

    def _write(self, collection: str, rkey: str) -> dict[str, Any]:
        exists = (collection, rkey) in self._paths
        action = self._random.choice(("update", "delete")) if exists else "create"
        (self._paths.discard if action == "delete" else self._paths.add)((collection, rkey))
        write = {"$type": f"com.atproto.repo.applyWrites#{action}", "collection": collection, "rkey": rkey}
        return (
            write
            if action == "delete"
            else write | {"value": {"$type": collection, "n": self._random.randrange(1 << 32)}}
        )


def key_of(network: RealNetwork, did: str) -> PublicKey:
    document = httpx.get(f"{network.plc_url}/{did}/data", trust_env=False).json()
    return parse_did_key(document["verificationMethods"]["atproto"])


def records_of(snapshot: Snapshot, policy: Policy, stored: dict[bytes, bytes], before: Records) -> Records:
    """Return all wanted records; `before` has the blocks of those that are `stored`, by path with their CIDs."""
    wanted = policy.scope.collections
    return {
        path: before[path] if stored.get(path) == cid else snapshot.block_of(cid)
        for path, cid in snapshot.records()
        if wanted.matches(path.partition(b"/")[0].decode())
    }


async def exported(pds: PdsClient, account: RealAccount, key: PublicKey, policy: Policy) -> tuple[str, Records]:
    async with pds.open_export(account.did, account.pds.url) as download:
        await download.fetch()
        snapshot = download.reader.verify(account.did, key, DEFAULT_LIMITS)
        return snapshot.head.rev, records_of(snapshot, policy, {}, {})


@pytest.mark.parametrize("records", [0, 1, 60, 1_500])
async def test_sparse_resync_proves_the_records_of_the_export(tmp_path: Path, records: int) -> None:
    with real_network(1, tmp_path) as network:
        account = await asyncio.to_thread(network.pds[0].create_account, "ada")
        key, writer = key_of(network, account.did), RandomWriter(account, records)
        async with OutboundClient(OutboundSettings("test", allow_private_hosts=True)) as outbound:
            pds = WritingClient(outbound, DEFAULT_LIMITS, tmp_path / "spool", Spool)
            sparse, moved = SparseFetch(pds, "always"), 0
            await asyncio.to_thread(writer.write, records)
            for patterns in PATTERNS:
                policy = Policy(Scope(collections=CollectionFilter(patterns)), DEFAULT_LIMITS)
                stored: dict[bytes, bytes] = {}
                records_before: Records = {}
                for writes_meanwhile in (False, True):
                    pds.writer = writer if writes_meanwhile and records else None
                    before = await exported(pds, account, key, policy)
                    download = await sparse.fetch(account.did, account.pds.url, policy, stored=Stored(b"", stored))
                    pds.writer = None
                    assert download is not None
                    snapshot = download.verify(account.did, key, DEFAULT_LIMITS)
                    found = (snapshot.head.rev, records_of(snapshot, policy, stored, records_before))
                    assert found in (before, await exported(pds, account, key, policy))
                    moved += found != before
                    assert None not in found[1].values()
                    stored, records_before = dict(snapshot.records()), found[1]
                await asyncio.to_thread(writer.write, min(records, 50))
            assert moved >= (2 if records > 1 else 0)
