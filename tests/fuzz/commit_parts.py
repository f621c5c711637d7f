"""A `#commit` frame or an export taken apart: a part can be changed, and all hashes and the signature made right."""

from collections import deque
from dataclasses import dataclass
from typing import Any

from indexer.atproto.car import split_car
from indexer.atproto.cbor import CborError, decode, decode_pair, encode
from indexer.atproto.cid import cid_of
from indexer.atproto.commit import SIGNATURE_BYTES, VERSION
from indexer.atproto.crypto import PrivateKey
from indexer.atproto.inversion import invert
from indexer.atproto.limits import DEFAULT_LIMITS
from indexer.atproto.syntax import is_tid, tid_of
from indexer.demo.local_repo import car_header, car_section
from indexer.errors import UpstreamError
from indexer.sync.events import RepoOp
from indexer.sync.verify import LegacyOperationsError, fold_operations

MAX_RENAMES = 64
_SIGNATURE_HEAD = b"\x63sig\x58\x40"
"""The key `sig`, and the head of a byte string of 64 bytes."""
NODE_START = b"\xa2\x61e"
"""The first bytes of a tree node: a map of two fields, the first of which is `e`."""


@dataclass(slots=True)
class CommitParts:
    """The parts of a frame, or of an export.

    Attributes:
        header: The header of the frame.
        payload: The payload; its field `blocks` is replaced by the attribute of that name. For an export, it names the
            account and the commit, and each record in an operation.
        blocks: The blocks of the CAR file by CID, in their order.
    """

    header: dict[str, Any]
    payload: dict[str, Any]
    blocks: dict[bytes, bytes]

    @property
    def did(self) -> str:
        """The account, as the frame names it."""
        return str(self.payload.get("repo"))

    def frame(self) -> bytes:
        """Return the frame of the parts as they are."""
        return encode(self.header) + encode(self.payload | {"blocks": self.car()})

    def car(self) -> bytes:
        """Return the CAR file of the commit and the blocks as they are."""
        sections = b"".join(car_section(cid, block) for cid, block in self.blocks.items())
        return car_header(self.payload["commit"]) + sections

    def ops(self) -> list[dict[str, Any]]:
        """Return the operations that have the form of one."""
        ops = self.payload.get("ops")
        return [op for op in ops if isinstance(op, dict)] if isinstance(ops, list) else []

    def replace(self, cid: bytes, block: bytes) -> None:
        """Replace a block, and change what refers to it up to the commit, whose signature is wrong then."""
        renames = deque([(cid, self._db(cid, block))])
        for _ in range(MAX_RENAMES):  # a mutated block may refer to itself, and then no hash is ever right
            if not renames:
                break
            old, new = renames.popleft()
            for op in self.ops():
                if op.get("cid") == old:
                    op["cid"] = new
            if self.payload["commit"] == old:
                self.payload["commit"] = new
            for parent, parent_block in list(self.blocks.items()):
                if old != new and old in parent_block:
                    renames.append((parent, self._db(parent, parent_block.replace(old, new))))

    def move(self, did: str, key: PrivateKey) -> None:
        """Make the commit one of another account, with its signature, and of the present version."""
        cid = self.payload["commit"]
        self.payload["repo"] = did
        commit = decode(self.blocks[cid])
        rev = commit.get("rev", "")
        present = {"did": did, "rev": rev if is_tid(rev) else tid_of(0), "version": VERSION}
        self.replace(cid, encode(commit | present))
        self.sign(key)

    def sign(self, key: PrivateKey) -> None:
        """Sign the commit with this key, if it is a map."""
        cid = self.payload["commit"]
        self.replace(cid, signed(self.blocks[cid], key))

    def _db(self, cid: bytes, block: bytes) -> bytes:
        """Put a block in the place of another one, and return its CID."""
        new = cid_of(block)
        self.blocks = {new if name == cid else name: block if name == cid else old for name, old in self.blocks.items()}
        return new

    def set_previous_root(self) -> None:
        """Set `prevData` to the root that the inversion of the operations gives, if it gives one."""
        try:
            data = decode(self.blocks[self.payload["commit"]])["data"]
            ops = [RepoOp(op["action"], op["path"], op["cid"], op.get("prev")) for op in self.ops()]
            found = invert(self.blocks, data, fold_operations(ops), b"", DEFAULT_LIMITS).root
        except (UpstreamError, LegacyOperationsError, CborError, KeyError, TypeError, AttributeError):
            return  # the parts are not those of a commit any more, which is the point of some mutations
        if found is not None:
            self.payload["prevData"] = found


def signed(block: bytes, key: PrivateKey) -> bytes:
    """Return a commit with a new signature; a block that is not a map as it is."""
    try:
        commit = decode(block)
    except CborError:
        return block
    if not isinstance(commit, dict):
        return block
    unsigned = {name: value for name, value in commit.items() if name != "sig"}
    # A signature may have the bytes of a CID, and `encode` would make a link of it.
    with_zeros = encode(unsigned | {"sig": bytes(SIGNATURE_BYTES)})
    return with_zeros.replace(_SIGNATURE_HEAD + bytes(SIGNATURE_BYTES), _SIGNATURE_HEAD + key.sign(encode(unsigned)), 1)


def split_export(data: bytes) -> CommitParts | None:
    """Take an export apart; None if it is not a CAR file with a commit and blocks that have their hashes."""
    try:
        roots, by_cid = split_car(data, DEFAULT_LIMITS, max_bytes=len(data))
        did = decode(by_cid[roots[0]])["did"]
    except (CborError, UpstreamError, KeyError, TypeError):
        return None
    ops = [{"cid": cid} for cid, block in by_cid.items() if cid != roots[0] and not block.startswith(NODE_START)]
    return CommitParts({}, {"repo": did, "commit": roots[0], "ops": ops}, by_cid)


def split(frame: bytes) -> CommitParts | None:
    """Take a frame apart; None if it is not a `#commit` whose blocks have their hashes."""
    try:
        header, payload = decode_pair(frame)
        if not (isinstance(header, dict) and isinstance(payload, dict) and isinstance(payload.get("commit"), bytes)):
            return None
        blocks = payload.pop("blocks", None)
        if not isinstance(blocks, bytes):
            return None
        _, by_cid = split_car(blocks, DEFAULT_LIMITS, max_bytes=DEFAULT_LIMITS.commit_blocks_bytes)
    except (CborError, UpstreamError):
        return None
    return CommitParts(header, payload, by_cid) if payload["commit"] in by_cid else None
