# ruff: noqa: S608 - the names of the views come from lexicons
"""Typed views of all record types in Bluesky's lexicons."""

import json
from typing import Any

import asyncpg
import pytest

from indexer.db import Database
from indexer.db.lexicons import KEY_COLUMNS, AddedState
from tests.db.repo_rows import insert, put, synchronized
from tests.lexicons.published import published_documents
from tests.lexicons.samples import AUTHOR, CID, sourced

pytestmark = pytest.mark.proof("clients")

POST = "app.bsky.feed.post"
POST_VALUE: dict[str, Any] = {
    "$type": POST,
    "text": "hello",
    "langs": ["en"],
    "createdAt": "2024-01-01T00:00:00.000Z",
    "reply": {"root": {"uri": f"at://{AUTHOR}/{POST}/1", "cid": CID}, "parent": {"uri": "at://x", "cid": CID}},
}
EXPECTED = {
    "app.bsky.actor.profile": {"display_name": "text", "avatar_size": "bigint", "labels": "jsonb"},
    "app.bsky.feed.like": {"subject_uri": "text", "subject_cid": "text", "via_uri": "text"},
    POST: {"text": "text", "embed": "jsonb", "langs": "text[]", "created_at": "timestamp with time zone"},
}
COLUMNS = """
    select table_name, column_name, case data_type when 'ARRAY' then 'text[]' else data_type end
    from information_schema.columns where table_schema = 'lexicon'
"""


async def test_every_published_record_type_has_a_view_with_typed_columns(db: Database, sql: asyncpg.Connection) -> None:
    documents = published_documents()
    records = {nsid for nsid, document in documents.items() if document["defs"].get("main", {}).get("type") == "record"}
    assert len(records) > 20
    given = sourced(*documents.values())
    results = await db.lexicons.add(given)
    assert {result.nsid for result in results if result.view} == records
    assert [result.unknown for result in results if result.unknown] == []
    assert {result.state for result in results} == {AddedState.ADDED, AddedState.SKIPPED}
    await insert(
        db,
        synchronized(1),
        changes=(*(put(f"{nsid}/1") for nsid in records - {POST}), put(f"{POST}/1", json.dumps(POST_VALUE))),
    )
    for nsid in records:
        row = await sql.fetchrow(f'select * from lexicon."{nsid}"')
        assert row is not None
        required = documents[nsid]["defs"]["main"]["record"].get("required", [])
        assert (row["lexicon_problem"] is None) == (nsid == POST or not required)
    found: dict[str, dict[str, str]] = {}
    for view, column, type_ in await sql.fetch(COLUMNS):
        found.setdefault(view, {})[column] = type_
    assert all(found[nsid].keys() >= set(KEY_COLUMNS) for nsid in records)
    for nsid, columns in EXPECTED.items():
        assert {column: found[nsid][column] for column in columns} == columns, nsid
    again = {result.state for result in await db.lexicons.add(given)}
    assert again == {AddedState.UNCHANGED, AddedState.SKIPPED}
