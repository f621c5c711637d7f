"""Records in the public view: no record is lost, whatever its bytes, and `value_problem` describes what is unusual."""

import json
from typing import Any

import asyncpg

from indexer.atproto.cid import cid_of, cid_text
from indexer.atproto.limits import DEFAULT_LIMITS
from indexer.atproto.record import Problem, decode_record
from indexer.db import Database
from indexer.demo import dag_cbor
from indexer.sync.changes import Batch, RecordChange, RepoWrite
from tests.db.repo_rows import head, insert, synchronized

COLLECTION = "app.test.record"
LINK = cid_of(b"somewhere")
LINK_HEAD = b"\xd8\x2a\x58\x25\x00"
SEEN = (
    "select cid, value, value_problem, atproto.record_bytes(did, collection, rkey) from atproto.records where rkey = $1"
)


def change_of(rkey: str, block: bytes) -> RecordChange:
    value = decode_record(block, COLLECTION, DEFAULT_LIMITS)
    return RecordChange(
        "create", COLLECTION, rkey, head().rev, cid_of(block), value.json, value.problem, value.original
    )


def nested(depth: int) -> bytes:
    return b"\xa1\x61a" * depth + b"\xf6"


def typed(**fields: Any) -> bytes:
    return dag_cbor.encode({"$type": COLLECTION, **fields})


ODD: dict[str, tuple[bytes, Problem | None, Any]] = {
    "plain": (
        typed(text="é 雨 🦋 \\u0000 \x01\x7f", n=-(2**63)),
        None,
        {"text": "é 雨 🦋 \\u0000 \x01\x7f", "n": -(2**63)},
    ),
    "bytes": (typed(a=b"\0\xff", b={"c": [b""]}), None, {"a": {"$bytes": "AP8"}, "b": {"c": [{"$bytes": ""}]}}),
    "link": (typed(a=LINK), None, {"a": {"$link": cid_text(LINK)}}),
    "bytes like a link": (typed(a=LINK).replace(LINK_HEAD, b"\x58\x24"), None, {"a": {"$bytes": "AXESI"}}),
    "nul": (typed(text="a\0b", n=1), Problem.NUL, {"text": "a\ufffdb", "n": 1}),
    "nul in a key": (typed(**{"a\0": 1}), Problem.NUL, {"a\ufffd": 1}),
    "number": (b"\xa1\x61a\x1b\xff\xff\xff\xff\xff\xff\xff\xff", Problem.NO_TYPE, {"a": 2**64 - 1}),
    "float": (b"\xa1\x61a\xfb\x3f\xf8\x00\x00\x00\x00\x00\x00", Problem.NUMBER, {"a": 1.5}),
    "huge float": (b"\xa1\x61a\xfb\x7f\xef\xff\xff\xff\xff\xff\xff", Problem.NUMBER, None),
    "nan": (b"\xa1\x61a\xfb\x7f\xf8\x00\x00\x00\x00\x00\x00", Problem.NOT_DAG_CBOR, None),
    "deep": (nested(5_000), Problem.TOO_DEEP, None),
    "bottomless": (b"\x81" * 100_000, Problem.TOO_DEEP, None),
    "no type": (b"\xa1\x61a\x01", Problem.NO_TYPE, {"a": 1}),
    "type is a number": (b"\xa1\x65$type\x01", Problem.NO_TYPE, {"$type": 1}),
    "other type": (b"\xa1\x65$type\x63a.b", Problem.OTHER_TYPE, {"$type": "a.b"}),
    "a list": (b"\x82\x01\x02", Problem.NOT_A_MAP, [1, 2]),
    "null": (b"\xf6", Problem.NOT_A_MAP, None),
    "reserved": (typed(a={"$link": 1}, n=1), Problem.RESERVED_KEY, {"a": None, "n": 1}),
    "nothing": (b"", Problem.NOT_DAG_CBOR, None),
    "not canonical": (b"\xa1\x61a\x18\x01", Problem.NOT_DAG_CBOR, None),
    "half a pair": (b"\xa1\x61a\x63\xed\xa0\x80", Problem.NOT_DAG_CBOR, None),
    "too large": (typed(a="x" * DEFAULT_LIMITS.record_bytes), Problem.TOO_LARGE, None),
}


async def test_unusual_records_are_stored_with_their_problem(db: Database, sql: asyncpg.Connection) -> None:
    """All of them are in one commit, so that one record cannot affect another."""
    changes = [change_of(f"{n}", block) for n, (block, _, _) in enumerate(ODD.values())]
    bare = RecordChange("create", COLLECTION, "bare", head().rev, cid_of(b"x"))
    await insert(db, synchronized(1), changes=(*changes, bare))
    assert tuple(await sql.fetchrow(SEEN, "bare") or ()) == (cid_text(cid_of(b"x")), None, "not-stored", None)
    for number, (name, (block, problem, expected)) in enumerate(ODD.items()):
        row = await sql.fetchrow(SEEN, f"{number}")
        assert row is not None, name
        cid, value, found_problem, original = row
        assert cid == cid_text(cid_of(block)), name
        assert (found_problem or "").split() == ([problem.value] if problem else []), (name, found_problem)
        if value is None or found_problem in (Problem.NUMBER, Problem.NUL, Problem.RESERVED_KEY):
            assert original == block, name
        else:
            assert original is None, name
        found: Any = None if value is None else json.loads(value)
        if name == "bytes like a link":
            assert found["a"].keys() == {"$bytes"}
        elif isinstance(expected, dict):
            assert found.items() >= expected.items(), name
        elif expected is not None:
            assert found == expected, name


async def test_an_update_replaces_value_problem_and_original(db: Database, sql: asyncpg.Connection) -> None:
    blocks = [ODD[name][0] for name in ("nul", "plain", "float", "a list", "too large", "plain")]
    await insert(db, synchronized(1))
    for number, block in enumerate(blocks, 1):
        before, after = synchronized(1, version=number), synchronized(1, version=number + 1)
        write = RepoWrite(before, after, (change_of("one", block),))
        assert not (await db.write(Batch((write,)))).skipped
        row = await sql.fetchrow(SEEN, "one")
        decoded = decode_record(block, COLLECTION, DEFAULT_LIMITS)
        assert row is not None
        assert (row["value_problem"], row["record_bytes"]) == (decoded.problem, decoded.original)
        assert (row["value"] is None) == (decoded.json is None)
