"""Fetch only the records of the chosen collections, with their proof (docs/protocol.md#sparse-resync).

The first response has the signed commit and the nodes from the root to one path, which need not exist. The other nodes
that may have wanted records are requested by CID, together with the records. If it takes fewer requests, the nodes
along a border of a range are requested as the proof of a path at that border. A host does not keep blocks that a later
write replaced: then the walk starts again at the new root, and uses the blocks that were fetched before.

Records that are stored with the same CID are not requested, nor subtrees that can be rebuilt from stored entries.
"""

import asyncio
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import product
from math import ceil, inf
from time import monotonic
from typing import Literal

from indexer.atproto.car import split_car
from indexer.atproto.cid import CID_BYTES, is_cid
from indexer.atproto.commit import decode_commit
from indexer.atproto.crypto import PublicKey
from indexer.atproto.limits import Limits
from indexer.atproto.mst import Node, load_node
from indexer.atproto.range_walk import FAN_OUT, RangeWalk, Unread, build_subtree, ranges_of, walk_ranges
from indexer.atproto.record import Problem
from indexer.atproto.syntax import is_nsid
from indexer.concurrency.bounded_dict import BoundedDict
from indexer.errors import UnavailableError
from indexer.net.pds.pds_client import MAX_BLOCKS, PdsClient
from indexer.net.pds.xrpc import MethodNotOfferedError, XrpcError
from indexer.reasons import FetchFailure
from indexer.sync.changes import RecordConverter, selected_path
from indexer.sync.export import RangeSnapshot, verify_ranges
from indexer.sync.identity import MAX_HOSTS
from indexer.sync.policy import Policy
from indexer.sync.scope import Scope
from indexer.sync.verify import VerifiedChange

SparseChoice = Literal["auto", "always", "never"]

MAX_BYTES = 4 << 20
"""Maximum number of bytes of blocks in memory, without the last proof. For more, an export is fetched and spooled."""
MAX_ROUNDS = 24
"""Maximum number of walks for one commit, each followed by requests for the missing blocks. The tree of a million
records has 10 layers."""
MAX_HEADS = 4
"""Maximum number of commits that are tried, one after the other, if the head moves."""
AVOID_SECONDS = 3_600.0
"""Seconds in which a host that lacks these methods is asked only for exports."""
KEY_BYTES, NODE_BYTES, REQUEST_BYTES = 450, 500, 128 << 10
"""Estimated bytes of a record with its part of the nodes, of a node, and of a request: the bytes that cost as much."""

_BOUNDED_BY_SIZE = frozenset({Problem.OMITTED, Problem.TOO_MANY_ITEMS})


class _BlocksMissingError(UnavailableError):
    """The host does not send blocks that its commit needs: its head may have moved."""


@dataclass(frozen=True, slots=True)
class Stored:
    """The stored state of a repo. Wrong entries are harmless: they rebuild other subtrees, or fail the resync."""

    commit: bytes = b""  # the CID of the head; b"" if there is none
    entries: Mapping[bytes, bytes] = field(default_factory=dict)  # CIDs of records by path, in ascending order


