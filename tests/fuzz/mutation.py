"""Mutations of frames and exports that know their structure, so that mutated bytes get past hashes and signature."""

from collections.abc import Callable
from random import Random
from typing import Any

from indexer.atproto.cbor import CborError, decode, encode
from indexer.atproto.cid import cid_of
from tests.fuzz.commit_parts import CommitParts, split, split_export
from tests.fuzz.fuzz_target import MutateBytes
from tests.fuzz.seeds import LINK, key_of, random_commit, random_export, random_path, random_record, random_value
from tests.sync.signing_account import SigningAccount

Mutation = Callable[[CommitParts, Random, MutateBytes], None]
"""Changes the parts of a frame."""
NEW_COMMITS, PLAIN, FIELDS = 0.01, 0.1, 0.2
"""Shares of mutations that are a new commit or export, that mutate any bytes, and only those of the frame's fields."""
RIGHT_ROOT = 0.8
"""Share of mutations after which `prevData` is made right, so that the commit may be applied."""
SIGNED = 0.95
"""Share of mutations after which the commit is signed again."""


def mutate_frame(frame: bytes, random: Random, mutate_bytes: MutateBytes, owners: list[SigningAccount]) -> bytes:
    """Return a mutated frame. One that is not a whole commit, and a tenth of the others, gets mutated bytes.

    A fifth becomes a frame without blocks and with mutated bytes: hardly any byte of a whole one is in its fields.
    """
    if random.random() < NEW_COMMITS:
        return random_commit(random.choice(owners), random).frame
    parts = None if random.random() < PLAIN else split(frame)
    if parts is None:
        return mutate_bytes(frame)
    if random.random() < FIELDS:
        return mutate_bytes(encode(parts.header) + encode(parts.payload | {"blocks": b""}))
    did = parts.did
    _mutate_parts(parts, MUTATIONS, random, mutate_bytes)
    if random.random() < RIGHT_ROOT:
        parts.set_previous_root()
    _sign(parts, did, random, owners)
    try:
        return parts.frame()
    except (TypeError, ValueError, OverflowError):  # a mutated value that has no encoding
        return mutate_bytes(frame)


def mutate_export(data: bytes, random: Random, mutate_bytes: MutateBytes, owners: list[SigningAccount]) -> bytes:
    """Return a mutated export. One that is not a whole repo, and a tenth of the others, gets mutated bytes."""
    if random.random() < NEW_COMMITS:
        return random_export(random.choice(owners), random)
    parts = None if random.random() < PLAIN else split_export(data)
    if parts is None:
        return mutate_bytes(data)
    did = parts.did
    _mutate_parts(parts, EXPORT_MUTATIONS, random, mutate_bytes)
    _sign(parts, did, random, owners)
    return parts.car()


def _mutate_parts(
    parts: CommitParts, mutations: tuple[Mutation, ...], random: Random, mutate_bytes: MutateBytes
) -> None:
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        random.choice(mutations)(parts, random, mutate_bytes)
        if parts.payload["commit"] not in parts.blocks:
            break


def _sign(parts: CommitParts, did: str, random: Random, owners: list[SigningAccount]) -> None:
    if random.random() < SIGNED and parts.payload["commit"] in parts.blocks:
        parts.sign(key_of(did, owners))


def block_bytes(parts: CommitParts, random: Random, mutate_bytes: MutateBytes) -> None:
    """Mutate the bytes of any block."""
    cid = random.choice(list(parts.blocks))
    parts.replace(cid, mutate_bytes(parts.blocks[cid]))


def record_bytes(parts: CommitParts, random: Random, mutate_bytes: MutateBytes) -> None:
    """Mutate the bytes of a record, or replace it by a random one."""
    if cid := _written(parts, random):
        block = mutate_bytes(parts.blocks[cid]) if random.random() < 0.5 else random_record(random)
        parts.replace(cid, block)


def record_field(parts: CommitParts, random: Random, _: MutateBytes) -> None:
    """Set a field of a record to a random value."""
    if (cid := _written(parts, random)) and isinstance(value := _decoded(parts.blocks[cid]), dict):
        name = random.choice([*value, "$type", "text"])
        parts.replace(cid, _encoded(value | {name: random_value(random, 3)}, parts.blocks[cid]))


def node_entries(parts: CommitParts, random: Random, _: MutateBytes) -> None:
    """Change the entries of a tree node: drop, copy, swap or change one, or change a link to a subtree."""
    nodes = {cid: node for cid in parts.blocks if isinstance(node := _decoded(parts.blocks[cid]), dict) and "e" in node}
    if not nodes:
        return
    cid = random.choice(list(nodes))
    node, links = nodes[cid], [None, LINK, *nodes, *parts.blocks]
    entries = node["e"] if isinstance(node["e"], list) else []
    if not entries or random.random() < 0.2:
        node["l"] = random.choice(links)
    else:
        _change_entry(entries, random, links)
    parts.replace(cid, _encoded(node, parts.blocks[cid]))


