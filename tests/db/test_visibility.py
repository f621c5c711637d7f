"""No reader gets records of hidden repos: views, functions, typed views, links, exports and feeds.

Views and functions are found in the catalog, and feeds in the list of their kinds. So a new one is covered, or fails.
"""

import re

import asyncpg
import orjson
import pytest

from indexer.db import Database
from indexer.db.tap_feed import SNAPSHOT_BEGIN, DeliveryProgress
from indexer.readers.jetstream.events import EventFilter, LogPosition, Wire, encode_page, v1_message, v2_message
from indexer.readers.tap.deliveries import Deliveries, RefusalLimits
from indexer.sync.changes import Batch, RepoWrite
from indexer.telemetry.metrics import FEED_KINDS
from tests.db.link_steps import settle, turn_on
from tests.db.repo_rows import did, insert, put, synchronized
from tests.lexicons.samples import LIKE, LIKE_DOCUMENT, sourced
from tests.source_code import PROJECT, source_files

pytestmark = pytest.mark.slow
SHOWN, DEACTIVATED, TAKEN_DOWN = "shown", "deactivated", "taken-down"
KINDS = (SHOWN, DEACTIVATED, TAKEN_DOWN)
BLOB = "bafkreifepiu23okq5zuyvyhsoiazv2icw2van3s7ko6d3ixl5jx2yj2yhu"
CHANGE_LOG = {"changes", "changes_after", "next_changes"}
"""Paths, CIDs and revs of all stored records, without values: who folds it needs what will be shown again."""
NO_RECORDS = {
    "bucket_of", "cid_text", "did_of", "latest_seq", "register_reader", "unregister_reader", "request_resync",
    "request_takedown", "request_record", "set_collections", "set_signal_collections", "set_track", "track", "untrack",
    "wait_for",
}  # fmt: skip
"""Functions of the public schema whose results have nothing of a record."""
FUNCTIONS = {
    "changes_after": "select f::text from atproto.changes_after(0, 1000) f",
    "next_changes": "select f::text from atproto.next_changes('reader', 1000) f",
    "record_bytes": "select convert_from(atproto.record_bytes(did, collection, rkey), 'UTF8') from indexer.record",
    "link_count": "select target from indexer.record_link where atproto.link_count(target, collection, path) > 0",
}
RELATIONS = """
    select n.nspname, c.relname from pg_class c join pg_namespace n on n.oid = c.relnamespace
    where n.nspname in ('atproto', 'lexicon') and c.relkind in ('r', 'v', 'm', 'f', 'p')
"""
DEFINITIONS = """
    select c.relname as name, pg_get_viewdef(c.oid) as text from pg_class c
    where c.relnamespace in ('atproto'::regnamespace, 'indexer'::regnamespace) and c.relkind in ('v', 'm')
    union all
    select p.proname, p.prosrc from pg_proc p
    where p.pronamespace in ('atproto'::regnamespace, 'indexer'::regnamespace)
"""
COLUMN_ITSELF = {"repos", "request_takedown", "take_down", "adapt_public_schema", "start_tracking", "stop_tracking"}
"""The view and the functions that show or write the column `takedown`."""
IN_PYTHON = re.compile(r"\bactive and not [\w.{}]*takedown")


def secret(kind: str) -> str:
    """Return a text of the record of a repo, which is in no path."""
    return f"secret-of-{kind}"


def secrets_in(text: str) -> set[str]:
    return {kind for kind in KINDS if secret(kind) in text}


def of_repos(text: str) -> set[str]:
    return {kind for kind in KINDS if did(kind) in text}


@pytest.fixture
async def filled(db: Database) -> Database:
    """Store a like of one visible and two hidden repos, with a link, a blob, its bytes and a typed view."""
    await db.lexicons.add(sourced(LIKE_DOCUMENT))
    await turn_on(db)
    for kind in KINDS:
        subject = {"uri": f"at://{did('author')}/app.bsky.feed.post/{secret(kind)}", "cid": secret(kind)}
        blob = {"$type": "blob", "ref": {"$link": BLOB}, "mimeType": f"image/{secret(kind)}", "size": 1}
        value = {"$type": LIKE, "subject": subject, "createdAt": "2024-02-29T12:00:00Z", "image": blob}
        like = put(f"{LIKE}/like", orjson.dumps(value).decode())
        await insert(db, synchronized(kind), changes=(like._replace(original=secret(kind).encode()),))
    hidden = RepoWrite(synchronized(DEACTIVATED), synchronized(DEACTIVATED, version=2, active=False), ())
    assert not (await db.write(Batch((hidden,)))).skipped
    await db.repos.set_takedown(did(TAKEN_DOWN), on=True)
    await settle(db)
    return db


