"""Check that the schema and all statements work on Citus, distributed by bucket: they follow all of `citus_rules`.

`EXCEPTIONS` lists the statements that break a rule, each with its cost or with what Citus would need.
"""

import re
from collections.abc import Callable
from types import ModuleType

import asyncpg
import pytest
from sqlalchemy import Engine, event

from indexer.store.migrate import migrate
from tests.database_server import DatabaseServer
from tests.store import parsed_statements
from tests.store.citus_rules import (
    LOCAL,
    Schema,
    conflict_keys_have_the_bucket,
    conflict_updates_are_pure,
    family,
    functions_are_called_outside_of_queries,
    identity_order_is_in_one_bucket,
    joins_include_the_bucket,
    lateral_queries_do_not_combine_rows,
    locks_are_in_one_bucket,
    one_command,
    queries_name_buckets,
    read_schema,
    recursion_is_in_one_bucket,
    rows_have_a_bucket,
    samples_are_in_one_bucket,
    sizes_are_not_queried,
    tables_are_all_distributed_or_all_local,
    writes_are_pure,
)
from tests.store.parsed_statements import Statement, nodes


@pytest.fixture(scope="module")
def schema(postgres: DatabaseServer) -> Schema:
    dsn = postgres.create(migrated=True)

    async def read() -> Schema:
        sql = await asyncpg.connect(dsn)
        try:
            return await read_schema(sql)
        finally:
            await sql.close()

    try:
        return postgres.run(read())
    finally:
        postgres.drop(dsn)


UPSERT = "insert into indexer.repo (did, bucket) values ($1, $2) on conflict (did, bucket) do update set"
ONE = "select from indexer.repo r where r.bucket = w.bucket limit 1"
ARRAYS = "unnest($1::text[], $2::smallint[]) w(start, bucket)"


def each(query: str, of: str = ARRAYS) -> str:
    """Return a statement that runs the query for each row of `of`."""
    return f"select from {of}, lateral ({query}) one"


