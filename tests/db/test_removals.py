"""Redacted and hidden records are deleted, also if they are written at the same time; each step is audited."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from time import thread_time
from typing import Any

import asyncpg
import pytest

from indexer.atproto.syntax import CollectionFilter
from indexer.db import Database, DatabaseError, dead_letters, identities
from indexer.db.scope import CurrentScope
from indexer.errors import InvalidScopeError
from indexer.reasons import Desync, Rejection
from indexer.sync.changes import Batch, DeadLetter, RepoWrite
from indexer.sync.identity import StoredIdentity
from indexer.sync.repo import Repo, SyncStatus
from indexer.sync.scope import Scope
from indexer.sync.shard import Shard
from indexer.tasks.scope import ScopeNarrowing, ScopeSettings
from indexer.telemetry.metrics import Metrics
from tests.db.change_log_helpers import after
from tests.db.link_steps import LIKE, like, turn_on
from tests.db.repo_rows import buffer_event, did, in_progress, insert, put, synchronized, waiting_for_locks
from tests.sync.signing_account import STORE_ALL
from tests.waiting import until

pytestmark = pytest.mark.slow

COLLECTION = "app.test.note"
PATH = f"{COLLECTION}/a"


def uri(name: object, path: str = PATH) -> str:
    return f"at://{did(name)}/{path}"


async def stored(sql: asyncpg.Connection) -> list[tuple[str, ...]]:
    return [tuple(row) for row in await sql.fetch("select did, rkey from indexer.record order by did, rkey")]


async def current_scope(db: Database) -> CurrentScope:
    scope = CurrentScope(db.scope, STORE_ALL)
    await scope.begin()
    return scope


def narrowing(db: Database, scope: CurrentScope, shard: Shard = Shard()) -> ScopeNarrowing:  # noqa: B008
    return ScopeNarrowing(db, scope, shard, Metrics(), ScopeSettings())


HOLD_REPO = "select from indexer.repo where did = $1 for update"


@asynccontextmanager
async def held(database: str, argument: str, statement: str = HOLD_REPO) -> AsyncIterator[None]:
    """Hold the locks of a statement during the block, by default those of the repo, and commit."""
    connection = await asyncpg.connect(database)
    try:
        async with connection.transaction():
            await connection.execute(statement, argument)
            yield
    finally:
        await connection.close()


async def test_batch_that_was_planned_before_the_redaction_is_planned_again(
    db: Database, sql: asyncpg.Connection
) -> None:
    """Its process reads the scope before it plans on the row, which has a later version than its scope."""
    scope = await current_scope(db)
    await insert(db, synchronized("a"), changes=(put(PATH), put(f"{COLLECTION}/b")))
    late = RepoWrite(synchronized("a"), synchronized("a", version=2), (put(PATH, '{"secret": 1}', "update"),))
    assert await db.removals.add(uri("a"), "redact")
    present = await db.scope.load()
    assert present is not None
    assert await db.removals.delete(scope.scope, [(did("a"), COLLECTION, "a")]) is None, "the scope is an earlier one"
    assert await db.removals.delete(present, [(did("a"), COLLECTION, "a")]) == 1
    assert (await db.write(Batch((late,)))).skipped == {did("a")}
    assert await stored(sql) == [(did("a"), "b")]
    assert scope.is_behind((await db.repos.load([did("a")])).values())
    assert [row["action"] for row in await after(sql) if row["rkey"] == "a"] == ["create", "delete"]


async def test_record_of_an_unknown_repo_that_is_written_meanwhile_is_deleted(
    db: Database, sql: asyncpg.Connection
) -> None:
    """By the process that has its shard, as soon as it plans nothing with an earlier scope."""
    scope = await current_scope(db)
    with scope.in_use():
        assert await db.removals.add(uri("new"), "hide")
        await insert(db, synchronized("new"), changes=(put(PATH), put(f"{COLLECTION}/b")))
        await scope.refresh()
        await narrowing(db, scope).step()
        assert len(await stored(sql)) == 2
    await narrowing(db, scope, Shard(0, 2) if Shard(1, 2).owns(did("new")) else Shard(1, 2)).step()
    assert len(await stored(sql)) == 2, "another process has its shard"
    await narrowing(db, scope).step()
    assert await stored(sql) == [(did("new"), "b")]


async def test_resync_in_progress_is_ended_with_its_buffer(db: Database, sql: asyncpg.Connection) -> None:
    scope = await current_scope(db)
    claimed = await in_progress(db, "a")
    await buffer_event(db, claimed, put(PATH))
    assert await db.removals.add(uri("a"), "redact")
    await scope.refresh()
    task = narrowing(db, scope)
    await task.step()
    assert await sql.fetchval("select count(*) from indexer.buffered_event") == 0
    assert not await db.resyncs.renew(did("a"), claimed.lease, 10.0), "the worker finds its claim lost"
    assert await stored(sql) == [(did("a"), "a")]
    await task.step()
    assert await stored(sql) == []
    repo = (await db.repos.load([did("a")]))[did("a")]
    assert (repo.sync_status, repo.sync_reason) == (SyncStatus.DESYNCHRONIZED, Desync.REQUESTED)


async def test_repo_that_lacks_records_of_the_scope_is_fetched(db: Database) -> None:
    """It must not count as complete, so its row does not get the version of the scope."""
    await db.scope.begin(Scope(collections=CollectionFilter([COLLECTION])))
    await insert(db, synchronized("lacks"), synchronized("has", scope_version=2), changes=(put(PATH),))
    await db.scope.change(collections=[COLLECTION, "app.test.other"])
    for name in ("lacks", "has"):
        assert await db.removals.add(uri(name), "redact")
    assert [row.newest for row in await db.scope.progress()] == [False, True], "no removal adds a collection"
    scope = await db.scope.load()
    assert scope is not None
    assert await db.removals.delete(scope, [(did(name), COLLECTION, "a") for name in ("lacks", "has")]) == 2
    repos = await db.repos.load([did("lacks"), did("has")])
    assert (repos[did("lacks")].scope_version, repos[did("lacks")].sync_reason) == (0, Desync.SCOPE_WIDENED)
    assert (repos[did("has")].scope_version, repos[did("has")].sync_status) == (scope.version, SyncStatus.SYNCHRONIZED)


async def test_repo_that_lacks_records_is_not_fetched_because_of_a_collection(
    db: Database, sql: asyncpg.Connection
) -> None:
    """All incomplete repos would be desynchronized at once. What an earlier process writes is deleted, too."""
    await db.scope.begin(Scope(collections=CollectionFilter([COLLECTION])))
    await insert(db, synchronized("lacks"), changes=(put(PATH),))
    await db.scope.change(collections=[COLLECTION, "app.test.other"])
    assert await db.removals.add(COLLECTION, "redact")
    scope = await current_scope(db)
    assert await db.removals.delete(scope.scope, [(did("lacks"), COLLECTION, "a")]) == 1
    repo = (await db.repos.load([did("lacks")]))[did("lacks")]
    assert (repo.scope_version, repo.sync_status) == (0, SyncStatus.SYNCHRONIZED)
    await db.write(Batch((RepoWrite(repo, repo._replace(version=repo.version + 1), (put(PATH),)),)))
    assert len(await stored(sql)) == 1
    await narrowing(db, scope).step()
    assert await stored(sql) == []


async def test_resyncs_that_have_buffered_records_of_a_redacted_collection_are_ended(
    db: Database, sql: asyncpg.Connection
) -> None:
    for name, collection in (("a", COLLECTION), ("b", f"{COLLECTION}s")):
        await buffer_event(db, await in_progress(db, name))
        await sql.execute(
            "update indexer.buffered_event set frame = $1 where did = $2", f"x {collection}/a".encode(), did(name)
        )
    assert await db.removals.delete_messages(None, COLLECTION, None) == 0
    assert [name for (name,) in await sql.fetch("select did from indexer.buffered_event")] == [did("b")]
    assert (await db.repos.load([did("a")]))[did("a")].sync_status is SyncStatus.DESYNCHRONIZED


LONG = "did:web:" + "a" * 2_040


@pytest.mark.parametrize(
    "target",
    ["", "*", "app.test.*", "note", "did:", "at://", f"at://{did(1)}", f"at://{did(1)}/a.b.c", "at://a.test/a.b.c/d",
     uri(1, "a.b.c/."), uri(1, "a.b.c/.."), uri(1, "a.b.c/" + "d" * 513),
     uri(1, "a.b.*/d"), uri(1, "a.b.c/d e"), uri(1, "a.b.c/" + "d" * 3_000), f"at://{LONG}/a.{'b' * 60}.c/{'d' * 512}"],
)  # fmt: skip
async def test_invalid_target_is_refused(db: Database, sql: asyncpg.Connection, target: str) -> None:
    with pytest.raises(InvalidScopeError):
        await db.removals.add(target, "redact")
    assert await sql.fetchval("select count(*) from indexer.removal") == 0


async def test_stored_path_that_is_invalid_ends_no_task(db: Database, sql: asyncpg.Connection) -> None:
    scope = await current_scope(db)
    await sql.execute(
        "insert into indexer.removal (target, action, role, version) values ($1, 'hide', '', 2)", uri("a", "a.b.c/..")
    )
    await sql.execute("update indexer.scope set version = 2")
    await scope.refresh()
    await narrowing(db, scope).step()
    assert await db.removals.add(uri("a", "a.b.c/" + "d" * 512), "hide"), "the longest valid record key"


async def test_each_step_has_an_audit_line_with_the_role(db: Database, sql: asyncpg.Connection) -> None:
    """A redaction is irreversible, and a step that changes nothing has no line."""
    await db.scope.begin(Scope())
    await insert(db, synchronized("a"))
    await sql.execute("set role atproto_operator")
    for target, on in ((uri("a"), True), (uri("a"), True), (uri("a"), False), (uri("a"), False), (did("a"), True)):
        assert await sql.fetchval("select atproto.request_takedown($1, $2)", target, on)
    for statement in ("delete from indexer.removal", "select indexer.remove('a.b.c', 'redact', null)"):
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await sql.execute(statement)
    await sql.execute("reset role")
    for target in (uri("a"), uri("a"), COLLECTION, did("a")):
        await db.removals.add(target, "redact", "why")
    for target in (uri("a"), COLLECTION):
        assert not await db.removals.add(target, "hide")
        with pytest.raises(InvalidScopeError, match="is redacted, which is irreversible"):
            await db.removals.add(target, "show")
    assert not await db.repos.set_takedown(uri("unknown"), on=True), "nothing is hidden in advance"
    rows = await sql.fetch("select action, target, role = 'atproto_operator', reason from indexer.removal order by id")
    assert list(map(tuple, rows)) == [
        ("hide", uri("a"), True, None), ("show", uri("a"), True, None), ("hide", did("a"), True, None),
        ("redact", uri("a"), False, "why"), ("redact", COLLECTION, False, "why"), ("redact", did("a"), False, "why"),
    ]  # fmt: skip
    assert {row["target"] for row in await db.removals.of(uri("a"), COLLECTION, did("a"), uri("b"))} == {
        uri("a"), COLLECTION, did("a")
    }  # fmt: skip
    assert await db.repos.set_takedown(did("a"), on=False, reason="why")
    assert [row["action"] for row in await db.removals.of(did("a"))] == ["redact"], "it stays redacted"
    scope = await db.scope.load()
    assert scope is not None
    assert (scope.version, scope.complete_from) == (5, 0), "nothing was added that would have to be fetched"
    assert not scope.selects(did("a"), PATH.encode())
    assert not scope.collections.matches(COLLECTION)
    assert scope.collections.matches("app.test.notes")


async def test_redaction_beside_a_reversal_is_permanent(db: Database, sql: asyncpg.Connection, database: str) -> None:
    """Also for a process that reads a row that an earlier release wrote after the redaction."""
    await db.scope.begin(Scope())
    await insert(db, synchronized("a"), changes=(put(PATH),))
    assert await db.removals.add(uri("a"), "hide")
    async with held(database, did("a")):
        show = asyncio.ensure_future(db.removals.add(uri("a"), "show"))
        await until(lambda: waiting_for_locks(sql, 1))
        assert await db.removals.add(uri("a"), "redact")
    with pytest.raises(InvalidScopeError, match="irreversible"):
        await show
    assert await db.removals.add(uri("b"), "hide")
    async with held(database, uri("b"), "select indexer.remove($1, 'redact', null)"):
        show = asyncio.ensure_future(db.removals.add(uri("b"), "show"))
        await until(lambda: waiting_for_locks(sql, 1))
    with pytest.raises(InvalidScopeError, match="irreversible"):
        await show
    before = await db.scope.load()
    await sql.execute(
        "insert into indexer.removal (target, action, role, version) values ($1, 'show', '', 9)", uri("a")
    )
    await sql.execute("update indexer.scope set version = 9")
    for known in (Scope(), before):
        scope = await db.scope.load(known or Scope())
        assert scope is not None
        assert not scope.selects(did("a"), PATH.encode())


async def test_reversal_that_ends_a_deadlock_is_repeated(db: Database, sql: asyncpg.Connection) -> None:
    """It takes the repo and then the scope, as resyncs do. Tasks that apply the scope take them the other way round."""
    await db.scope.begin(Scope())
    await insert(db, synchronized("a"))
    await sql.execute("""
        alter function indexer.take_down rename to really_take_down;
        create sequence indexer.attempt;
        create function indexer.take_down(target text, takedown boolean, reason text) returns boolean
        language plpgsql as $$ declare attempt bigint = nextval('indexer.attempt'); begin
            if attempt = 1 then raise deadlock_detected; elsif attempt = 3 then raise lock_not_available; end if;
            return indexer.really_take_down($1, $2, $3);
        end $$
    """)
    assert await db.repos.set_takedown(uri("a"), on=True)
    with pytest.raises(DatabaseError):
        await db.repos.set_takedown(uri("a"), on=False)


async def test_account_is_redacted_beside_and_after_tracking(
    db: Database, sql: asyncpg.Connection, database: str
) -> None:
    await db.scope.begin(Scope())
    await insert(db, synchronized("a"))
    async with held(database, did("a")):
        redact = asyncio.ensure_future(db.removals.add(did("a"), "redact"))
        await until(lambda: waiting_for_locks(sql, 1))
        track = asyncio.ensure_future(db.scope.track([did("a")]))
        await until(lambda: waiting_for_locks(sql, 2))
    assert await redact
    assert await track == 0
    await sql.execute("update indexer.repo set tracked = true, active = true")
    assert not await db.removals.add(did("a"), "redact"), "it was redacted before"
    assert not await sql.fetchval("select tracked from indexer.repo")


async def test_links_of_a_redacted_record_are_deleted_without_a_process_that_keeps_links(
    db: Database, sql: asyncpg.Connection
) -> None:
    await db.scope.begin(Scope())
    await insert(db, synchronized("fan"), changes=(like("a"), like("b")))
    await turn_on(db)
    assert await db.removals.add(uri("fan", f"{LIKE}/a"), "redact")
    scope = await db.scope.load()
    assert scope is not None
    assert await db.removals.delete(scope, [(did("fan"), LIKE, "a")]) == 1
    assert await db.links.catch_up(10.0)
    assert [rkey for (rkey,) in await sql.fetch("select rkey from indexer.record_link")] == ["b"]
    async with db.links.session() as other:
        assert await other.lock.claim()
        await insert(db, synchronized("other"), changes=(like("c"),))
        assert not await db.links.catch_up(0.1), "the process that keeps links is behind"


async def test_redacted_account_is_not_tracked_by_anything(db: Database, sql: asyncpg.Connection) -> None:
    await db.scope.begin(Scope())
    await insert(db, synchronized("a"))
    for name in ("a", "unknown"):
        assert await db.removals.add(did(name), "redact")
        assert await db.scope.track([did(name), did("other")]) == (name == "a"), "others are tracked"
        assert await db.repos.add([did(name)]) == 0
        assert (await db.write(Batch((RepoWrite(Repo(did(name)), Repo(did(name), version=1)),)))).skipped
    await db.identities.save([StoredIdentity(did(name), "a.test", "https://pds.test", None, 1.0) for name in "ab"])
    assert set(await db.identities.load([did("a"), did("b")])) == {did("b")}
    warnings: list[str] = []
    sql.add_log_listener(lambda _, message: warnings.append(message.message))
    await sql.execute("select atproto.track(array[$1])", did("a"))
    assert warnings == [f"{did('a')} is redacted, so it is not tracked"]
    assert {row["did"] for row in await sql.fetch("select did from indexer.repo where tracked")} == {did("other")}


LOOKED_FOR_WRITERS = """
    select exists (
        select from pg_stat_activity where datname = current_database() and application_name = 'indexer'
            and query like '%virtualtransaction%'
    )
