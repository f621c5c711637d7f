"""`python -m benchmarks.sparse`: bytes and requests of a sparse resync, compared with the export of the same repo.

The repo has many likes, and wanted records in one other collection, all with random TIDs as keys. Then it gets one more
record, of which a hint names the path. The PDS is on loopback. Bytes are those of the bodies.
"""

import asyncio
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import click

from benchmarks.report import Figures, machine, show
from indexer.atproto.cid import DAG_CBOR, cid_of, cid_text
from indexer.atproto.crypto import PrivateKey
from indexer.atproto.limits import DEFAULT_LIMITS
from indexer.atproto.syntax import MAX_CLOCK_ID, MAX_TID_MICROS, CollectionFilter, tid_of
from indexer.core.spool import Spool
from indexer.demo import dag_cbor
from indexer.demo.local_pds import HostedRepo, LocalPds
from indexer.demo.local_repo import LocalRepo, Write
from indexer.net.http.http_client import OutboundClient, OutboundSettings, Response
from indexer.net.pds.pds_client import PdsClient
from indexer.resync.sparse import SparseDownload, SparseFetch, Stored
from indexer.sync.policy import Policy
from indexer.sync.scope import Scope

LIKE, WANTED = "app.bsky.feed.like", "com.example.note"
KEY = PrivateKey.from_seed("k256", b"sparse")
POLICY = Policy(replace(Scope(), collections=CollectionFilter([WANTED])), DEFAULT_LIMITS)


@click.command()
@click.option("--likes", default=50_000, show_default=True, help="Number of other records.")
@click.option("--wanted", default=30, show_default=True, help="Number of wanted records.")
@click.option("--repos", default=5, show_default=True, help="Number of repos; the figures are means.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def main(likes: int, wanted: int, repos: int, as_json: bool) -> None:
    """Compare sparse resyncs with exports."""
    show({"machine": machine(), f"{wanted} of {likes:,}": asyncio.run(measure(likes, wanted, repos))}, as_json=as_json)


class CountingClient(OutboundClient):
    """Counts what it receives."""

    def __init__(self) -> None:
        super().__init__(OutboundSettings("benchmark", allow_private_hosts=True))
        self.counts = Counter[str]()

    async def get(self, *arguments: Any, **options: Any) -> Response:
        """See `OutboundClient`."""
        response = await super().get(*arguments, **options)
        self.counts.update({"requests": 1, "bytes": len(response.body)})
        return response


async def measure(likes: int, wanted: int, repos: int) -> Figures:
    """Return the figures, means of so many repos."""
    pds, export, blocks, whole, new = LocalPds(), 0, 0, Counter[str](), Counter[str]()
    await pds.start()
    with TemporaryDirectory() as directory:
        async with CountingClient() as outbound:
            sparse = SparseFetch(PdsClient(outbound, DEFAULT_LIMITS, Path(directory), Spool), "auto")
            for number in range(repos):
                repo = make_repo(number, likes, wanted)
                pds.hosted[repo.did] = HostedRepo(repo, lambda _: repo.first)  # noqa: B023 - nobody writes
                export += sum(map(len, repo.export()))
                blocks += len((await fetch(sparse, repo, pds.url, Stored(), wanted)).blocks)
                whole += outbound.counts
                outbound.counts.clear()
                paths = sorted(path for path in repo.records if path.startswith(WANTED))
                stored = {path.encode(): cid_of(repo.records[path]) for path in paths}
                before, path = repo.head.cid, f"{WANTED}/{tid_of(MAX_TID_MICROS // 2)}"
                repo.write([Write.create(path, {"$type": WANTED, "text": "x" * 200})], KEY, tid_of(3))
                sparse.hints[repo.did] = path
                await fetch(sparse, repo, pds.url, Stored(before, stored), wanted + 1)
                new += outbound.counts
                outbound.counts.clear()
    await pds.stop()
    return {
        "export, bytes": export / repos,
        "sparse, bytes": whole["bytes"] / repos,
        "sparse, share of the bytes in %": 100 * whole["bytes"] / export,
        "sparse, blocks": blocks / repos,
        "sparse, requests": whole["requests"] / repos,
        "one new record, bytes": new["bytes"] / repos,
        "one new record, requests": new["requests"] / repos,
    }


async def fetch(sparse: SparseFetch, repo: LocalRepo, host: str, stored: Stored, wanted: int) -> SparseDownload:
    """Return the download that proves so many wanted records."""
    download = await sparse.fetch(repo.did, host, POLICY, stored=stored)
    if download is None or download.verify(repo.did, KEY.public, DEFAULT_LIMITS).count != wanted:
        raise click.ClickException("the sparse resync did not prove all wanted records")
    return download


def make_repo(number: int, likes: int, wanted: int) -> LocalRepo:
    """Return a repo with random keys; each like names another record."""
    random, did = Random(number), f"did:plc:sparse{number}"
    records = {}
    for collection in [LIKE] * likes + [WANTED] * wanted:
        rkey = tid_of(random.randrange(MAX_TID_MICROS // 2), random.randrange(MAX_CLOCK_ID))
        subject = {"cid": cid_text(DAG_CBOR + random.randbytes(32)), "uri": f"at://{did}/app.bsky.feed.post/{rkey}"}
        record = {"$type": collection, "subject": subject, "createdAt": "2026-01-01T00:00:00.000Z"}
        records[f"{collection}/{rkey}"] = dag_cbor.encode(record)
    repo = LocalRepo(did, KEY, tid_of(1))
    repo.import_records(records, KEY, tid_of(2))
    return repo


if __name__ == "__main__":
    main()
