"""Signed commits and exports from which the fuzzer starts, and new ones with random operations and records."""

from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

from indexer.atproto.cbor import encode
from indexer.atproto.crypto import Curve, PrivateKey
from indexer.demo.local_repo import Write
from tests.sync.signing_account import SigningAccount, encoded_frame

CURVES: tuple[Curve, ...] = ("k256", "k256", "k256", "k256", "k256", "k256", "p256")
"""Few of P-256, because its signatures take longer."""
TREE_SIZES = (0, 1, 2, 3, 5, 8, 12, 30)
COLLECTIONS = ("app.bsky.feed.post", "app.bsky.feed.like", "com.example.note", "com.example.a.b")
TEXTS = ("", "hello", "é", "日本語", "\0", "\u2028", '"\\/\b\f\n\r\t\x1f\x7f', "😀", "$link", "x" * 300)
SIZES = (0, 1, 23, 24, 255, 256, 65_535, 65_536, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1)
NUMBERS = (*SIZES, -1, -24, -25, -(2**63))
ORDINARY = 0.8
"""Share of exports in which all records are ordinary: the native core leaves all others of a chunk to the reference."""
FLOATS = (0.0, -0.0, 1.5, 1e300, 5e-324, 0.1)
LINK = b"\x01\x71\x12\x20" + bytes(range(32))


class Seed(NamedTuple):
    """A commit that a daemon applies."""

    account: SigningAccount
    frame: bytes


def accounts() -> list[SigningAccount]:
    """Return the accounts of all seeds, always the same ones. Their keys also sign mutated commits."""
    return [SigningAccount(f"fuzz{number}", curve) for number, curve in enumerate(CURVES)]


def seeds(owners: list[SigningAccount], random: Random, count: int) -> list[Seed]:
    """Return new commits of these accounts: the first ones on trees of all sizes, with each action."""
    made = [first_commit(owner) for owner in owners]
    made += [random_commit(owners[number % len(owners)], random) for number in range(count - len(made))]
    return made


def first_commit(owner: SigningAccount) -> Seed:
    """Return the commit that creates the repo."""
    return Seed(owner, encoded_frame("commit", owner.first_commit()))


def random_commit(owner: SigningAccount, random: Random) -> Seed:
    """Replace the records of a repo by random ones, and return a commit with one to four random operations."""
    replace_records(owner, random, random_record)
    writes, present = [], sorted(owner.repo.records)
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        if present and random.random() < 0.5:
            path = present.pop(random.randrange(len(present)))
            block = random_record(random)
            writes.append(Write("update", path, block) if random.random() < 0.5 else Write.delete(path))
        else:
            path = random_path(random)
            if path not in owner.repo.records and path not in {write.path for write in writes}:
                writes.append(Write("create", path, random_record(random)))
    return Seed(owner, encoded_frame("commit", owner.commit(*writes)))


def random_export(owner: SigningAccount, random: Random) -> bytes:
    """Replace the records of a repo by random ones, and return its export. In most of them, all are ordinary."""
    replace_records(owner, random, ordinary_record if random.random() < ORDINARY else random_record)
    return b"".join(owner.repo.export())


def replace_records(owner: SigningAccount, random: Random, record: Callable[[Random], bytes]) -> None:
    """Replace the records of a repo by others, without a message."""
    paths = {random_path(random) for _ in range(random.choice(TREE_SIZES))}
    owner.repo.import_records({path: record(random) for path in sorted(paths)}, owner.key, owner.next_rev())


def ordinary_record(random: Random) -> bytes:
    """Return the DAG-CBOR of a record that the native core converts."""
    texts = {name: random.choice(TEXTS[5:8]) for name in random.choices(TEXTS[1:4], k=2)}
    values = [random.choice((None, True, -25, 2**53, LINK, b"bytes")) for _ in range(random.randrange(4))]
    return encode({"$type": random.choice(COLLECTIONS), "list": values} | texts)


def random_path(random: Random) -> str:
    """Return a path. Half of the keys have a common prefix, and there are few enough that some are chosen twice."""
    prefix = random.choice(("3k", "self-", "a:b_c~.", ""))
    return f"{random.choice(COLLECTIONS)}/{prefix}{random.randrange(1_000)}"


def random_record(random: Random) -> bytes:
    """Return the DAG-CBOR of a record; most have a `$type`, as they should."""
    record: dict[str, Any] = {random.choice(TEXTS): random_value(random, 3) for _ in range(random.randrange(5))}
    if random.random() < 0.9:
        record["$type"] = random.choice(COLLECTIONS)
    return encode(record if random.random() < 0.98 else [record])


def random_value(random: Random, levels: int) -> Any:
    """Return a value with at most this many levels of containers."""
    match random.randrange(12 if levels else 8):
        case 0 | 1:
            return random.choice(TEXTS)
        case 2:
            return random.choice(NUMBERS)
        case 3:
            return random.choice((None, True, False))
        case 4:
            return random.choice((b"", b"\0", b"bytes", bytes(36)))
        case 5:
            return LINK
        case 6:
            return random.choice(FLOATS) if random.random() < 0.2 else 7
        case 7:
            return {"$type": "blob", "ref": LINK, "mimeType": "image/png", "size": random.choice(NUMBERS)}
        case 8 | 9:
            return [random_value(random, levels - 1) for _ in range(random.randrange(4))]
        case _:
            return {random.choice(TEXTS): random_value(random, levels - 1) for _ in range(random.randrange(4))}


def key_of(did: str, owners: list[SigningAccount]) -> PrivateKey:
    """Return the key of an account, or that of the first one for an unknown DID."""
    return next((owner.key for owner in owners if owner.did == did), owners[0].key)
