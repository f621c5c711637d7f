"""Every SQL statement that writes `sync_status` agrees with the state machine in `TRANSITIONS`.

Rows that `move` returned are written by the statements of `apply_batch`. All other statements that write the column are
compared with `TRANSITIONS` here.
"""

import asyncpg
import pytest

from indexer.reasons import Desync
from indexer.store import Store
from indexer.store.apply_batch import INSERT_REPOS, UPDATE_REPOS
from indexer.store.resync_queue import CLAIM
from indexer.sync.plans import Batch, BufferedEvent, RepoWrite
from indexer.sync.repo_state import CHOSEN, Repo, SyncStatus
from indexer.sync.repo_transitions import TRANSITIONS, Outcome, Trigger, amend, erase
from tests.store.parsed_statements import Node, Statement, database_statements, nodes, sent_statements, table_of
from tests.store.repo_rows import did, in_progress, insert, synchronized

COLUMN = "sync_status"


def writes_status(statement: Statement) -> bool:
    """Return True if the statement inserts, updates or copies into the column `sync_status` of the table `repo`."""
    written: list[Node] = []
    for level in statement.levels:
        if level.target == "indexer.repo":
            written += [*level.node.get("cols", ()), *level.node.get("targetList", ())]
            written += level.node.get("onConflictClause", {}).get("targetList", ())
            if level.kind == "InsertStmt" and "cols" not in level.node:
                return True
    names = {target["ResTarget"]["name"] for target in written}
    for copy in nodes(statement.trees, "CopyStmt"):
        if table_of(copy.get("relation", {})) == "indexer.repo":
            names |= {column["String"]["sval"] for column in copy.get("attlist", ())} or {COLUMN}
    return COLUMN in names


@pytest.mark.parametrize(
    ("sql", "expected"),
    [
        ("insert into indexer.repo (did, sync_status) values ($1, $2)", True),
        ("insert into indexer.repo values ($1, $2)", True),
        ("insert into indexer.repo (did) values ($1) on conflict (did) do update set sync_status = $2", True),
        ("with a as (update indexer.repo set sync_status = $1 returning did) select did from a", True),
        ("copy indexer.repo (did, sync_status) from stdin", True),
        ("copy indexer.repo from stdin", True),
        ("update indexer.repo set rev = $1 where sync_status = $2", False),
        ("insert into indexer.record (did) select did from indexer.repo where sync_status = $1", False),
        ("copy indexer.record (did) from stdin", False),
    ],
)
def test_writes_of_the_column_are_recognized(sql: str, *, expected: bool) -> None:
    assert writes_status(Statement("example", sql)) is expected


async def test_only_known_statements_write_the_sync_status(sql: asyncpg.Connection) -> None:
    statements = [*sent_statements(), *await database_statements(sql)]
    written = {statement.name: statement.sql for statement in statements if writes_status(statement)}
    assert written.keys() == {
        "apply_batch.INSERT_REPOS",
        "apply_batch.UPDATE_REPOS",
        "repo_requests.INSERT_REPOS",
        "resync_queue.CLAIM",
        "function atproto.request_resync",
        "function indexer.start_tracking",
        "function indexer.stop_tracking",
    }
    assert written["apply_batch.INSERT_REPOS"] == written["repo_requests.INSERT_REPOS"] == INSERT_REPOS
    assert written["apply_batch.UPDATE_REPOS"] == UPDATE_REPOS
    assert written["resync_queue.CLAIM"] == CLAIM


async def test_every_function_that_names_the_column_is_parsed(sql: asyncpg.Connection) -> None:
    """A function in another language than SQL and PL/pgSQL would not be parsed."""
    functions = await sql.fetch(
        "select 'function ' || p.oid::regproc as name, lanname, pg_get_functiondef(p.oid) as definition "
        "from pg_proc p join pg_language l on l.oid = prolang "
        "where pronamespace in ('indexer'::regnamespace, 'atproto'::regnamespace)"
    )
    assert {row["lanname"] for row in functions} == {"sql", "plpgsql"}
    named = {row["name"] for row in functions if COLUMN in row["definition"]}
    assert named == {
        "function atproto.request_resync",
        "function indexer.adapt_public_schema",  # only in the text of views
        "function indexer.start_tracking",
        "function indexer.stop_tracking",
    }


@pytest.mark.parametrize("batch_statement", [INSERT_REPOS, UPDATE_REPOS], ids=["insert", "update"])
def test_statements_of_a_batch_take_the_status_from_the_row(batch_statement: str) -> None:
    """They have no status of their own, except in the condition on `lease_until`."""
    [level] = [level for level in Statement("batch", batch_statement).levels if level.target == "indexer.repo"]
    if level.kind == "InsertStmt":
        names = [column["ResTarget"]["name"] for column in level.node["cols"]]
        source = level.node["selectStmt"]["SelectStmt"]["targetList"][names.index(COLUMN)]["ResTarget"]["val"]
    else:
        [source] = [
            target["ResTarget"]["val"] for target in level.node["targetList"] if target["ResTarget"]["name"] == COLUMN
        ]
    assert [field["String"]["sval"] for field in source["ColumnRef"]["fields"]] == ["w", COLUMN]


