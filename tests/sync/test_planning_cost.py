"""Planning a commit costs time in proportion to its bytes, whatever its records contain."""

from itertools import product
from time import thread_time

import pytest

from indexer.atproto import cbor
from indexer.atproto.cbor import decode_json
from indexer.demo import dag_cbor
from indexer.demo.local_repo import Write
from indexer.sync.changes import Plan
from indexer.sync.plan import plan_event
from tests.sync.signing_account import CONTEXT, POST, SigningAccount, decoded_event, encoded_frame

MAX_COST = 6.0
"""Time per byte of a frame, as a multiple of the time per byte to decode a list of empty byte strings once."""
ITEMS = {
    "empty byte strings": b"\x40",
    "empty lists": b"\x80",
    "empty maps": b"\xa0",
    "nulls": b"\xf6",
    "texts": b"\x61\x01",
    "links": b"\xd8\x2a\x58\x25\x00\x01\x71\x12\x20" + bytes(32),
    "maps": b"\xa1\x61a\x40",
    "deep lists": b"\x81" * 240 + b"\x00",
    "deep maps": b"\xa1\x61a" * 240 + b"\x00",
    "deeper lists": b"\x81" * 252 + b"\x00",
}
ENDS = {
    "nothing": b"\x00",
    "a float": b"\xfb\x3f\xf8" + bytes(6),
    "a huge integer": b"\x3b" + b"\xff" * 8,
    "text like an escape": dag_cbor.encode("\\u0000"),
    "text like a link": dag_cbor.encode("\u042a"),
    "text like a reserved key, and a float": dag_cbor.encode("$link") + b"\xfb\x3f\xf8" + bytes(6),
    "invalid bytes": b"\xff",
}
SLOWEST_END = "text like a reserved key, and a float"
SIZES = [(1_000_000, 1, 10), (10_000, 20, 1), (1_000, 200, 1)]
"""Bytes of a block, distinct blocks, and paths per block."""


def list_of(item: bytes, size: int, end: bytes) -> bytes:
    """Return the DAG-CBOR of a list of about `size` bytes, with `end` as its last bytes."""
    count = size // len(item)
    ends = 2 if end.startswith(b"\x65") else 1
    return cbor.encode([None] * (count + ends))[: -count - ends] + item * count + end


def cost_of(block: bytes, blocks: int, paths: int) -> float:
    """Return the processor time per byte that planning the commit takes, in seconds."""
    alice = SigningAccount()
    row = alice.row()
    numbered = [b"\x82" + block + dag_cbor.encode(number) for number in range(blocks)]
    writes = [
        Write.create(f"{POST}/{number}-{path}", record)
        for number, record in enumerate(numbered)
        for path in range(paths)
    ]
    payload = alice.commit(*writes)
    event, size = decoded_event("commit", payload), len(encoded_frame("commit", payload))
    began = thread_time()
    plan = plan_event(row, event, size, alice.key_state, CONTEXT)
    seconds = thread_time() - began
    assert isinstance(plan, Plan)
    assert len(plan.changes) == len(writes)
    return seconds / size


def unit_cost() -> float:
    began = thread_time()
    for _ in range(10):
        decode_json(b"\x99\xff\xff" + b"\x40" * 65_535)
    return (thread_time() - began) / 655_350


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_cost_of_planning_is_proportional_to_the_bytes_of_the_message(size: tuple[int, int, int]) -> None:
    block_bytes, blocks, paths = size
    unit = unit_cost()
    costs = {}
    ends = ENDS if blocks == 1 else {name: ENDS[name] for name in ("nothing", SLOWEST_END)}
    for (items, item), (end_name, end) in product(ITEMS.items(), ends.items()):
        block = list_of(item, block_bytes, end)
        cost = cost_of(block, blocks, paths)
        if cost > MAX_COST * unit:  # perhaps an interruption
            cost = min(cost, cost_of(block, blocks, paths))
        costs[f"{items}, then {end_name}"] = cost / unit
    worst = max(costs, key=lambda name: costs[name])
    assert costs[worst] < MAX_COST, (worst, costs[worst])
