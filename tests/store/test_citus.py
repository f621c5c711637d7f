"""Check that the schema and all statements work on Citus, distributed by bucket.

Citus cannot be installed here, so rules replace it. Each rule names its source. Measured: a statement that breaks the
rule failed or was slow on Citus 13.2 with two workers, and one that follows it worked. Documented: the documentation
says that it is not supported. Planner: the source of the planner rejects it. `EXCEPTIONS` lists the statements that
break a rule, each with its cost or with what Citus would need.
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType

import asyncpg
import pytest
from sqlalchemy import Engine, event

from indexer.store.migrate import migrate
from tests.conftest import DatabaseServer
from tests.store import parsed_statements
from tests.store.parsed_statements import (
    LEVELS,
    Level,
    Node,
    Statement,
    Term,
    Tree,
    calls,
    columns_of,
    nodes,
    query_of,
    table_of,
)

LOCAL = {
    "alembic_version": "a single row, used by Alembic",
    "change": "numbered by its batch, read with it, and truncated with it",
    "change_batch": "numbered by COMMIT, under one lock: docs/decisions/0005-number-changes-at-commit.md",
    "change_log": "one row, which is locked by a change of the current segment",
    "consumer": "a row for each consumer of the whole change log",
    "crawl_progress": "a row for each repo list",
    "cursor": "a row for each relay and shard, without a DID",
    "dead_letter": "limited by relay and reason, not by DID",
    "host": "a row for each host, without a DID",
    "numbering_lock": "no rows, only a lock",
    "stored_setting": "a row for each setting",
}
"""Tables that stay on the coordinator, with the reason."""


@dataclass(frozen=True)
class Schema:
    """The facts about the schema that the rules use.

    Attributes:
        distributed: Distributed tables.
        views: Views of distributed tables.
        columns: All columns as (table, column).
        numbered: Identity columns.
        volatility: i, s or v for each function, by name and number of arguments; -1 for any number.
        aggregates: Functions that return one value for many rows.
        own_functions: Functions of the schema that read or write tables.
    """

    distributed: set[str]
    views: set[str]
    columns: set[tuple[str, str]]
    numbered: set[tuple[str, str]]
    volatility: dict[tuple[str, int], str]
    aggregates: set[str]
    own_functions: set[str]

    @property
    def spread(self) -> set[str]:
        """Distributed tables and their views."""
        return self.distributed | self.views


COLUMNS = """
    select attrelid::regclass::text as name, attname, attidentity <> '' as numbered
    from pg_attribute join pg_class c on c.oid = attrelid
    where relnamespace = 'indexer'::regnamespace and relkind in ('r', 'p') and attnum > 0
"""
OWN_FUNCTIONS = """
    select oid::regproc::text from pg_proc
    where provolatile <> 'i' and pronamespace in ('indexer'::regnamespace, 'atproto'::regnamespace)
"""
VOLATILITY = """
    select proname, count, translate(max(translate(provolatile::text, 'isv', '123')), '123', 'isv')
    from pg_proc, unnest(array[pronargs, -1]) count group by 1, 2
