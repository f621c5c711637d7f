"""Accounts with signed repos whose records and commits resemble those of the real network."""

from base64 import b32encode
from collections.abc import Mapping, Sequence
from hashlib import sha256
from random import Random
from typing import Any, TypeVar

from benchmarks.growing_tree import GrowingNode, GrowingTree
from indexer.atproto import cbor
from indexer.atproto.cid import RAW, cid_of, cid_text
from indexer.atproto.crypto import PrivateKey
from indexer.atproto.syntax import tid_of
from indexer.demo import dag_cbor
from indexer.demo.local_repo import LocalChange, LocalCommit, car, car_header, car_section

T = TypeVar("T")

PROFILE = "app.bsky.actor.profile"
LIKE, POST, REPOST = "app.bsky.feed.like", "app.bsky.feed.post", "app.bsky.feed.repost"
FOLLOW, BLOCK = "app.bsky.graph.follow", "app.bsky.graph.block"

P256_EVERY = 20
"""One account in this many has a P-256 key, the others have a secp256k1 key."""

_COLLECTION_WEIGHTS = {LIKE: 55, POST: 17, FOLLOW: 16, REPOST: 8, BLOCK: 4}
_OPERATION_COUNT_WEIGHTS = {1: 92, 2: 5, 3: 2, 5: 1}
_ACTION_WEIGHTS = {"create": 85, "delete": 12, "update": 3}
_REPLY_SHARE, _IMAGE_SHARE = 0.4, 0.2  # of posts
_PROFILE_PATH = f"{PROFILE}/self"

_FIRST_MICROS = 1_704_067_200_000_000  # 2024-01-01
_YEAR_MICROS = 31_536_000_000_000
_SECOND_MICROS = 1_000_000
_WORDS = (
    "sky",
    "ferry",
    "quiet",
    "lantern",
    "orbit",
    "harbour",
    "tomorrow",
    "the",
    "of",
    "and",
    "a",
    "I",
    "été",
    "雨",
    "🦋",
)