RULES: dict[Callable[[Statement, Schema], bool], tuple[str, ...]] = {
    one_command: (
        "select 1; select 2",
        "merge into indexer.repo r using (select 1) on r.bucket = 1 when matched then delete",
    ),
    rows_have_a_bucket: (
        "insert into indexer.repo (did) values ($1)",
        "copy indexer.record (did) from stdin",
        "update indexer.repo set bucket = 1 where bucket = $1",
        f"{UPSERT} bucket = 1",
    ),
    conflict_keys_have_the_bucket: (
        "insert into indexer.repo (did, bucket) values ($1, $2) on conflict (did) do nothing",
    ),
    conflict_updates_are_pure: (
        f"{UPSERT} updated_at = now()",
        f"{UPSERT} rev = (select '3')",
        f"{UPSERT} rev = $3 where repo.updated_at < current_timestamp",
    ),
    locks_are_in_one_bucket: (
        "select from indexer.repo where bucket = any($1) for update skip locked",
        "select from indexer.repo where bucket = $1 or active for update",
        "with one as (select from indexer.repo where did = $1 for share) select from one",
        "select from indexer.repo r join unnest($1) w(bucket) using (bucket) for update",
        "select from indexer.repo where bucket = (random() * 255)::smallint for update",
    ),
    queries_name_buckets: (
        "delete from indexer.record where did = $1",
        "select from indexer.repo where bucket >= $1",
        "select from indexer.repo where bucket = (select 1)",
        "select from atproto.repos where did = $1",
        "select from indexer.repo r tablesample system ($1)",
        "select from indexer.repo where bucket = $1 union select from indexer.repo",
        "delete from indexer.record r using unnest($1, $2) w(did, bucket) where r.did = w.did and r.bucket = w.bucket",
        "select from indexer.repo r join unnest($1) w(bucket) on r.bucket = w.bucket and w.bucket = any($1)",
        "select from indexer.resync_queue q join indexer.repo r using (bucket) where q.bucket = any($1)",
        "select from (select $1::smallint[] as bucket) w join indexer.repo r on r.bucket = any(w.bucket)",
        "select from unnest($1) w(b), lateral (with r as (select from indexer.repo where bucket = w.b) table r) one",
        "select from indexer.repo r left join indexer.identity i on i.bucket = r.bucket and r.bucket = $1",
        "select from indexer.repo r full join indexer.identity i on i.bucket = r.bucket and r.bucket = $1",
        "select from indexer.repo r left join (select 1 as bucket) one using (bucket)",
        (
            "select from indexer.resync_queue q, "
            "lateral (select from indexer.repo where bucket = q.bucket and bucket = $1) one"
        ),
        "select from unnest($1) w(did) join indexer.repo r using (did) join indexer.record c using (did, bucket)",
    ),
    joins_include_the_bucket: (
        "select from indexer.repo r join indexer.record c using (did) where r.bucket = any($1) and c.bucket = any($1)",
        "select from indexer.repo r join indexer.record c using (did) where r.bucket = $1 and c.bucket = $2",
        "select from indexer.repo r where r.bucket = $1 and r.did in (select did from indexer.record)",
        "select from (select priority, bucket from indexer.resync_queue) q(bucket, n) join indexer.repo using (bucket)",
        "update indexer.repo r set rev = i.handle from indexer.identity i where i.did = r.did and i.bucket = any($1)",
        (
            "select from indexer.resync_queue q, "
            "lateral (select from indexer.repo r where r.priority = q.priority limit 1) one"
        ),
    ),
    writes_are_pure: (
        "update indexer.repo set updated_at = clock_timestamp() where bucket = $1",
        "update indexer.repo set sync_reason = to_char(updated_at, 'MM') where bucket = $1",
        "update indexer.repo set updated_at = case when active then now() end where bucket = $1",
        "delete from indexer.repo where bucket = $1 returning date_part('epoch', updated_at)",
    ),
    identity_order_is_in_one_bucket: (
        "select from indexer.buffered_event where bucket = any($1) order by id",
        "select row_number() over (order by k.id) from indexer.buffered_event k",
    ),
    tables_are_all_distributed_or_all_local: (
        "select from indexer.repo r join indexer.change c using (did, bucket) where r.bucket = $1",
        "truncate indexer.record, indexer.change_batch_1",
    ),
    functions_are_called_outside_of_queries: (
        "select atproto.request_resync(did) from indexer.repo where bucket = $1",
        "select nextval('indexer.change_seq') from indexer.repo where bucket = $1",
    ),
    sizes_are_not_queried: (
        "select pg_table_size('indexer.repo')",
        "explain select from indexer.repo where bucket = $1",
    ),
    lateral_queries_do_not_combine_rows: (
        each(ONE),
        each("select from indexer.repo where did > start and bucket = any($2) limit 1"),
        each("select from indexer.repo r where r.bucket = w.bucket offset 1"),
        each("select count(*) from indexer.repo r where r.bucket = w.bucket"),
        each("select distinct rev from indexer.repo r where r.bucket = w.bucket"),
        each("select rev from indexer.repo r where r.bucket = w.bucket group by rev"),
        each("select row_number() over () from indexer.repo r where r.bucket = w.bucket"),
        each("select from (select from indexer.repo r where r.bucket = w.bucket) x limit 1"),
        each("select from indexer.repo r where r.bucket = w.bucket union all select from indexer.identity limit 1"),
        each("select from indexer.repo r join indexer.resync_queue q using (bucket) where q.bucket = w.bucket limit 1"),
        each(
            "select from indexer.resync_queue q where q.bucket = w.bucket limit 1",
            of=f"{ARRAYS}, lateral ({ONE}) other",
        ),
        each(
            "select from indexer.repo r where r.did > w.start limit 1",
            of=f"{ARRAYS} join indexer.resync_queue using (bucket)",
        ),
        each(
            "select from indexer.repo where rev = n and bucket = any($2) limit 1", of="json_to_recordset($1) w(n text)"
        ),
        each(ONE, of="(select 1 as bucket) w"),
        each(ONE, of="(select bucket from indexer.resync_queue limit 1) w"),
        "select (select rev from indexer.repo r where r.bucket = w.bucket) from unnest($1) w(bucket)",
    ),
    recursion_is_in_one_bucket: (
        "with recursive c as (select from indexer.repo where bucket = any($1) union select from c) select from c",
    ),
    samples_are_in_one_bucket: (
        "select from indexer.repo tablesample system (1) where bucket = any($1)",
        "select from indexer.repo r tablesample bernoulli ($1)",
    ),
}
VALID = (
    each(
        "select from indexer.repo r where r.bucket = w.bucket and r.bucket = any($1) limit 1",
        of="(select bucket from indexer.resync_queue where bucket = any($1)) w",
    ),
    each("select did from indexer.repo where bucket = any($2) order by did limit 1"),
    each("select n from (select did from indexer.repo where bucket = any($2)) r(n) order by n limit 1"),
    each("select from indexer.repo where bucket = any($2) and did = w.start"),
    "select (select count(*) from indexer.record where bucket = r.bucket) from indexer.repo r where bucket = $1",
    "select from indexer.repo r left join indexer.identity i using (did, bucket) where r.bucket = $1",
    "select did from indexer.repo r where bucket = $1 and did > $2 order by did limit 1 for update skip locked",
    "update indexer.repo r set updated_at = now() where bucket = any($1::smallint[]) and attempts < $2 returning did",
    "with a as (delete from indexer.repo where bucket = $1 returning *) select date_part('day', erase_at) from a",
)

