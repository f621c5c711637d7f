"""`indexer distribute` on a Citus cluster: where rows are afterwards, interruptions, and errors for the operator."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from indexer.cluster.distribute import Distribution, distribute
from indexer.cluster.tables import DISTRIBUTED
from indexer.db import Database
from indexer.db.layout import load_layout
from indexer.db.migrate import migrate
from indexer.errors import SettingsError
from indexer.sync.shard import Layout
from tests.citus_server import CitusServer
from tests.cli.command_line import environment_without_settings, error_line, run_indexer
from tests.db.change_log_helpers import connected
from tests.db.filled_tables import UNFILLED, contents, fill, tables
from tests.db.repo_rows import insert, put, synchronized

pytestmark = pytest.mark.proof("cluster")

CHANGED = ("alembic_version", "distribution", "shard_owner", "stored_setting")
"""Tables that the command itself writes."""
PLACES = """
    select logicalrelid::regclass::text as name, shardminvalue, shardmaxvalue, nodename, nodeport
    from pg_dist_shard join pg_dist_placement using (shardid) join pg_dist_node using (groupid)
    where shardminvalue is not null order by 1, shardminvalue::int
"""
BUCKETS_OF_SHARDS = """
    select array_agg(b order by b) from generate_series(0, 255) b
    group by get_shard_id_for_distribution_column('indexer.record', b::smallint)
    order by (select min(s.shardminvalue::int) from pg_dist_shard s where s.shardid =
        get_shard_id_for_distribution_column('indexer.record', min(b)::smallint))
"""
LOCAL_SIZES = """
    select relname, pg_relation_size(oid) from pg_class
    where relnamespace = 'indexer'::regnamespace and relname = any($1::text[]) and pg_relation_size(oid) > 0
"""
STATE = (
    PLACES,
    "select * from pg_db_role_setting order by 1, 2",
    "select tgrelid, tgname from pg_trigger where not tgisinternal order by 1, 2",
    "select * from indexer.distribution",
    "select * from indexer.stored_setting order by 1",
)
FOUR_SHARDS = """
    delete from indexer.cursor;
    insert into indexer.cursor (relay, shard, epoch, seq) values
        ('wss://relay.test', '0/1', 1, 30), ('wss://relay.test', '0/2', 1, 50),
        ('wss://relay.test', '2/4', 1, 40), ('wss://relay.test', '3/4', 1, 60),
        ('wss://new.test', '0/2', 3, 7), ('wss://new.test', '1/2', 2, 900);
    insert into indexer.gap (relay, shard, reason) values ('wss://relay.test', '1/2', 'no-cursor');
    insert into indexer.crawl_progress
        (purpose, source, collection, cursor, listed, found, began_at, finished_at, shard, last_gap)
    values ('sweep', 'https://relay.test', '', null, 9, 1, now(), now(), '0/2', 5),
        ('sweep', 'https://relay.test', '', 'x', 9, 1, now(), null, '1/2', 5),
        ('recheck', '', 'app.test.old', null, 0, 2, now(), now(), '0/1', 0),
        ('recheck', '', 'app.test.old', null, 0, 1, now(), null, '0/2', 0)
"""
"""The rows of processes of several shards. Each bucket of the first relay was processed up to 40 at least."""
TWO_OF_FOUR_SHARDS = """
    delete from indexer.cursor;
    insert into indexer.cursor (relay, shard, epoch, seq) values
        ('wss://a.test', '1/4', 1, 1), ('wss://a.test', '2/4', 1, 1)
"""
MANY = 200_000
ADD_MANY_RECORDS = f"""
    insert into indexer.record (did, collection, rkey, bucket, cid, rev, value)
    select did, collection, 'n' || number, bucket, cid, rev, value
    from (select * from indexer.record limit 1) one, generate_series(1, {MANY}) number
"""  # noqa: S608
COPIED_ROWS = """
    select coalesce(max(result::bigint), 0) from run_command_on_workers($$
        select coalesce(max(tuples_processed), 0) from pg_stat_progress_copy where datname = current_database()
    $$) where success
"""
"""The rows that have arrived in a shard of the table that is copied."""
END_SESSIONS = """
    select pg_terminate_backend(pid, 60000) from pg_stat_activity
    where datname = current_database() and application_name ~ '^indexer'
"""
"""Postgres ends the session of a killed command within two seconds. Until then, its statement goes on."""
WRITE_ONE_REPO = "update indexer.repo set version = version + 1 where bucket = 7"
WITHOUT_TRIGGER = """
    select c.oid::regclass::text as name from pg_class c
    where c.relnamespace = 'indexer'::regnamespace and c.relkind in ('r', 'p') and not c.relispartition
        and not exists (select from pg_dist_partition p where p.logicalrelid = c.oid)
        and c.relname !~ '_[0-9]{6,}$'
        and not exists (
            select from pg_trigger t where t.tgrelid = c.oid and t.tgfoid = 'indexer.use_two_phases()'::regprocedure
                and t.tgtype & 28 = 28 and t.tgtype & 1 = 0
        )