class SigningAccount:
    """Account number `number` of a workload. Its `records` records were written during about one year, from 2024 on.

    Attributes:
        did: The DID.
        key: The signing key.
        records: The DAG-CBOR of the records by path.
        tree: The tree.
        first: The first commit, of the empty tree.
        head: The latest commit.
    """

    def __init__(
        self, number: int, records: int, seed: int, collections: Mapping[str, int] = _COLLECTION_WEIGHTS
    ) -> None:
        self.did = did_of(number)
        self.key = PrivateKey.from_seed("k256" if number % P256_EVERY else "p256", self.did.encode())
        self.records: dict[str, bytes] = {}
        self.tree = GrowingTree()
        self._random = Random(f"{seed} {number}")
        self._micros = _FIRST_MICROS + number
        self._max_interval = 2 * _YEAR_MICROS // (records + 1)
        self.first = self.head = self._sign()
        self._put(_PROFILE_PATH, PROFILE)
        for _ in range(records - 1):
            self._create(self._choose(collections))
        self.head = self._sign()
        self._paths = [path for path in self.records if path != _PROFILE_PATH]
        self._max_interval = _SECOND_MICROS  # so that no rev is in the future

    def commit(self, collections: Sequence[str] = ()) -> LocalChange:
        """Make the next commit: new records of these collections, or else a few operations on different paths."""
        before = self.head
        ops: dict[str, dict[str, Any]] = {}
        made = [self._create(name) for name in collections]
        for op in made or [self._operate() for _ in range(self._choose(_OPERATION_COUNT_WEIGHTS))]:
            ops.setdefault(op["path"], op)["cid"] = op["cid"]
        self.head = self._sign()
        blocks = {self.head.cid: self.head.block}
        for path, op in ops.items():
            blocks |= {node.cid: node.block for node in self.tree.proof(path)}
            if op["cid"] is not None:
                blocks[op["cid"]] = self.records[path]
        return LocalChange(self.head, before.rev, before.data, list(ops.values()), car(blocks))

    def export(self) -> bytes:
        """Return the whole repo as a CAR, in streamable order."""
        sections = [car_header(self.head.cid), car_section(self.head.cid, self.head.block)]
        for item in self.tree.root.walk():
            block = item.block if isinstance(item, GrowingNode) else self.records[item]
            sections.append(car_section(cid_of(block), block))
        return b"".join(sections)

    def _operate(self) -> dict[str, Any]:
        action = self._choose(_ACTION_WEIGHTS)
        if action == "update":
            prev = cid_of(self.records[_PROFILE_PATH])
            return {"action": action, "path": _PROFILE_PATH, "cid": self._put(_PROFILE_PATH, PROFILE), "prev": prev}
        if action == "delete" and self._paths:
            index = self._random.randrange(len(self._paths))
            self._paths[index], self._paths[-1] = self._paths[-1], self._paths[index]
            path = self._paths.pop()
            self.tree.delete(path)
            return {"action": action, "path": path, "cid": None, "prev": cid_of(self.records.pop(path))}
        return self._create(self._choose(_COLLECTION_WEIGHTS))

    def _create(self, collection: str) -> dict[str, Any]:
        path = f"{collection}/{self._tid()}"
        return {"action": "create", "path": path, "cid": self._put(path, collection)}

    def _put(self, path: str, collection: str) -> bytes:
        block = self.records[path] = cbor.encode(self._record(collection))
        cid = cid_of(block)
        self.tree.put(path, cid)
        return cid

    def _sign(self) -> LocalCommit:
        rev, data = self._tid(), self.tree.root.cid
        unsigned = {"did": self.did, "rev": rev, "data": data, "prev": None, "version": 3}
        # `cbor.encode` would write a link instead of a signature whose bytes happen to be a CID of some form.
        block = dag_cbor.encode(unsigned | {"sig": self.key.sign(dag_cbor.encode(unsigned))})
        return LocalCommit(rev, data, cid_of(block), block)

    def _record(self, collection: str) -> dict[str, Any]:
        return {"$type": collection, "createdAt": "2025-01-01T00:00:00.000Z", **self._content(collection)}

    def _content(self, collection: str) -> dict[str, Any]:
        if collection == PROFILE:
            return {"displayName": self._text(2), "description": self._text(20), "avatar": self._blob()}
        if collection == POST:
            return self._post()
        if collection in (FOLLOW, BLOCK):
            return {"subject": self._random.choice(_OTHER_RECORDS)[0]}
        return {"subject": self._subject()}

    def _post(self) -> dict[str, Any]:
        post: dict[str, Any] = {"text": self._text(40), "langs": ["en"]}
        kind = self._random.random()
        if kind < _REPLY_SHARE:
            post["reply"] = {"root": self._subject(), "parent": self._subject()}
        elif kind < _REPLY_SHARE + _IMAGE_SHARE:
            image = {"alt": self._text(8), "image": self._blob(), "aspectRatio": {"width": 4, "height": 3}}
            post["embed"] = {"$type": "app.bsky.embed.images", "images": [image]}
        return post

    def _subject(self) -> dict[str, str]:
        """Return a strong reference to a record outside the workload."""
        did, cid = self._random.choice(_OTHER_RECORDS)
        return {"uri": f"at://{did}/{POST}/{tid_of(_FIRST_MICROS + self._random.randrange(_YEAR_MICROS))}", "cid": cid}

    def _blob(self) -> dict[str, Any]:
        link = RAW + self._random.randbytes(32)
        return {"$type": "blob", "ref": link, "mimeType": "image/jpeg", "size": self._random.randrange(1 << 20)}

    def _text(self, words: int) -> str:
        return " ".join(self._random.choices(_WORDS, k=self._random.randint(1, words)))

    def _tid(self) -> str:
        self._micros += self._random.randrange(1, self._max_interval)
        return tid_of(self._micros)

    def _choose(self, weights: Mapping[T, int]) -> T:
        return self._random.choices(tuple(weights), tuple(weights.values()))[0]


def did_of(number: int) -> str:
    """Return the DID of account number `number`."""
    return f"did:plc:{b32encode(sha256(f'person {number}'.encode()).digest())[:24].decode().lower()}"


_OTHER_RECORDS = [(did_of(-number), cid_text(cid_of(str(number).encode()))) for number in range(1, 1_000)]