@pytest.mark.usefixtures("filled")
async def test_no_view_and_no_function_shows_records_of_hidden_repos(sql: asyncpg.Connection) -> None:
    seen = set[str]()
    for schema, name in await sql.fetch(RELATIONS):
        rows = await sql.fetch(f'select r::text from {schema}."{name}" r')  # noqa: S608 - names of the catalog
        text = " ".join(row for (row,) in rows)
        assert secrets_in(text) <= {SHOWN}, f"{schema}.{name}"
        if secrets_in(text):
            seen.add(name)
        elif name not in {"repos", *CHANGE_LOG}:
            assert of_repos(text) == set(), f"{schema}.{name}: classify it"
    assert seen == {"records", "blobs", "links", LIKE}, "each view that shows records was filled"
    await sql.execute("select atproto.register_reader('reader', 0)")
    names = await sql.fetch("select proname from pg_proc where pronamespace = 'atproto'::regnamespace")
    assert {name for (name,) in names} == FUNCTIONS.keys() | NO_RECORDS, "classify the function, or test it"
    for name, call in FUNCTIONS.items():
        text = " ".join(row for (row,) in await sql.fetch(call) if row)
        expected = set() if name in CHANGE_LOG else {SHOWN}
        assert secrets_in(text) == expected, name
    assert FUNCTIONS.keys() | {"changes"} >= CHANGE_LOG


async def test_no_feed_and_no_export_sends_records_of_hidden_repos(filled: Database) -> None:
    async def tap(*, one_per_repo: bool, snapshot: bool = False) -> str:
        """Return all events of the log, or of a snapshot, and check that the hidden repos are set aside."""
        deliveries = Deliveries(filled, DeliveryProgress(0, 0), RefusalLimits(), one_per_repo=one_per_repo)
        async with filled.feed.session() as session:
            if snapshot:
                deliveries.window.add_snapshot(await session.snapshot_after(SNAPSHOT_BEGIN, 100))
            else:
                deliveries.window.add(await session.changes_after(0, 1_000))
        messages = list[bytes]()
        while len(deliveries.window) + deliveries.window.snapshot_events:
            events = await deliveries.events(await deliveries.take(100))
            messages += [event.message for event in events]
            for event in events:
                deliveries.acknowledge(event.seq)
        assert {row.did for row in deliveries.set_aside.changes().added} == {did(DEACTIVATED), did(TAKEN_DOWN)}
        return b" ".join(messages).decode()

    async def jetstream(wire: Wire) -> str:
        chunk = encode_page(LogPosition(0), await filled.changes.page(0, 1_000, 1 << 20))
        return chunk.select(EventFilter(), 0, wire, compress=False)[0].decode(errors="replace")

    feeds = {
        "tap": [await tap(one_per_repo=False), await tap(one_per_repo=False, snapshot=True)],
        "webhook": [await tap(one_per_repo=True), await tap(one_per_repo=True, snapshot=True)],
        "jetstream": [await jetstream(v1_message), await jetstream(v2_message)],
    }
    assert feeds.keys() == set(FEED_KINDS)
    async with filled.exports.rows(LIKE) as (_, pages):
        exported = [row async for page in pages for row in page]
    for name, texts in (feeds | {"export": [str(exported)]}).items():
        for text in texts:
            assert secrets_in(text) == {SHOWN}, name


async def test_there_is_one_definition_of_what_is_hidden(sql: asyncpg.Connection) -> None:
    """The column `visible` of the table of repos: no view, function or statement decides by takedowns."""
    found = set[str]()
    for name, text in await sql.fetch(DEFINITIONS):
        assert "takedown" not in text.lower() or name in COLUMN_ITSELF, name
        found |= {name} if ".visible" in text else set()
    assert found >= {"repos", "records", "blobs", "links", "record_bytes", "link_count", "stop_tracking"}
    own = {"indexer/sync/repo.py", "indexer/db/change_log_reads.py"}
    places = [path for path in source_files("indexer") if path.suffix == ".py" and IN_PYTHON.search(path.read_text())]
    assert {str(path.relative_to(PROJECT)) for path in places} == own