SHARDS = "works, but queries every shard"
NOT_DISTRIBUTED = "only sent if the tables are not distributed"
ONE_SHARD = "the buckets are those of one shard, which the planner of Citus finds out"
EXCEPTIONS = {
    one_command: {
        "migrate._upgrade": "creates a schema and a table that stays on the coordinator",
        "dump._create_roles": "roles belong to the server, and nothing is distributed in a new database",
        "migration_locks._LOCK_VIEWS": "locks the views, which Citus does on the coordinator",
        "distribute._reserve_commands": "grants rights on functions of the coordinator, in several commands",
        "dump.restore": "ANALYZE of a new database, in which nothing is distributed",
        "lexicon_indexes.build_index": "DDL, which Citus runs on all shards",
        "lexicon_indexes._comment": "DDL, which Citus runs on all shards",
        "lexicon_indexes.drop_outdated_indexes": "DDL, which Citus runs on all shards",
        "lexicon_indexes._ANALYZE": "Citus runs it on all shards",
        "distribute._recover_soon": "a setting of the coordinator",
        "distribute._set_settings": "settings of the database, which Citus passes on to all nodes",
        "distribute._sizes": "ANALYZE of a table that is not distributed yet",
        "distributed_tables.delete_local_rows": "ANALYZE, which Citus runs on all shards",
        "distributed_tables.use_two_phases": "triggers of tables that stay on the coordinator",
        "numbering._DROP_PUBLISH": "a trigger of a table that stays on the coordinator",
        "numbering._QUEUE_BATCHES": "a trigger of a table that stays on the coordinator",
    },
    functions_are_called_outside_of_queries: {
        "numbering._PREPARED": "the function is to run on the nodes: `indexer distribute` creates it there",
    },
    queries_name_buckets: {
        "apply_small_batch.WRITE": NOT_DISTRIBUTED,
        "collection_export._ESTIMATE": "see sizes_are_not_queried",
        "collection_export._EXPORT": SHARDS,
        "feed_rows._COUNT_BUFFERED": SHARDS,
        "schema_version.has_repos": SHARDS,
        "feed_rows._COUNT_RECORDS": SHARDS,
        "feed_rows._COUNT_REPOS": SHARDS,
        "feed_rows._SNAPSHOT_PAGE": f"{SHARDS} for each page, until the first client of the feed has every record",
        "function atproto.did_of": SHARDS,
        "function atproto.link_count": f"{SHARDS} for the few repos whose visibility has just changed",
        "identities._DID_OF_HANDLE": SHARDS,
        "identities._OTHERS_WITH_HANDLE": SHARDS,
        "link_progress._OPEN_DELTAS": SHARDS,
        "link_progress._OPEN_RECOUNTS": SHARDS,
        "repo_requests._PAGE": SHARDS,
        "report_queries._COUNT_REPOS": SHARDS,
        "report_queries._FEW_IN_PROGRESS": SHARDS,
        "report_queries._FEW_PARKED": SHARDS,
        "report_queries._FEW_UNPROVEN": SHARDS,
        "report_queries._FEW_WAITING": SHARDS,
        "report_queries.visible_repos": SHARDS,
        "store._READ_ALL_NODES": "it finds out whether all nodes answer",
        "scope_changes.NEXT_COLLECTION": f"{SHARDS}; once for each collection, every ten minutes",
        "scope_row._PROGRESS": SHARDS,
        "out_of_scope._COUNT_NOT_CHOSEN": SHARDS,
        "resync_queue.LONG_WAITS": f"{SHARDS}, every ten minutes; otherwise like DUE",
        "resync_queue.DUE": f"{SHARDS}; with the array in the lateral query, too, the planner sorts all due repos",
    },
    sizes_are_not_queried: {
        "collection_export._ESTIMATE": "the plan of Citus contains that of a shard",
    },
    joins_include_the_bucket: {
        "feed_rows._SNAPSHOT_PAGE": "no join: Citus plans both parts of the union alone, and merges their first rows",
    },
    tables_are_all_distributed_or_all_local: {
        "apply_small_batch.WRITE": NOT_DISTRIBUTED,
        "view atproto.scope_progress": "Citus runs the grouped sub-query first, and joins its few rows with the scope",
    },
    locks_are_in_one_bucket: {
        "resync_queue.CLAIM": ONE_SHARD,
    },
    samples_are_in_one_bucket: {
        "report_queries._count_pages": ONE_SHARD,
        "report_queries.sample_synchronized": ONE_SHARD,
    },
}