def test_a_repo_is_added_as_desynchronized_and_new() -> None:
    repo = Repo(did(1), version=1)
    assert (repo.sync_status, repo.sync_reason) == (SyncStatus.DESYNCHRONIZED, Desync.NEW)


def test_a_claim_makes_the_transition_of_its_trigger() -> None:
    statement = Statement("claim", CLAIM)
    [update] = [level for level in statement.levels if level.kind == "UpdateStmt"]
    [to] = [
        target["ResTarget"]["val"]["A_Const"]["sval"]["sval"]
        for target in update.node["targetList"]
        if target["ResTarget"]["name"] == COLUMN
    ]
    compared = [
        condition["rexpr"]["A_Const"]["sval"]["sval"]
        for condition in nodes(statement.trees, "A_Expr")
        if condition["lexpr"].get("ColumnRef", {}).get("fields") == [{"String": {"sval": COLUMN}}]
    ]
    claims = {
        status: triggers[Trigger.CLAIMED] for status, triggers in TRANSITIONS.items() if Trigger.CLAIMED in triggers
    }
    assert {SyncStatus(status) for status in compared} == claims.keys()
    assert len(compared) == 1
    assert set(claims.values()) == {(Outcome.APPLIED, SyncStatus(to))}


async def repo_in(store: Store, status: SyncStatus) -> Repo:
    """Insert a repo with this status; if it is in progress, also with a buffered event."""
    if status is SyncStatus.SYNCHRONIZED:
        await insert(store, synchronized(1))
    elif status is SyncStatus.DESYNCHRONIZED:
        await insert(store, Repo(did(1), version=1, attempts=3, next_attempt_at=1e10, last_error="timeout"))
    else:
        claimed = await in_progress(store, 1, sync_reason=Desync.CHAIN_BREAK)
        buffering = amend(claimed, buffered_events=1, buffered_bytes=5)
        event = BufferedEvent(claimed.did, "wss://relay.test", 5, b"frame")
        assert not (await store.write(Batch((RepoWrite(claimed.version, buffering, (), (event,)),)))).skipped
    [repo] = (await store.repos([did(1)])).values()
    assert repo.sync_status is status
    return repo


@pytest.mark.parametrize("status", SyncStatus)
async def test_a_request_makes_the_transition_of_its_trigger(
    store: Store, sql: asyncpg.Connection, status: SyncStatus
) -> None:
    before = await repo_in(store, status)
    buffered = await sql.fetchval("select count(*) from indexer.buffered_event")
    assert buffered == before.buffered_events == (status is SyncStatus.IN_PROGRESS)
    assert await sql.fetchval("select atproto.request_resync($1)", did(1))
    [after] = (await store.repos([did(1)])).values()
    outcome, expected = TRANSITIONS[status][Trigger.REQUESTED]
    assert outcome is Outcome.APPLIED
    assert after.sync_status is expected
    assert after == amend(
        before,
        sync_status=expected,
        sync_reason=Desync.REQUESTED,
        attempts=0,
        next_attempt_at=None,
        buffered_events=0,
        buffered_bytes=0,
    )
    assert await sql.fetchval("select count(*) from indexer.buffered_event") == 0
    assert await sql.fetchval("select lease_until from indexer.repo") is None


@pytest.mark.parametrize("status", SyncStatus)
async def test_untracking_makes_the_transition_of_an_erasure(store: Store, status: SyncStatus) -> None:
    before = await repo_in(store, status)
    assert await store.untrack([did(1)]) == 1
    [after] = (await store.repos([did(1)])).values()
    outcome, expected = TRANSITIONS[status][Trigger.ERASED]
    assert outcome is Outcome.APPLIED
    assert after.sync_status is expected
    assert after.erase_at is not None
    assert after == erase(before)._replace(
        tracked=False, active=False, erase_at=after.erase_at, latest_verified_rev=None, last_error=None
    )


async def test_tracking_an_untracked_repo_keeps_its_status(store: Store) -> None:
    """It waits for its first fetch, as after an erasure."""
    await insert(store, synchronized(1))
    await store.untrack([did(1)])
    [before] = (await store.repos([did(1)])).values()
    await store.track([did(1)])
    [after] = (await store.repos([did(1)])).values()
    assert after == amend(before, tracked=True, active=True, erase_at=None, next_attempt_at=None, wanted_in=CHOSEN)