@dataclass(eq=False, slots=True)
class SparseDownload:
    """The blocks of one repo that were fetched so far. Each is hashed, and nothing in them is proven yet."""

    policy: Policy
    did: str
    stored: Stored = field(default_factory=Stored)
    root: bytes = b""  # the CID of the latest commit that the host named
    size: int = 0  # of all blocks with their lengths and CIDs, in bytes
    server: str | None = None  # the network address that sends them, if it is known
    complete: bool = False  # never True, so that its rate does not count as that of an export
    done: bool = False  # no block is missing
    blocks: dict[bytes, bytes] = field(default_factory=dict)
    _nodes: dict[bytes, Node] = field(default_factory=dict)
    _paths: list[bytes] = field(init=False)  # the stored ones
    _rebuilt: dict[bytes, bytes] = field(default_factory=dict)  # nodes by CID
    _tried: set[bytes] = field(default_factory=set)  # the CIDs of subtrees that were to be rebuilt
    _opened_at: float = field(default_factory=monotonic)

    def __post_init__(self) -> None:
        self._paths = list(self.stored.entries)

    @property
    def received(self) -> int:
        """The number of bytes that were fetched so far."""
        return self.size

    @property
    def rate(self) -> float:
        """The mean rate in bytes per second; infinity if no block is missing, so that the resync is never slow."""
        return inf if self.done else self.size / max(monotonic() - self._opened_at, 1.0)

    def add(self, blocks: Mapping[bytes, bytes]) -> None:
        """Add blocks by CID."""
        self.size += sum([CID_BYTES + 2 + len(block) for cid, block in blocks.items() if cid not in self.blocks])
        self.blocks.update(blocks)

    def walk(self) -> tuple[RangeWalk, list[bytes]]:
        """Walk the tree as far as its nodes are there; return the walk and the CIDs of the blocks to request next.

        The walk leaves out what is stored.

        Raises:
            UnavailableError: The commit or the root of the tree is missing.
            UpstreamError: The commit or a node breaks a rule.
        """
        if self.root not in self.blocks:
            raise UnavailableError(FetchFailure.BAD_ANSWER, "the proof lacks the commit")
        data, limits = decode_commit(self.blocks[self.root], self.root).data, self.policy.limits
        walk = walk_ranges(self._node, data, ranges_of(self.policy.scope.collections.patterns), limits)
        walk.unread = [node for node in walk.unread if not self._rebuild(node)]
        stored, selects = self.stored.entries, self.policy.scope.selects
        walk.entries = [one for one in walk.entries if stored.get(one[0]) != one[1] and selects(self.did, one[0])]
        wanted = [node.cid for node in walk.unread]
        wanted += [cid for _, cid in walk.entries] if self.policy.store_values else []
        return walk, [cid for cid in dict.fromkeys(wanted) if cid not in self.blocks]

    def omits_values(self, walk: RangeWalk) -> bool:
        """Return True if values are omitted because the download is small. The export may have them: it is larger."""
        converter = RecordConverter(self.policy, self.did, "", self.size)
        changes = [VerifiedChange(path, None, cid, self.blocks.get(cid)) for path, cid in walk.entries]
        return any(change.problem in _BOUNDED_BY_SIZE for change in map(converter.convert, changes) if change)

    def verify(self, did: str, key: PublicKey, limits: Limits) -> RangeSnapshot:
        """Verify that these are all chosen records; raise as `verify_ranges` does."""
        ranges = ranges_of(self.policy.scope.collections.patterns)
        return verify_ranges(did, self.root, self._block_of, key, limits, self.size, ranges)

    def _block_of(self, cid: bytes) -> bytes | None:
        """Return a block. If a record is no longer stored, raise UnavailableError, so that its value is not missing."""
        block = self.blocks.get(cid) or self._rebuilt.get(cid)
        if block is None and self.stored.entries and self.policy.store_values:
            raise UnavailableError(FetchFailure.EXPORT_LACKS_RECORDS, "a stored record has changed")
        return block

    def _node(self, cid: bytes) -> Node:
        if cid not in self._nodes:
            self._nodes[cid] = load_node(self.blocks.get, cid, self.policy.limits)
        return self._nodes[cid]

    def stored_in(self, node: Unread) -> list[bytes]:
        """Return the stored paths between the keys beside a subtree."""
        start = bisect_right(self._paths, node.lower)
        return self._paths[start : bisect_left(self._paths, node.upper or b"\xff")]

    def _rebuild(self, node: Unread) -> bool:
        """Return True if stored entries rebuild this subtree. Otherwise they may rebuild some of those below it."""
        if node.cid not in self._rebuilt and node.cid not in self._tried:
            self._tried.add(node.cid)
            entries = [(path, self.stored.entries[path]) for path in self.stored_in(node)]
            self._rebuilt |= build_subtree(entries, node.layer)
        return node.cid in self._rebuilt