"""
AGGREGATES = "select proname from pg_proc where prokind in ('a', 'w')"


def family(table: str) -> str:
    """Return the name of the table without schema and without the number of the partition."""
    return re.sub(r"^indexer\.|_\d+$", "", table)


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


async def read_schema(sql: asyncpg.Connection) -> Schema:
    columns = await sql.fetch(COLUMNS)
    distributed = {row["name"] for row in columns if row["attname"] == "bucket" and family(row["name"]) not in LOCAL}
    return Schema(
        distributed,
        {
            body.name.removeprefix("view ")
            for body in await parsed_statements.database_statements(sql)
            if body.tables & distributed
        },
        {(row["name"], row["attname"]) for row in columns},
        {(row["name"], row["attname"]) for row in columns if row["numbered"]},
        {(name, count): how for name, count, how in await sql.fetch(VOLATILITY)},
        {name for (name,) in await sql.fetch(AGGREGATES)},
        {name for (name,) in await sql.fetch(OWN_FUNCTIONS)},
    )


def spread_items(statement: Statement, schema: Schema) -> Iterator[tuple[Level, frozenset[Term]]]:
    """Yield each distributed item with its level and the terms that its bucket is equal to."""
    for (level, alias), group in statement.buckets.items():
        if table_of(level.items[alias]) in schema.spread:
            yield level, group


def is_one(group: frozenset[Term]) -> bool:
    return any(kind == "one" for kind, _ in group)


def is_named(group: frozenset[Term]) -> bool:
    return any(kind in ("one", "some") for kind, _ in group)


def merges(level: Level, schema: Schema) -> bool:
    """Return True if the level combines rows, or selects some of them by their order."""
    clauses = {"limitCount", "limitOffset", "distinctClause", "groupClause", "havingClause"}
    return bool(clauses & level.node.keys() or calls(level.node, LEVELS) & schema.aggregates)


def is_spread(item: Node, statement: Statement, schema: Schema) -> bool:
    """Return True if the item is a distributed table, or a sub-query that returns rows of one unchanged."""
    query = query_of(item, statement.levels)
    if query is None:
        return table_of(item) in schema.spread
    return not merges(query, schema) and any(is_spread(inner, statement, schema) for inner in query.items.values())


def is_of(words: list[str], alias: str, item: Node, schema: Schema) -> bool:
    """Return True if the column name refers to a column of the item, or to the item itself."""
    known = words[0] in columns_of(item) or (table_of(item), words[0]) in schema.columns
    return words[0] == alias or (len(words) == 1 and known)


def named_outside(query: Level, statement: Statement, schema: Schema) -> Iterator[Node]:
    """Yield the items outside a query that it refers to. An unknown name may refer to any of them."""
    others = [item for scope in query.scopes[1:] for item in scope.items.values()]
    for level in statement.levels:
        visible = [(scope, alias, item) for scope in level.scopes for alias, item in scope.items.items()]
        for words in level.columns if query in level.enclosing else ():
            owners = [(scope, item) for scope, alias, item in visible if is_of(words, alias, item, schema)]
            if not owners:
                yield from others
            elif query not in owners[0][0].enclosing:
                yield owners[0][1]


def mutable(tree: Tree, schema: Schema) -> Iterator[tuple[str, Node]]:
    """Yield calls of stable and volatile functions with their volatility."""
    for call in nodes(tree, "FuncCall"):
        name = call["funcname"][-1]["String"]["sval"]
        known = schema.volatility.get((name, len(call.get("args", ()))), schema.volatility.get((name, -1), "v"))
        if known != "i":
            yield known, call
    yield from (("s", value) for value in nodes(tree, "SQLValueFunction"))


def written(statement: Statement, schema: Schema) -> list[Level]:
    return [level for level in statement.levels if level.target in schema.distributed]


def conflicts(statement: Statement, schema: Schema) -> list[Node]:
    return [level.node.get("onConflictClause", {}) for level in written(statement, schema)]


def called(statement: Statement) -> set[str]:
    calls = nodes(statement.trees, "FuncCall")
    return {".".join(word["String"]["sval"] for word in call["funcname"]) for call in calls}


def one_command(statement: Statement, _: Schema) -> bool:
    """Measured: several commands in one statement fail. The command must be one that the rules know, or a SET."""
    kinds = [kind for tree in statement.trees for kind in tree]
    known = {*LEVELS, "CopyStmt", "LockStmt", "TruncateStmt", "ExplainStmt", "CreateSchemaStmt", "CreatedbStmt"}
    return set(kinds) == {"VariableSetStmt"} or (len(kinds) == 1 and kinds[0] in known)


def rows_have_a_bucket(statement: Statement, schema: Schema) -> bool:
    """Planner: an INSERT sets the bucket, and no UPDATE changes it."""
    inserted = [level.node.get("cols", []) for level in written(statement, schema) if level.kind == "InsertStmt"]
    copied = [copy["attlist"] for copy in nodes(statement.trees, "CopyStmt")]
    changed = [level.node for level in written(statement, schema) if level.kind == "UpdateStmt"]
    changed += nodes(statement.trees, "onConflictClause")
    sets = [value for change in changed for value in change.get("targetList", ())]
    return all('"bucket"' in json.dumps(row) for row in (*inserted, *copied)) and not any(
        value["ResTarget"]["name"] == "bucket" for value in sets
    )


def conflict_keys_have_the_bucket(statement: Statement, schema: Schema) -> bool:
    """Measured: a unique key includes the bucket."""
    keys = [clause.get("infer", {}).get("indexElems") for clause in conflicts(statement, schema)]
    return all("bucket" in {part["IndexElem"].get("name") for part in key} for key in keys if key)


def conflict_updates_are_pure(statement: Statement, schema: Schema) -> bool:
    """Measured: DO UPDATE SET x = now() fails. Documented: so does a query within an INSERT."""
    clauses = conflicts(statement, schema)
    return not any([*mutable(clauses, schema), *nodes(clauses, "SubLink")])


def locks_are_in_one_bucket(statement: Statement, schema: Schema) -> bool:
    """Measured: FOR UPDATE works for one bucket, also with SKIP LOCKED, and fails for more than one shard."""
    return all(is_one(group) for level, group in spread_items(statement, schema) if level.node.get("lockingClause"))


def queries_name_buckets(statement: Statement, schema: Schema) -> bool:
    """Measured: a query without a condition on the bucket goes to every shard, which costs 12 ms each.

    Planner: the condition compares with constants or parameters. An array is needed in a condition on each table.
    Queries that use a view have the condition, not the view.
    """
    return statement.name.startswith("view ") or all(is_named(group) for _, group in spread_items(statement, schema))


def joins_include_the_bucket(statement: Statement, schema: Schema) -> bool:
    """Documented: tables are joined, and sub-queries are correlated, by the distribution column."""
    groups: dict[Level, list[frozenset[Term]]] = {}
    for level, group in spread_items(statement, schema):
        groups.setdefault(level.scopes[-1], []).append(group)
    return all(frozenset.intersection(*joined) for joined in groups.values())


def writes_are_pure(statement: Statement, schema: Schema) -> bool:
    """Planner: UPDATE and DELETE call no volatile functions, and stable ones only with certain arguments.

    A stable function may not depend on a column, nor be inside CASE or COALESCE. RETURNING calls only immutable
    functions and has no sub-queries.
    """
    for level in written(statement, schema):
        given = level.node.get("returningList")
        changed = [] if level.kind == "InsertStmt" else [level.node]
        lazy = [node for kind in ("CaseExpr", "CoalesceExpr") for node in nodes(changed, kind)]
        calls = [how == "v" or any(nodes(call, "ColumnRef")) for how, call in mutable(changed, schema)]
        if any(calls) or any([*mutable(given, schema), *nodes(given, "SubLink"), *mutable(lazy, schema)]):
            return False
    return True


def identity_order_is_in_one_bucket(statement: Statement, schema: Schema) -> bool:
    """Measured: each node numbers rows itself, so an identity column orders rows only within a bucket."""
    for level, group in spread_items(statement, schema):
        fields = [ref["fields"] for by in nodes(level.node, "SortBy", LEVELS) for ref in nodes(by, "ColumnRef")]
        names = {field[-1].get("String", {}).get("sval") for field in fields}
        tables = {table_of(item) for item in level.items.values()}
        if schema.numbered & {(table, name) for table in tables for name in names} and not is_one(group):
            return False
    return True


def tables_are_all_distributed_or_all_local(statement: Statement, schema: Schema) -> bool:
    """Documented: a join with a local table sends its rows to all workers, or is not supported."""
    return not statement.tables & schema.spread or statement.tables <= schema.spread


def functions_are_called_outside_of_queries(statement: Statement, schema: Schema) -> bool:
    """Planner: a query on a shard cannot run another distributed query.

    Measured: advisory locks, sequences and NOTIFY work on the coordinator only.
    """
    own = re.compile(r"pg_(try_)?advisory|nextval|setval|currval|pg_notify")
    inside = {name for name in called(statement) if name in schema.own_functions or own.match(name)}
    return not (inside and statement.tables & schema.spread)


def sizes_are_not_queried(statement: Statement, schema: Schema) -> bool:
    """Documented: on the coordinator a distributed table is empty, for the catalog and for the planner."""
    queried = any(re.match(r"pg_(\w+_size|stat_get_\w+)$", name) for name in called(statement))
    queried = queried or any(nodes(statement.trees, "ExplainStmt"))
    return not (queried and any(table in statement.sql for table in schema.distributed))


def lateral_queries_do_not_combine_rows(statement: Statement, schema: Schema) -> bool:
    """Planner: a sub-query for each row of an array is in FROM and does not combine rows, for example by LIMIT.

    The same holds for each row of anything else but a distributed table.
    """
    for level, group in spread_items(statement, schema):
        for query in () if is_one(group) else level.enclosing:
            joined = query.outer and any(query_of(item, [query]) for item in query.outer.items.values())
            named = named_outside(query, statement, schema)
            if (merges(query, schema) or not joined) and not all(is_spread(item, statement, schema) for item in named):
                return False
    return True


def recursion_is_in_one_bucket(statement: Statement, schema: Schema) -> bool:
    """Documented: WITH RECURSIVE works within one shard."""
    recursive = any(clause.get("recursive") for clause in nodes(statement.trees, "withClause"))
    return not recursive or all(is_one(group) for _, group in spread_items(statement, schema))


def samples_are_in_one_bucket(statement: Statement, schema: Schema) -> bool:
    """Planner: TABLESAMPLE works within one shard."""
    sampled = any(nodes(statement.trees, "RangeTableSample"))
    return not sampled or all(is_one(group) for _, group in spread_items(statement, schema))


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
VIEW = "works, but queries every shard; a column bucket at the end of the view would avoid that"
EXCEPTIONS = {
    queries_name_buckets: {
        "collection_export._ESTIMATE": "see sizes_are_not_queried",
        "collection_export._EXPORT": SHARDS,
        "identities._DID_OF_HANDLE": SHARDS,
        "identities._RECHECK_OTHERS": SHARDS,
        "repo_requests._PAGE": SHARDS,
        "report_queries.SAMPLE": "see samples_are_in_one_bucket",
        "report_queries._COUNT_REPOS": SHARDS,
        "report_queries._RECORD": VIEW,
        "report_queries.visible_records": VIEW,
        "report_queries.visible_repos": SHARDS,
        "resync_queue.DUE": f"{SHARDS}; with the array in the lateral query, too, the planner sorts all due repos",
    },
    sizes_are_not_queried: {
        "collection_export._ESTIMATE": "citus_shards has the sizes; this returns a guess of the planner",
        "report_queries._COUNT_RECORDS": "citus_shards has the sizes; this returns 0",
        "report_queries._TABLE_PAGES": "citus_relation_size has them; this returns 0",
    },
    samples_are_in_one_bucket: {
        "report_queries.SAMPLE": "only audits use it; it could choose buckets first, and sample within each",
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


async def test_migrations_create_views_after_they_changed_tables(empty_database: str, schema: Schema) -> None:
    """Measured: Citus cannot create a view after a statement on all shards in the same transaction.

    This is an exception. It matters only if tables are distributed already. Then `migrate` would need `set local
    citus.multi_shard_modify_mode to 'sequential'`, which Postgres accepts as well.
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