"""


class BeforeStoring:
    """A connection on which something happens just before identities are stored."""

    def __init__(self, connection: Any, happens: Awaitable[object]) -> None:
        self._connection = connection
        self._happens = happens

    async def fetch(self, statement: str, *arguments: object) -> Any:
        if "insert into indexer.identity" in statement:
            await self._happens
        return await self._connection.fetch(statement, *arguments)

    async def execute(self, statement: str, *arguments: object) -> Any:
        return await self._connection.execute(statement, *arguments)


async def redact_account(db: Database) -> None:
    await db.removals.add(did("a"), "redact")
    await db.removals.delete_messages(did("a"), None, None)


async def test_lookup_that_ends_during_the_redaction_of_its_account_stores_nothing(
    db: Database, sql: asyncpg.Connection
) -> None:
    await db.scope.begin(Scope())
    connection: Any = BeforeStoring(sql, redact_account(db))
    async with sql.transaction():
        await identities.save_identities(connection, [StoredIdentity(did("a"), "a.test", "https://a.test", None, 1.0)])
    assert await db.identities.load([did("a")]) == {}, "the statement began after the redaction"


@pytest.mark.parametrize("table", ["identity", "dead_letter"])
async def test_redaction_waits_for_transactions_that_may_have_begun_before_it(
    db: Database, sql: asyncpg.Connection, database: str, table: str
) -> None:
    await db.scope.begin(Scope())
    writing = await asyncpg.connect(database)
    async with writing.transaction():
        if table == "identity":
            await identities.save_identities(writing, [StoredIdentity(did("a"), "a.test", None, None, 1.0)])
        else:
            await dead_letters.insert(writing, [letter("a", b"frame", 1)])
        redact = asyncio.ensure_future(redact_account(db))
        await until(lambda: redact.done() or sql.fetchval(LOOKED_FOR_WRITERS))
    await redact
    await writing.close()
    assert await sql.fetchval(f"select count(*) from indexer.{table}") == 0  # noqa: S608


async def test_redaction_names_the_session_whose_transaction_does_not_end(
    db: Database, sql: asyncpg.Connection, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("indexer.db.removals.WRITERS_SECONDS", 0.0)
    writing = await asyncpg.connect(database)
    async with writing.transaction():
        await dead_letters.insert(writing, [letter("a", b"frame", 1)])
        with pytest.raises(DatabaseError, match=rf"pids\) do not end: {writing.get_server_pid()};"):
            await db.removals.delete_messages(did("a"), None, None)
    await writing.close()
    assert await sql.fetchval("select count(*) from indexer.dead_letter") == 1
    assert await db.removals.delete_messages(did("a"), None, None) == 1


def letter(name: object | None, frame: bytes, seq: int) -> DeadLetter:
    sender = None if name is None else did(name)
    return DeadLetter("wss://relay.test", seq, sender, "commit", Rejection.SIGNATURE_INVALID, "", frame)


async def test_dead_letters_with_removed_content_are_not_stored(db: Database, sql: asyncpg.Connection) -> None:
    await db.write(Batch(dead_letters=(letter(None, b"before all removals", 100),)))
    for target in (uri("a"), "app.redacted.all", did("gone")):
        await db.removals.add(target, "redact")
    for name, actions in (("shown", ("hide", "show")), ("hidden", ("hide", "show", "hide"))):
        for action in actions:
            await db.removals.add(uri(name), action)
    await db.removals.add(uri("redacted"), "hide")
    await db.removals.add(uri("redacted"), "redact")
    frames: Sequence[tuple[Any, bytes, bool]] = [
        ("a", PATH.encode(), False), ("a", b"cut off", False),
        ("b", PATH.encode(), True), ("b", b"x app.redacted.all/x", False),
        ("b", b"app.redacted.all2/x", True), (None, b"app.redacted.all/", False),
        ("gone", b"anything", False), (None, b"unreadable", False),
        ("shown", PATH.encode(), True), ("hidden", b"cut off", False), ("redacted", b"cut off", False),
    ]  # fmt: skip
    letters = [letter(name, frame, seq) for seq, (name, frame, _) in enumerate(frames)]
    await db.write(Batch(dead_letters=tuple(letters)))
    await db.write(Batch(dead_letters=(letter(None, b"alone in its batch", 200),)))
    seqs = [row["seq"] for row in await sql.fetch("select seq from indexer.dead_letter order by seq")]
    assert seqs == [seq for seq, (*_, kept) in enumerate(frames) if kept] + [100]


async def test_full_scope_of_removals_is_read_and_dead_letters_are_stored_quickly(
    db: Database, sql: asyncpg.Connection
) -> None:
    """The number is bounded, because each process has all of them in memory."""
    scope = await db.scope.begin(Scope())
    await sql.execute(
        "insert into indexer.removal (target, action, role, version) "
        "select 'at://' || case n % 2 when 0 then md5(n::text) else $1 end || '/app.test.note/' || n, 'redact', '', 2 "
        "from generate_series(1, 100000) n", did("many"),
    )  # fmt: skip
    await sql.execute("update indexer.scope set version = 2; analyze indexer.removal")
    with pytest.raises(InvalidScopeError, match="which is the limit"):
        await db.removals.add(uri("a"), "redact")
    loaded = await db.scope.load(scope)
    assert loaded is not None
    assert sum(map(len, loaded.removed.values())) == 100_000
    assert await db.scope.load(loaded) is loaded, "the same version is not read again"
    for action in ("hide", "show"):
        await sql.execute(
            "insert into indexer.removal (target, action, role, version) "
            "select 'at://' || $1 || '/app.test.note/' || n, $2, '', 2 from generate_series(1, 20000) n",
            did("shown"), action,
        )  # fmt: skip
    for names in (["many", *range(500)], ["shown"] * 500):
        letters = [letter(name, b"x" * 1_000, n) for n, name in enumerate(names)]
        async with asyncio.timeout(15):  # without an index of them, or with a search for each letter, it takes longer
            await db.write(Batch(dead_letters=tuple(letters)))
    assert replace(loaded, removed={}) == loaded
    await sql.execute("update indexer.removal set target = 'did:plc:' || id where id = 1")
    assert await db.removals.add(uri("a"), "redact"), "accounts do not count"
    with pytest.raises(InvalidScopeError, match="which is the limit"):
        await db.removals.add(uri("b"), "redact")
    assert await db.removals.add(did("gone"), "redact")


async def test_many_removals_of_one_account_are_read_as_quickly_as_those_of_many(
    db: Database, sql: asyncpg.Connection
) -> None:
    scope, seconds = await db.scope.begin(Scope()), list[float]()
    for version, name in ((2, "n::text"), (3, "'a'")):
        await sql.execute(
            "insert into indexer.removal (target, action, role, version) "  # noqa: S608 - no text of others
            f"select 'at://' || {name} || '/app.test.note/' || n, 'redact', '', $1 from generate_series(1, 20000) n",
            version,
        )
        await sql.execute("update indexer.scope set version = $1", version)
        began = thread_time()
        scope = await db.scope.load(scope) or scope
        seconds.append(thread_time() - began)
    assert len(scope.removed["a"]) == 20_000
    assert seconds[1] < 10 * seconds[0]


async def test_removal_of_a_record_ends_no_resync_of_another_repo(db: Database) -> None:
    """A change of the scope, or of a redacted collection, ends all; so many redactions do not stop a backfill."""
    scope = await db.scope.begin(Scope())
    assert await db.removals.add(uri("a"), "hide")
    other = [await in_progress(db, name) for name in "ab"]
    for claimed, held in zip(other, (False, True), strict=True):
        async with db.resyncs.transaction(claimed, scope_version=scope.version) as transaction:
            assert await transaction.holds_scope() is held
    async with db.resyncs.transaction(*other, scope_version=scope.version) as transaction:
        assert not await transaction.holds_scope(), "one of the repos is concerned"
    present = await db.scope.load(scope)
    assert present is not None
    assert (present.version, present.chosen_in, present.complete_from) == (2, 1, 0)
    async with db.resyncs.transaction(other[0], scope_version=present.version) as transaction:
        assert await transaction.holds_scope()
    assert await db.removals.add(COLLECTION, "redact")
    async with db.resyncs.transaction(other[1], scope_version=present.version) as transaction:
        assert not await transaction.holds_scope()


async def test_scope_is_read_in_steps(db: Database) -> None:
    """Each step reads only what was removed since, with the same result as when all is read."""
    scope = await db.scope.begin(Scope())
    for target, action in (
        (uri("a"), "hide"), (uri("a", "a.b.c/d"), "redact"), (uri("b"), "hide"), (uri("a"), "show"),
        (uri("b"), "show"), (COLLECTION, "redact"), (did("c"), "redact"), (uri("a"), "hide"),
    ):  # fmt: skip
        assert await db.removals.add(target, action)
        known, whole = await db.scope.load(scope), await db.scope.load()
        assert known is not None
        assert whole is not None
        assert (known, known.removed) == (replace(whole, collections=known.collections), whole.removed)
        assert known.collections.excluded == whole.collections.excluded
        scope = known
    restored = await db.scope.load(replace(scope, version=scope.version + 5, removed={}))
    assert restored is not None
    assert restored.removed == scope.removed, "a process that runs while a backup is restored reads all"
    assert scope.removed == {did("a"): frozenset({PATH.encode(), b"a.b.c/d"})}
    assert scope.collections.excluded == {COLLECTION}