def _change_entry(entries: list[Any], random: Random, links: list[bytes | None]) -> None:
    index = random.randrange(len(entries))
    entry = entries[index]
    match random.randrange(7):
        case 0:
            del entries[index]
        case 1:
            entries.insert(random.randrange(len(entries) + 1), entry)
        case 2:
            entries.append(entries.pop(index))
        case 3 if isinstance(entry, dict):
            entry["p"] = random.choice((0, 1, 23, 24, 255, 256, entry.get("p", 0) if entry.get("p") else 2))
        case 4 if isinstance(entry, dict):
            entry["k"] = random_path(random).encode()
        case 5 if isinstance(entry, dict):
            entry["t"] = random.choice(links)
        case 6 if isinstance(entry, dict):
            entry["v"] = random.choice(links)
        case _:
            entries[index] = random_value(random, 2)


def operations(parts: CommitParts, random: Random, _: MutateBytes) -> None:
    """Drop, copy, swap or change an operation."""
    ops = parts.payload.get("ops")
    if not isinstance(ops, list) or not ops:
        return
    index = random.randrange(len(ops))
    op = dict(ops[index]) if isinstance(ops[index], dict) else {}
    match random.randrange(7):
        case 0:
            del ops[index]
        case 1:
            ops.insert(random.randrange(len(ops) + 1), op)
        case 2:
            ops.append(ops.pop(index))
        case 3:
            ops[index] = op | {"action": random.choice(("create", "update", "delete", "none"))}
        case 4:
            ops[index] = op | {"path": random.choice((random_path(random), f"{op.get('path')}x", ""))}
        case 5:
            ops[index] = op | {"cid": random.choice((None, LINK, *parts.blocks))}
        case _:
            ops[index] = op | {"prev": random.choice((None, LINK, *parts.blocks))}


def payload_field(parts: CommitParts, random: Random, _: MutateBytes) -> None:
    """Set a field of the payload to a value of its kind or to any value, or remove it."""
    name = random.choice(("repo", "rev", "since", "prevData", "tooBig", "rebase", "seq", "time", "blobs"))
    choices = (None, parts.payload.get("rev"), parts.payload.get("since"), LINK, True, random_value(random, 1))
    parts.payload[name] = random.choice(choices)
    if random.random() < 0.2:
        del parts.payload[name]


def block_list(parts: CommitParts, random: Random, _: MutateBytes) -> None:
    """Drop a block, add one, or change the order."""
    cids = list(parts.blocks)
    match random.randrange(3):
        case 0 if len(cids) > 1:
            del parts.blocks[random.choice(cids[1:])]
        case 1:
            block = random_record(random)
            parts.blocks[cid_of(block)] = block
        case _:
            random.shuffle(cids)
            parts.blocks = {cid: parts.blocks[cid] for cid in cids}


def commit_field(parts: CommitParts, random: Random, _: MutateBytes) -> None:
    """Set a field of the commit object."""
    cid = parts.payload["commit"]
    if isinstance(commit := _decoded(parts.blocks[cid]), dict):
        name = random.choice(("did", "rev", "data", "prev", "version", "x", "dataa"))
        choices = (None, 3, LINK, parts.payload.get("rev"), *parts.blocks, random_value(random, 1))
        parts.replace(cid, _encoded(commit | {name: random.choice(choices)}, parts.blocks[cid]))


MUTATIONS: tuple[Mutation, ...] = (
    block_bytes,
    record_bytes,
    record_bytes,
    record_field,
    node_entries,
    node_entries,
    operations,
    payload_field,
    block_list,
    commit_field,
)

EXPORT_MUTATIONS: tuple[Mutation, ...] = tuple(
    mutation for mutation in MUTATIONS if mutation not in (operations, payload_field)
)


def _written(parts: CommitParts, random: Random) -> bytes | None:
    """Return the CID of a record that an operation writes, if the slice has it."""
    written = [cid for op in parts.ops() if isinstance(cid := op.get("cid"), bytes) and cid in parts.blocks]
    return random.choice(written) if written else None


def _decoded(block: bytes) -> Any:
    try:
        return decode(block)
    except CborError:
        return None


def _encoded(value: Any, otherwise: bytes) -> bytes:
    """Return the DAG-CBOR of a value; other bytes if it has none."""
    try:
        return encode(value)
    except (TypeError, ValueError, OverflowError):
        return otherwise