"""
"""Tables, no shards, without a trigger of the statement (not 1) for inserts (4), deletes (8) and updates (16)."""


@pytest.fixture(scope="module")
def filled(citus: CitusServer) -> Iterator[str]:
    """Return the DSN of a database on the cluster that is not distributed, with rows in all tables."""
    dsn = citus.create(migrated=False)
    citus.run(migrate(dsn))
    citus.run(fill(dsn))
    yield dsn
    citus.drop(dsn)


@pytest.fixture
def plain(citus: CitusServer, filled: str) -> Iterator[str]:
    """Return the DSN of a copy of it."""
    dsn = citus.copy(filled)
    yield dsn
    citus.drop(dsn)


async def distributed(dsn: str, shards: int | None = 4) -> Distribution:
    return await distribute(dsn, shards, lambda *_: None)


async def test_nothing_is_lost_and_a_second_call_changes_nothing(plain: str) -> None:
    """Each shard has neighbouring positions, and each node half of the shards."""
    before = await contents(plain, without=CHANGED)
    assert {table for table, (rows, _) in before.items() if not rows} == UNFILLED.keys() - set(CHANGED)
    steps: list[tuple[str, int, int]] = []
    first = await distribute(plain, 8, lambda *step: steps.append(step))
    assert (first.shards, first.was_complete, first.tables) == (8, False, [*DISTRIBUTED])
    assert [name for name, _, _ in steps] == ["shards", *DISTRIBUTED[1:]]
    assert await contents(plain, without=CHANGED) == before
    async with connected(plain) as sql:
        places = await sql.fetch(PLACES)
        buckets = [tuple(row[0]) for row in await sql.fetch(BUCKETS_OF_SHARDS)]
        assert await sql.fetch(LOCAL_SIZES, DISTRIBUTED) == []
        state = [await sql.fetch(query) for query in STATE]
        second = await distributed(plain, None)
        assert (second.was_complete, second.tables, second.shards) == (True, [], 8)
        assert [await sql.fetch(query) for query in STATE] == state
    assert await contents(plain, without=CHANGED) == before
    tables = {row["name"].removeprefix("indexer.") for row in places}
    assert tables == set(DISTRIBUTED)
    for table in tables:
        ranges = [tuple(row)[1:] for row in places if row["name"] == f"indexer.{table}"]
        assert ranges == [tuple(row)[1:] for row in places if row["name"] == "indexer.repo"]
        ports = [row[-1] for row in ranges]
        assert len(ports) == 8
        assert ports == [ports[0]] * 4 + [ports[-1]] * 4
    layout = await layout_of(plain)
    assert buckets == [layout.buckets(range(start, start + 32)) for start in range(0, 256, 32)]


async def layout_of(dsn: str) -> Layout:
    async with connected(dsn) as sql:
        return await load_layout(sql)


async def test_shards_are_split_by_a_later_call(plain: str) -> None:
    before = await contents(plain, without=CHANGED)
    await distributed(plain, 2)
    result = await distributed(plain, 8)
    assert (result.shards, result.was_complete, result.tables) == (8, False, [])
    assert await contents(plain, without=CHANGED) == before
    async with connected(plain) as sql:
        places = await sql.fetch(PLACES)
        buckets = [tuple(row[0]) for row in await sql.fetch(BUCKETS_OF_SHARDS)]
    for table in DISTRIBUTED:
        ports = [tuple(row)[-1] for row in places if row["name"] == f"indexer.{table}"]
        assert ports == [ports[0]] * 4 + [ports[-1]] * 4, "the parts of a shard stay on its node"
    layout = await layout_of(plain)
    assert buckets == [layout.buckets(range(start, start + 32)) for start in range(0, 256, 32)]
    again = await distributed(plain, 8)
    assert (again.shards, again.was_complete) == (8, True)
    db = await Database.open(plain)
    try:
        assert (db.layout.parts, db.layout.commit_numbers) == (8, False)
        repos = [synchronized(number) for number in range(20)]
        await insert(db, *repos, changes=(put("app.test/a"),))
        assert len(await db.repos.load([repo.did for repo in repos])) == 20
    finally:
        await db.close()


async def test_split_that_has_cut_no_shard_is_taken_back(plain: str) -> None:
    """It may fail for good, for example because no node has the space."""
    await distributed(plain, 4)
    async with connected(plain) as sql:
        await sql.execute("update indexer.distribution set shards = 8, finished_at = null")  # as it begins
        with pytest.raises(SettingsError):
            await Database.open(plain)
        with pytest.raises(SettingsError, match="have 4 shards, and shards cannot be joined"):
            await distributed(plain, 2)
    assert (await distributed(plain, 4)).shards == 4
    await (await Database.open(plain)).close()


async def test_positions_of_shards_become_positions_of_all_buckets(plain: str) -> None:
    async with connected(plain) as sql:
        await sql.execute(FOUR_SHARDS)
        await distributed(plain)
        cursors = await sql.fetch("select relay, shard, epoch, seq from indexer.cursor order by 1")
        gaps = await sql.fetch("select relay, shard, reason from indexer.gap where closed_at is null order by id")
        crawls = await sql.fetch(
            "select purpose, shard, cursor, found, finished_at, last_gap from indexer.crawl_progress order by purpose"
        )
    assert [tuple(row) for row in cursors] == [
        ("wss://new.test", "0/1", 3, 7),
        ("wss://relay.test", "0/1", 1, 40),
    ]
    assert [tuple(row) for row in gaps] == [
        ("wss://relay.test", "0/1", "no-cursor"),
        ("wss://new.test", "0/1", "sequence-restarted"),
    ]
    assert [tuple(row) for row in crawls] == [("recheck", "0/1", None, 0, None, 0), ("sweep", "0/1", None, 0, None, 0)]


async def test_killed_in_the_middle_of_a_large_table_it_copies_no_other_table_again(plain: str) -> None:
    async with connected(plain) as sql:
        await sql.execute(ADD_MANY_RECORDS)
        await sql.execute("analyze indexer.record")
        before = await contents(plain, without=CHANGED)
        command = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "indexer", "distribute", "--shards", "4",
            env=environment_without_settings() | {"INDEXER_DATABASE_URL": plain},
            cwd=Path(__file__).parents[2],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        while not MANY // 20 < await sql.fetchval(COPIED_ROWS) < MANY // 2:  # no other table has so many in a shard
            assert command.returncode is None, "it has copied the records before they were seen"
        command.kill()
        await command.wait()
        await sql.execute(END_SESSIONS)
        complete = {row["name"].removeprefix("indexer.") for row in await sql.fetch(PLACES)}
    assert "repo" in complete
    assert "record" not in complete
    again = await distributed(plain)
    assert set(again.tables) == set(DISTRIBUTED) - complete
    assert await contents(plain, without=CHANGED) == before


async def test_of_two_calls_at_once_the_later_one_waits_for_the_other(plain: str) -> None:
    before = await contents(plain, without=CHANGED)
    results = await asyncio.gather(distributed(plain), distributed(plain), return_exceptions=True)
    [done] = [one for one in results if isinstance(one, Distribution) and not one.was_complete]
    [other] = [one for one in results if one is not done]
    waited_too_long = isinstance(other, SettingsError) and "that use it first: session" in str(other)
    assert waited_too_long or (isinstance(other, Distribution) and not other.tables)
    assert await contents(plain, without=CHANGED) == before


async def test_one_of_several_databases_by_bucket_is_refused(plain: str) -> None:
    async with connected(plain) as sql:
        await sql.execute(TWO_OF_FOUR_SHARDS)
        result = run_indexer("distribute", INDEXER_DATABASE_URL=plain)
        assert result.returncode == 2
        assert "its cursors are about 128 of 256 buckets, those of the shards 1/4, 2/4: it is one of" in error_line(
            result
        )
        assert await sql.fetch("select from indexer.distribution") == []
        await sql.execute("insert into indexer.cursor (relay, shard, epoch, seq) values ('wss://a.test', '0/4', 1, 1)")
        await sql.execute("insert into indexer.cursor (relay, shard, epoch, seq) values ('wss://b.test', '3/4', 1, 1)")
    await distributed(plain)


async def test_every_plain_table_forces_two_phases(plain: str) -> None:
    """Whichever write comes first."""
    await distributed(plain)
    async with connected(plain) as sql:
        local = [f"indexer.{name}" for name in await tables(sql) if name not in {*DISTRIBUTED, "distribution"}]
        assert len(local) > 15
        sent: list[str] = []
        sql.add_log_listener(lambda _, message: sent.append(str(message)))
        assert await sql.fetch(WITHOUT_TRIGGER) == []
        await sql.execute("set citus.log_remote_commands = on")
        for table in local:
            writes = [f"delete from {table} where false", WRITE_ONE_REPO]  # noqa: S608
            for order in (writes, writes[::-1]):
                sent.clear()
                async with sql.transaction():
                    for statement in order:
                        await sql.execute(statement)
                assert any("PREPARE TRANSACTION" in one for one in sent), (table, order, sent)
        sent.clear()
        await sql.execute(WRITE_ONE_REPO)
        assert sent
        assert not any("PREPARE TRANSACTION" in one for one in sent)


def test_the_operator_gets_one_line(citus: CitusServer, plain: str, database: str) -> None:
    worker = plain.replace(str(citus.cluster.ports["coordinator"]), str(citus.cluster.ports["worker1"]))
    lines = {
        "plain Postgres database": run_indexer("distribute", INDEXER_DATABASE_URL=database),
        "use the URL of the coordinator": run_indexer("distribute", INDEXER_DATABASE_URL=worker),
        "'--shards': 3 is not a power of two": run_indexer("distribute", "--shards", "3", INDEXER_DATABASE_URL=plain),
    }
    for text, result in lines.items():
        assert result.returncode == 2
        assert text in error_line(result)


async def test_a_session_of_a_daemon_is_named(plain: str) -> None:
    db = await Database.open(plain)
    try:
        with pytest.raises(SettingsError, match=r"stop the daemons and commands that use it first: session [0-9]+"):
            await distributed(plain)
    finally:
        await db.close()
    await distributed(plain)
    with pytest.raises(SettingsError, match="have 4 shards, and shards cannot be joined"):
        await distributed(plain, 2)