def broken(statement: Statement, schema: Schema) -> set[str]:
    return {rule.__name__ for rule in RULES if not rule(statement, schema)}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_rule_rejects_its_examples(schema: Schema, rule: Callable[[Statement, Schema], bool]) -> None:
    for example in RULES[rule]:
        assert rule.__name__ in broken(Statement("example", example), schema), example


def test_valid_statements_follow_all_rules(schema: Schema) -> None:
    for example in VALID:
        assert broken(Statement("example", example), schema) == set(), example


async def test_every_statement_follows_all_rules(schema: Schema, sql: asyncpg.Connection) -> None:
    every = [*parsed_statements.sent_statements(), *await parsed_statements.database_statements(sql)]
    assert {"apply_batch.UPDATE_REPOS", "view atproto.records", "function atproto.request_resync"} <= {
        s.name for s in every
    }
    found = {(rule, statement.name) for statement in every for rule in broken(statement, schema)}
    assert found == {(rule.__name__, name) for rule, names in EXCEPTIONS.items() for name in names}


# Unique keys without the bucket, foreign keys without the bucket, triggers, and rules.
UNSUPPORTED = """
    select indexrelid::regclass::text from pg_index i
    where (indisunique or indisexclusion) and indrelid::regclass::text = any($1) and not exists (
        select from pg_attribute where attrelid = indrelid and attname = 'bucket' and attnum = any(indkey::smallint[])
    )
    union all
    select conname from pg_constraint c
    where contype = 'f' and $1 && array[conrelid::regclass::text, confrelid::regclass::text] and not exists (
        select from pg_attribute a join pg_attribute b using (attname)
        where attname = 'bucket' and a.attrelid = conrelid and b.attrelid = confrelid
            and array_position(conkey, a.attnum) = array_position(confkey, b.attnum)
    )
    union all select tgname from pg_trigger where not tgisinternal and tgrelid::regclass::text = any($1)
    union all select rulename from pg_rewrite where ev_class::regclass::text = any($1)
"""
BAD = """
    create table indexer.bad (bucket smallint not null, id bigint primary key, other text references indexer.host,
        unique (bucket, id), foreign key (bucket) references indexer.bad (id));
    create trigger bad_trigger after insert on indexer.bad execute function suppress_redundant_updates_trigger()
"""


