"""The view of blobs, which is read from the values of records."""

import json
from typing import Any

import asyncpg
import pytest

from indexer.db import Database
from tests.db.repo_rows import did, insert, put, synchronized

pytestmark = pytest.mark.slow

CID = "bafkreibme22gw2h7y2h7tg2fhqotaqjucnbc24deqo72b6mkl2egezxhvy"
OTHER = "bafkreih4ufdqbcnt6czmzgwtd2zyfv2uhpcujmm6osmcskbqy6s3ytlwoi"
MAX_BIGINT = 2**63 - 1


def blob(cid: str = CID, **fields: object) -> dict[str, Any]:
    return {"$type": "blob", "ref": {"$link": cid}, "mimeType": "image/jpeg", "size": 12, **fields}


async def shown(sql: asyncpg.Connection) -> list[tuple[Any, ...]]:
    rows = await sql.fetch("select rkey, cid, mime_type, size from atproto.blobs order by rkey, cid")
    return [tuple(row) for row in rows]


async def test_blobs_of_a_record_are_found_at_any_depth(db: Database, sql: asyncpg.Connection) -> None:
    value = {"embed": {"images": [{"image": blob()}, {"image": blob(OTHER, size=0)}]}, "text": "no blob"}
    await insert(db, synchronized(1), changes=(put("app.test/a", json.dumps(value)), put("app.test/b")))
    assert await shown(sql) == [("a", CID, "image/jpeg", 12), ("a", OTHER, "image/jpeg", 0)]
    row = await sql.fetchrow("select did, collection, uri from atproto.blobs where cid = $1", CID)
    assert tuple(row or ()) == (did(1), "app.test", f"at://{did(1)}/app.test/a")


async def test_a_blob_with_an_impossible_size_is_shown_without_it(db: Database, sql: asyncpg.Connection) -> None:
    sizes = ["12", -1, 1e300, 2**64 - 1, None, {"a": 1}, [3]]
    values = [json.dumps(blob(size=size, mimeType=["x"])) for size in sizes]
    await insert(db, synchronized(1), changes=tuple(put(f"app.test/{n}", value) for n, value in enumerate(values)))
    assert await shown(sql) == [(f"{n}", CID, None, None) for n in range(len(sizes))]


async def test_objects_that_only_look_like_blobs_are_not_shown(db: Database, sql: asyncpg.Connection) -> None:
    """A scalar at the top, a type that is no text, a reference that is none."""
    values = ['"blob"', "null", "[]", json.dumps(blob("x") | {"ref": "x"}), json.dumps(blob() | {"$type": ["blob"]})]
    values += [json.dumps(blob() | {"ref": {"$link": 5}}), json.dumps({"$type": "blob"})]
    changes = tuple(put(f"app.test/{number}", value) for number, value in enumerate(values))
    await insert(db, synchronized(1), changes=(*changes, put("app.test/z", json.dumps(blob(size=MAX_BIGINT)))))
    assert await shown(sql) == [("z", CID, "image/jpeg", MAX_BIGINT)]
