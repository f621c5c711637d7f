"""Commit objects: the decoder against an obvious reference."""

from collections.abc import Callable
from random import Random
from typing import TypeVar

from indexer.atproto.cid import cid_of, is_cid
from indexer.atproto.commit import MAX_COMMIT_BYTES, VERSION, decode_commit
from indexer.atproto.syntax import is_did, is_tid
from indexer.errors import UpstreamError
from tests.atproto.dag_cbor_oracle import Cid
from tests.atproto.dag_cbor_oracle import encode as reference_encode
from tests.fuzz.commit_parts import signed
from tests.fuzz.comparison import DifferenceError
from tests.fuzz.fuzz_target import FuzzTarget, MutateBytes, canonical
from tests.fuzz.outcome_counts import OutcomeCounts
from tests.fuzz.seed_files import published_blocks, some_of
from tests.fuzz.seeds import LINK, accounts, random_commit

T = TypeVar("T")
MAX_STEP = 700
STRUCTURED = 0.6
"""Share of mutations that keep the form of a node or of a commit."""
LINK_BYTES = len(LINK)
COMMIT_START = b"\xa6\x63did"
"""The first bytes of a commit object: a map of six fields, the first of which is `did`."""


class Commits(FuzzTarget):
    """Commit objects: those of the right form are accepted, and their signed bytes are those without `sig`."""

    def __init__(self) -> None:
        self._owners = accounts()
        self.counts = OutcomeCounts("accepted", "rejected", "verified")

    def seeds(self, random: Random, count: int) -> list[bytes]:
        """Return published commits, a quarter if there are so many, and new signed ones."""
        made = some_of(published_blocks(COMMIT_START), random, count // 4)
        for number in range(count - len(made)):
            owner = self._owners[number % len(self._owners)]
            random_commit(owner, random)
            made.append(owner.repo.head.block)
        return made

    def mutate(self, data: bytes, random: Random, mutate_bytes: MutateBytes) -> bytes:
        """Return mutated bytes, or a commit with another field, signed again."""
        value = canonical(data)
        if random.random() > STRUCTURED or not isinstance(value, dict) or "sig" not in value:
            return mutate_bytes(data)
        name = random.choice(("did", "rev", "data", "prev", "version", "sig", "", "sih", "zz"))
        choices = (None, 3, 2, True, Cid(LINK), LINK, "3" * 13, value["sig"], {"sig": value["sig"]}, b"\x63sig\x58\x40")
        other = random.choice(choices) if random.random() < 0.8 else mutate_bytes(data[-40:])
        block = reference_encode(value | {name: other})
        return signed(block, random.choice(self._owners).key) if random.random() < 0.5 else block

    def compare(self, data: bytes) -> None:
        """Decode a block. Raises `DifferenceError`."""
        self.counts.executions += 1
        commit = _result(lambda: decode_commit(data, cid_of(data)))
        self.counts.add("rejected" if commit is None else "accepted")
        expected = _reference_commit(data)
        found = None if commit is None else (commit.did, commit.rev, commit.data, commit.sig, commit.unsigned)
        if found != expected:
            raise DifferenceError(f"reference: {expected}\nfound: {found}")
        if commit is not None:
            keys = [owner.key.public for owner in self._owners[-2:]]
            self.counts.add("verified", any(key.verify(commit.sig, commit.unsigned) for key in keys))


def _reference_commit(data: bytes) -> tuple[str, str, bytes, bytes, bytes] | None:
    """Return the fields of a block that is a commit, and its bytes without `sig`; None for others."""
    value = canonical(data) if len(data) <= MAX_COMMIT_BYTES else None
    if not isinstance(value, dict) or len(value) > 23 or type(value.get("version")) is not int:
        return None
    did, rev, root, sig, prev = (value.get(name) for name in ("did", "rev", "data", "sig", "prev"))
    if not (isinstance(did, str) and is_did(did) and isinstance(rev, str) and is_tid(rev)):
        return None
    if not (isinstance(root, Cid) and is_cid(root.data) and (prev is None or isinstance(prev, Cid))):
        return None
    if (
        value["version"] != VERSION
        or type(sig) is not bytes
        or len(sig) != 64
        or data.count(b"\x63sig\x58\x40" + sig) != 1
    ):
        return None
    unsigned = reference_encode({name: field for name, field in value.items() if name != "sig"})
    return did, rev, root.data, sig, unsigned


def _result(decode: Callable[[], T]) -> T | None:
    """Return what a decoder returns; None if it raises the only error that it may raise."""
    try:
        return decode()
    except UpstreamError:
        return None
