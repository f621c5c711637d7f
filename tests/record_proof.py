"""Proofs of single records, as `com.atproto.sync.getRecord` sends them."""

from indexer.atproto.cid import cid_of
from indexer.demo.local_repo import LocalRepo, car


def record_proof(repo: LocalRepo, path: str) -> bytes:
    """Return the CAR of a proof that the record at a path exists, or that it does not."""
    blocks = {repo.head.cid: repo.head.block, **repo.tree.proof(path)}
    if path in repo.records:
        blocks[cid_of(repo.records[path])] = repo.records[path]
    return car(blocks)