async def test_keys_include_the_bucket(schema: Schema, sql: asyncpg.Connection) -> None:
    """Measured: keys without the distribution column fail. Documented: so do other foreign keys, and triggers."""
    assert await sql.fetch(UNSUPPORTED, schema.distributed) == []
    await sql.execute(BAD)
    unsupported = {name for (name,) in await sql.fetch(UNSUPPORTED, [*schema.distributed, "indexer.bad"])}
    assert unsupported == {"indexer.bad_pkey", "bad_other_fkey", "bad_bucket_fkey", "bad_trigger"}


async def test_tables_have_a_bucket_or_stay_on_the_coordinator(schema: Schema, sql: asyncpg.Connection) -> None:
    tables = await sql.fetch("select schemaname || '.' || tablename from pg_tables where schemaname = 'indexer'")
    assert {family(name) for (name,) in tables if name not in schema.distributed} == LOCAL.keys()


@pytest.mark.slow
async def test_migrations_create_views_after_they_changed_tables(empty_database: str, schema: Schema) -> None:
    """Measured: Citus cannot create a view after a statement on all shards in the same transaction.

    This is an exception. It matters only if tables are distributed already. Then `migrate` changes one shard after the
    other (`distributed_tables.use_sequential_changes`, tests/store/test_migrate_on_a_cluster.py).
    """
    executed: list[Statement] = []

    def record(_connection: object, _cursor: object, text: str, *_: object) -> None:
        executed.append(Statement("migrate", text))

    event.listen(Engine, "before_cursor_execute", record)
    try:
        await migrate(empty_database)
    finally:
        event.remove(Engine, "before_cursor_execute", record)
    changes = [
        index for index, one in enumerate(executed) if one.tables & schema.distributed and "create table" not in one.sql
    ]
    views = [index for index, one in enumerate(executed) if any(nodes(one.trees, "ViewStmt"))]
    assert min(changes) < max(views)
    assert not any("citus.multi_shard_modify_mode" in one.sql for one in executed)


def test_only_the_store_imports_a_database_driver() -> None:
    driver = re.compile(r"^\s*(?:from|import) (?:asyncpg|sqlalchemy|alembic|psycopg)\b", re.MULTILINE)
    found = {name for name, source in parsed_statements.sources().items() if driver.search(source)}
    assert len(found) > 5
    assert all(name.startswith("indexer.store.") for name in found)


@pytest.mark.parametrize(
    "line",
    [
        "await connection.fetch(words)",
        "await connection.fetch(f'select {words}')",
        "await connection.execute(query=words)",
        "for SQL in words: await connection.execute(SQL)",
        "await run(connection.fetch, SQL)",
        "await connection.copy_records_to_table('record', schema_name=words, columns=())",
    ],
)
def test_a_statement_that_cannot_be_evaluated_is_an_error(line: str) -> None:
    module = ModuleType("indexer.store.example")
    module.SQL = "select 1"  # type: ignore[attr-defined]
    good = "async def some(connection):\n    end = SQL + ', 2'\n    await connection.fetch(end)"
    assert [one.sql for one in parsed_statements.statements_of(module, good)] == ["select 1, 2"]
    with pytest.raises(LookupError):
        list(parsed_statements.statements_of(module, f"async def some(connection, words):\n    {line}"))