@dataclass(eq=False)
class SparseFetch:
    """Fetches the chosen records of repos from their PDSes. With `auto`, only if that costs less than an export."""

    pds: PdsClient
    choice: SparseChoice
    hints: MutableMapping[str, str] = field(default_factory=dict)  # by DID, a changed path to request first

    def __post_init__(self) -> None:
        self._avoided_until = BoundedDict[str, float](MAX_HOSTS)

    def is_possible(self, did: str, host: str, policy: Policy) -> bool:
        """Return True if the chosen records may be requested from this PDS: all of them only if a path is known."""
        avoided = self._avoided_until.get(host, 0.0) > monotonic()
        is_wide = policy.scope.collections.matches_all and did not in self.hints
        return not (self.choice == "never" or is_wide or avoided)

    async def fetch(
        self,
        did: str,
        host: str,
        policy: Policy,
        opened: Callable[[SparseDownload], None] = lambda _: None,
        stored: Stored = Stored(),
    ) -> SparseDownload | None:
        """Return all blocks that prove the chosen records of a repo; None if its export is to be fetched.

        Blocks of `stored` records are left out; if its commit is the latest, nothing is proven. `host` is the base URL
        of the PDS. `opened` is called after the first response.

        Raises:
            UpstreamError: A block, the commit or a node breaks a rule.
            UnavailableError: The host fails or lacks blocks, or the repo changes all the time.
        """
        is_possible, hint = self.is_possible(did, host, policy), self.hints.pop(did, "")
        hinted = hint.encode(errors="replace")
        is_selected = selected_path(hinted, policy) is not None and policy.scope.selects(did, hinted)
        if not is_possible or (policy.scope.collections.matches_all and not is_selected):
            return None
        path = hint if is_selected else next(_paths(policy.scope, did, ["self", *"-~"]), "")
        if not path:
            return None
        try:
            return await self._fetch(did, host, path, SparseDownload(policy, did, stored), opened)
        except UnavailableError as error:
            refuses_absent_keys = isinstance(error, XrpcError) and error.name == "RecordNotFound"
            if (refuses_absent_keys and path != hint) or isinstance(error, MethodNotOfferedError):
                self._avoided_until[host] = monotonic() + AVOID_SECONDS
            raise

    async def _fetch(
        self, did: str, host: str, path: str, download: SparseDownload, opened: Callable[[SparseDownload], None]
    ) -> SparseDownload | None:
        for _ in range(MAX_HEADS):
            before = download.root
            await self._request_proof(download, did, host, path)
            if download.root == before:
                raise _BlocksMissingError(FetchFailure.BAD_ANSWER, "the host lacks blocks of its latest commit")
            if not before:
                opened(download)
            if download.root == download.stored.commit:
                download.done = True
                return download
            with suppress(_BlocksMissingError):
                return download if await self._complete(download, did, host) else None
        raise UnavailableError(FetchFailure.EXPORT_INCOMPLETE, f"the repo changed {MAX_HEADS} times")

    async def _request_proof(self, download: SparseDownload, did: str, host: str, path: str) -> None:
        proof = await self.pds.fetch_record_proof(did, path, host)
        roots, blocks = await asyncio.to_thread(split_car, proof.body, download.policy.limits, max_bytes=MAX_BYTES)
        download.root, download.server = roots[0], proof.server
        download.add(blocks)

    async def _complete(self, download: SparseDownload, did: str, host: str) -> bool:
        """Fetch the blocks that the latest commit needs; return False if the export is to be fetched."""
        borders = list(_paths(download.policy.scope, did, "-~"))  # the first and the last rkey
        for _ in range(MAX_ROUNDS):
            walk, missing = await asyncio.to_thread(download.walk)
            if not missing:
                download.done = not await asyncio.to_thread(download.omits_values, walk)
                return download.done
            if (
                download.size + len(missing) * KEY_BYTES > MAX_BYTES
                or not all(map(is_cid, missing))  # a record whose block cannot be hashed
                or (self.choice == "auto" and _costs_more_than_export(download, walk, len(missing)))
            ):
                return False
            if path := _take_border(borders, walk):
                with suppress(UnavailableError):  # for example of a host that refuses absent paths
                    await self._request_proof(download, did, host, path)
                continue
            try:
                blocks = await self.pds.fetch_blocks(did, missing, host, MAX_BYTES - download.size)
            except XrpcError as error:
                if isinstance(error, MethodNotOfferedError) or error.reason.is_permanent or not error.definite:
                    raise
                blocks = {}
            if not blocks:
                raise _BlocksMissingError(FetchFailure.BAD_ANSWER)
            download.add(blocks)
        return False


def _paths(scope: Scope, did: str, rkeys: Iterable[str]) -> Iterator[str]:
    """Yield a path for each chosen pattern and each record key, but none of a redacted or hidden record."""
    patterns = [pattern for pattern in scope.collections.patterns if pattern != "*"]
    for pattern, rkey in product(patterns, rkeys):
        if scope.selects(did, (path := f"{_any_collection(pattern)}/{rkey}").encode()):
            yield path


def _any_collection(pattern: str) -> str:
    """Return a collection that a pattern matches."""
    prefix = pattern.removesuffix(".*")
    names = [prefix, f"{prefix}.a", f"{prefix}.a.a"]
    return next(name for name in names[prefix != pattern :] if is_nsid(name))


def _take_border(paths: list[str], walk: RangeWalk) -> str | None:
    """Remove and return a path whose proof has the nodes along a border; None if they are to be requested by CID."""
    for path in paths if walk.unread and _rounds(walk) < _layers(walk) else ():
        key = path.encode()
        if any(node.lower < key and (node.upper is None or key < node.upper) for node in walk.unread):
            paths.remove(path)
            return path
    return None


def _layers(walk: RangeWalk) -> int:
    return max([node.layer + 1 for node in walk.unread], default=1)


def _rounds(walk: RangeWalk) -> int:
    """Return the number of requests, one after the other: for layers, or for borders if nothing else is missing."""
    return _layers(walk) if any(node.inside for node in walk.unread) else min(_layers(walk), len(walk.unread) or 1)


def _costs_more_than_export(download: SparseDownload, walk: RangeWalk, missing: int) -> bool:
    """Return True if the missing blocks, and those below them, probably cost more than the export."""
    inside = [node for node in walk.unread if node.inside]
    keys: int = sum([max(FAN_OUT ** (node.layer + 1) - len(download.stored_in(node)), 0) for node in inside])
    # Of a subtree that reaches beyond the range, only one way down is counted: most of it may be unwanted.
    nodes = sum([node.layer + 1 for node in walk.unread])
    requests = max(_rounds(walk), ceil((keys + nodes + missing) / MAX_BLOCKS))
    cost = keys * KEY_BYTES + (nodes + missing) * NODE_BYTES + requests * REQUEST_BYTES
    return cost > walk.tree_keys * KEY_BYTES + REQUEST_BYTES
