"""The schema and the statements are fit for Citus, distributed by bucket. It can't be installed: rules stand for it.

Each says where it is from. Measured: it failed or was slow on Citus 13.2 with two workers, and what keeps to the rule
worked. Documented: unsupported, as its documentation says. Planner: refused by name in the source of its planner.
`EXCEPTIONS` are what breaks them, each with what Citus would need.
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
from tests.store import statements
from tests.store.statements import (
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
    "alembic_version": "the migrations' own, a single row",
    "batch": "its numbers are given by the commit, under one lock: docs/decisions/0005-change-feed.md",
    "change": "numbered by its batch, read with it, and emptied with it: docs/decisions/0005-change-feed.md",
    "choice": "settings, a row each",
    "cursor": "a row for each relay and process, which belongs to no DID",
    "dead_letter": "kept by relay and reason and not by DID, a thousand of each",
    "feed": "one row, locked by whoever changes the log",
    "host": "a row for each host, of any DIDs",
    "listing": "a row for each list of accounts that is read",
    "reader": "a row for each reader of the whole feed",
    "turn": "nothing but a lock",
}


@dataclass(frozen=True)
class Schema:
    """Distributed tables, the views that show them, all columns by table, and those that sequences number; how volatile
    each function is (i, s or v) by name and number of arguments, which make one value of many rows, and which of ours
    read or write.
    """

    distributed: set[str]
    views: set[str]
    columns: set[tuple[str, str]]
    numbered: set[tuple[str, str]]
    volatility: dict[tuple[str, int], str]
    aggregates: set[str]
    ours: set[str]

    @property
    def spread(self) -> set[str]:
        return self.distributed | self.views


COLUMNS = """
    select attrelid::regclass::text as name, attname, attidentity <> '' as numbered
    from pg_attribute join pg_class c on c.oid = attrelid
    where relnamespace = 'indexer'::regnamespace and relkind in ('r', 'p') and attnum > 0
"""
OURS = """
    select oid::regproc::text from pg_proc
    where provolatile <> 'i' and pronamespace in ('indexer'::regnamespace, 'atproto'::regnamespace)
"""
VOLATILITY = """
    select proname, count, translate(max(translate(provolatile::text, 'isv', '123')), '123', 'isv')
    from pg_proc, unnest(array[pronargs, -1]) count group by 1, 2
"""
AGGREGATES = "select proname from pg_proc where prokind in ('a', 'w')"


def family(table: str) -> str:
    """Its name without the schema, and the same one for all partitions."""
    return re.sub(r"^indexer\.|_\d+$", "", table)


@pytest.fixture
async def schema(sql: asyncpg.Connection) -> Schema:
    columns = await sql.fetch(COLUMNS)
    distributed = {row["name"] for row in columns if row["attname"] == "bucket" and family(row["name"]) not in LOCAL}
    return Schema(
        distributed,
        {body.name.removeprefix("view ") for body in await statements.within(sql) if body.tables & distributed},
        {(row["name"], row["attname"]) for row in columns},
        {(row["name"], row["attname"]) for row in columns if row["numbered"]},
        {(name, count): how for name, count, how in await sql.fetch(VOLATILITY)},
        {name for (name,) in await sql.fetch(AGGREGATES)},
        {name for (name,) in await sql.fetch(OURS)},
    )


def spread_items(statement: Statement, schema: Schema) -> Iterator[tuple[Level, frozenset[Term]]]:
    """Each distributed table that is read, by the level that reads it, and all that its bucket is equal to there."""
    for (level, alias), group in statement.buckets.items():
        if table_of(level.items[alias]) in schema.spread:
            yield level, group


def is_one(group: frozenset[Term]) -> bool:
    return any(kind == "one" for kind, _ in group)


def is_named(group: frozenset[Term]) -> bool:
    return any(kind in ("one", "some") for kind, _ in group)


def merges(level: Level, schema: Schema) -> bool:
    """Whether it makes one row of several, or chooses among them."""
    clauses = {"limitCount", "limitOffset", "distinctClause", "groupClause", "havingClause"}
    return bool(clauses & level.node.keys() or calls(level.node, LEVELS) & schema.aggregates)


def is_spread(item: Node, statement: Statement, schema: Schema) -> bool:
    """Whether it is a distributed table, or as good as one."""
    query = query_of(item, statement.levels)
    if query is None:
        return table_of(item) in schema.spread
    return not merges(query, schema) and any(is_spread(inner, statement, schema) for inner in query.items.values())


def is_of(words: list[str], alias: str, item: Node, schema: Schema) -> bool:
    """Whether a column of these words is one of the item's, or all of it."""
    known = words[0] in columns_of(item) or (table_of(item), words[0]) in schema.columns
    return words[0] == alias or (len(words) == 1 and known)


def named_outside(query: Level, statement: Statement, schema: Schema) -> Iterator[Node]:
    """Items around a query that it names, anywhere within. A name that nobody is known to have may be anyone's."""
    others = [item for around in query.around[1:] for item in around.items.values()]
    for level in statement.levels:
        visible = [(around, alias, item) for around in level.around for alias, item in around.items.items()]
        for words in level.columns if query in level.whole else ():
            owners = [(around, item) for around, alias, item in visible if is_of(words, alias, item, schema)]
            if not owners:
                yield from others
            elif query not in owners[0][0].whole:
                yield owners[0][1]


def mutable(tree: Tree, schema: Schema) -> Iterator[tuple[str, Node]]:
    """Calls of functions that are stable or volatile."""
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
    """Measured: several commands at once fail. And it is one that the rules know; settings are the session's."""
    kinds = [kind for tree in statement.trees for kind in tree]
    known = {*LEVELS, "CopyStmt", "LockStmt", "TruncateStmt", "ExplainStmt", "CreateSchemaStmt", "CreatedbStmt"}
    return set(kinds) == {"VariableSetStmt"} or (len(kinds) == 1 and kinds[0] in known)


def rows_say_their_bucket(statement: Statement, schema: Schema) -> bool:
    """Planner: a row comes with its bucket and keeps it."""
    inserted = [level.node.get("cols", []) for level in written(statement, schema) if level.kind == "InsertStmt"]
    copied = [copy["attlist"] for copy in nodes(statement.trees, "CopyStmt")]
    changed = [level.node for level in written(statement, schema) if level.kind == "UpdateStmt"]
    changed += nodes(statement.trees, "onConflictClause")
    sets = [value for change in changed for value in change.get("targetList", ())]
    return all('"bucket"' in json.dumps(row) for row in (*inserted, *copied)) and not any(
        value["ResTarget"]["name"] == "bucket" for value in sets
    )


def conflicts_are_of_a_bucket(statement: Statement, schema: Schema) -> bool:
    """Measured: what is unique includes the bucket."""
    keys = [clause.get("infer", {}).get("indexElems") for clause in conflicts(statement, schema)]
    return all("bucket" in {part["IndexElem"].get("name") for part in key} for key in keys if key)


def conflicts_set_what_comes(statement: Statement, schema: Schema) -> bool:
    """Measured: DO UPDATE SET x = now() fails. Documented: so does a query within an INSERT."""
    clauses = conflicts(statement, schema)
    return not any([*mutable(clauses, schema), *nodes(clauses, "SubLink")])


def locks_are_of_one_bucket(statement: Statement, schema: Schema) -> bool:
    """Measured: FOR UPDATE, with SKIP LOCKED too, works for a bucket = $1, and fails over more than one shard."""
    return all(is_one(group) for level, group in spread_items(statement, schema) if level.node.get("lockingClause"))


def buckets_are_named(statement: Statement, schema: Schema) -> bool:
    """Measured: what names no bucket goes to every shard, at 12 ms each. Planner: constants and parameters name it, an
    array of them in every table for itself. A view leaves it to its readers.
    """
    return statement.name.startswith("view ") or all(is_named(group) for _, group in spread_items(statement, schema))


def joins_are_of_a_bucket(statement: Statement, schema: Schema) -> bool:
    """Documented: tables are joined, and sub-queries correlated, by the column that distributes them."""
    groups: dict[Level, list[frozenset[Term]]] = {}
    for level, group in spread_items(statement, schema):
        groups.setdefault(level.around[-1], []).append(group)
    return all(frozenset.intersection(*joined) for joined in groups.values())


def writes_are_pure(statement: Statement, schema: Schema) -> bool:
    """Planner: in UPDATE and DELETE no volatile functions, no stable ones of columns, or within CASE and COALESCE. In
    RETURNING none but immutable ones, and no queries.
    """
    for level in written(statement, schema):
        given = level.node.get("returningList")
        changed = [] if level.kind == "InsertStmt" else [level.node]
        lazy = [node for kind in ("CaseExpr", "CoalesceExpr") for node in nodes(changed, kind)]
        calls = [how == "v" or any(nodes(call, "ColumnRef")) for how, call in mutable(changed, schema)]
        if any(calls) or any([*mutable(given, schema), *nodes(given, "SubLink"), *mutable(lazy, schema)]):
            return False
    return True


def order_is_of_one_bucket(statement: Statement, schema: Schema) -> bool:
    """Measured: each node numbers for itself, so that an identity column is an order within a bucket only."""
    for level, group in spread_items(statement, schema):
        fields = [ref["fields"] for by in nodes(level.node, "SortBy", LEVELS) for ref in nodes(by, "ColumnRef")]
        names = {field[-1].get("String", {}).get("sval") for field in fields}
        tables = {table_of(item) for item in level.items.values()}
        if schema.numbered & {(table, name) for table in tables for name in names} and not is_one(group):
            return False
    return True


def tables_are_of_one_kind(statement: Statement, schema: Schema) -> bool:
    """Documented: what stays on the coordinator is joined by sending its rows to all workers, if at all."""
    return not statement.tables & schema.spread or statement.tables <= schema.spread


def functions_stay_outside(statement: Statement, schema: Schema) -> bool:
    """Planner: a query on a shard runs no other distributed one. Measured: advisory locks, sequences and NOTIFY are the
    coordinator's.
    """
    own = re.compile(r"pg_(try_)?advisory|nextval|setval|currval|pg_notify")
    inside = {name for name in called(statement) if name in schema.ours or own.match(name)}
    return not (inside and statement.tables & schema.spread)


def sizes_are_not_asked(statement: Statement, schema: Schema) -> bool:
    """Documented: on the coordinator a distributed table is an empty one, to the catalog and to the planner."""
    asked = any(re.match(r"pg_(\w+_size|stat_get_\w+)$", name) for name in called(statement))
    asked = asked or any(nodes(statement.trees, "ExplainStmt"))
    return not (asked and any(table in statement.sql for table in schema.distributed))


def merges_are_not_lateral(statement: Statement, schema: Schema) -> bool:
    """Planner: what is asked for each row of anything but a distributed table, as of an array, is no expression, and
    merges no rows, as by LIMIT.
    """
    for level, group in spread_items(statement, schema):
        for query in () if is_one(group) else level.whole:
            joined = query.outer and any(query_of(item, [query]) for item in query.outer.items.values())
            named = named_outside(query, statement, schema)
            if (merges(query, schema) or not joined) and not all(is_spread(item, statement, schema) for item in named):
                return False
    return True


def recursion_is_of_one_bucket(statement: Statement, schema: Schema) -> bool:
    """Documented: WITH RECURSIVE works within one shard."""
    recursive = any(clause.get("recursive") for clause in nodes(statement.trees, "withClause"))
    return not recursive or all(is_one(group) for _, group in spread_items(statement, schema))


def samples_are_of_one_bucket(statement: Statement, schema: Schema) -> bool:
    """Planner: TABLESAMPLE works within one shard."""
    sampled = any(nodes(statement.trees, "RangeTableSample"))
    return not sampled or all(is_one(group) for _, group in spread_items(statement, schema))


UPSERT = "insert into indexer.repo (did, bucket) values ($1, $2) on conflict (did, bucket) do update set"
ONE = "select from indexer.repo r where r.bucket = w.bucket limit 1"
ARRAYS = "unnest($1::text[], $2::smallint[]) w(start, bucket)"


def each(query: str, of: str = ARRAYS) -> str:
    """The query for each row of something."""
    return f"select from {of}, lateral ({query}) one"


# Each rule with statements that break it.
RULES: dict[Callable[[Statement, Schema], bool], tuple[str, ...]] = {
    one_command: (
        "select 1; select 2",
        "merge into indexer.repo r using (select 1) on r.bucket = 1 when matched then delete",
    ),
    rows_say_their_bucket: (
        "insert into indexer.repo (did) values ($1)",
        "copy indexer.record (did) from stdin",
        "update indexer.repo set bucket = 1 where bucket = $1",
        f"{UPSERT} bucket = 1",
    ),
    conflicts_are_of_a_bucket: ("insert into indexer.repo (did, bucket) values ($1, $2) on conflict (did) do nothing",),
    conflicts_set_what_comes: (
        f"{UPSERT} updated_at = now()",
        f"{UPSERT} rev = (select '3')",
        f"{UPSERT} rev = $3 where repo.updated_at < current_timestamp",
    ),
    locks_are_of_one_bucket: (
        "select from indexer.repo where bucket = any($1) for update skip locked",
        "select from indexer.repo where bucket = $1 or active for update",
        "with one as (select from indexer.repo where did = $1 for share) select from one",
        "select from indexer.repo r join unnest($1) w(bucket) using (bucket) for update",
        "select from indexer.repo where bucket = (random() * 255)::smallint for update",
    ),
    buckets_are_named: (
        "delete from indexer.record where did = $1",
        "select from indexer.repo where bucket >= $1",
        "select from indexer.repo where bucket = (select 1)",
        "select from atproto.repos where did = $1",
        "select from indexer.repo r tablesample system ($1)",
        "select from indexer.repo where bucket = $1 union select from indexer.repo",
        "delete from indexer.record r using unnest($1, $2) w(did, bucket) where r.did = w.did and r.bucket = w.bucket",
        "select from indexer.repo r join unnest($1) w(bucket) on r.bucket = w.bucket and w.bucket = any($1)",
        "select from indexer.queue q join indexer.repo r using (bucket) where q.bucket = any($1)",
        "select from (select $1::smallint[] as bucket) w join indexer.repo r on r.bucket = any(w.bucket)",
        "select from unnest($1) w(b), lateral (with r as (select from indexer.repo where bucket = w.b) table r) one",
        "select from indexer.repo r left join indexer.identity i on i.bucket = r.bucket and r.bucket = $1",
        "select from indexer.repo r full join indexer.identity i on i.bucket = r.bucket and r.bucket = $1",
        "select from indexer.repo r left join (select 1 as bucket) one using (bucket)",
        "select from indexer.queue q, lateral (select from indexer.repo where bucket = q.bucket and bucket = $1) one",
        "select from unnest($1) w(did) join indexer.repo r using (did) join indexer.record c using (did, bucket)",
    ),
    joins_are_of_a_bucket: (
        "select from indexer.repo r join indexer.record c using (did) where r.bucket = any($1) and c.bucket = any($1)",
        "select from indexer.repo r join indexer.record c using (did) where r.bucket = $1 and c.bucket = $2",
        "select from indexer.repo r where r.bucket = $1 and r.did in (select did from indexer.record)",
        "select from (select rank, bucket from indexer.queue) q(bucket, n) join indexer.repo r using (bucket)",
        "update indexer.repo r set rev = i.handle from indexer.identity i where i.did = r.did and i.bucket = any($1)",
        "select from indexer.queue q, lateral (select from indexer.repo r where r.rank = q.rank limit 1) one",
    ),
    writes_are_pure: (
        "update indexer.repo set updated_at = clock_timestamp() where bucket = $1",
        "update indexer.repo set reason = to_char(updated_at, 'MM') where bucket = $1",
        "update indexer.repo set updated_at = case when active then now() end where bucket = $1",
        "delete from indexer.repo where bucket = $1 returning date_part('epoch', updated_at)",
    ),
    order_is_of_one_bucket: (
        "select from indexer.kept_event where bucket = any($1) order by id",
        "select row_number() over (order by k.id) from indexer.kept_event k",
    ),
    tables_are_of_one_kind: (
        "select from indexer.repo r join indexer.change c using (did, bucket) where r.bucket = $1",
        "truncate indexer.record, indexer.batch_1",
    ),
    functions_stay_outside: (
        "select atproto.request_resync(did) from indexer.repo where bucket = $1",
        "select nextval('indexer.change_seq') from indexer.repo where bucket = $1",
    ),
    sizes_are_not_asked: ("select pg_table_size('indexer.repo')", "explain select from indexer.repo where bucket = $1"),
    merges_are_not_lateral: (
        each(ONE),
        each("select from indexer.repo where did > start and bucket = any($2) limit 1"),
        each("select from indexer.repo r where r.bucket = w.bucket offset 1"),
        each("select count(*) from indexer.repo r where r.bucket = w.bucket"),
        each("select distinct rev from indexer.repo r where r.bucket = w.bucket"),
        each("select rev from indexer.repo r where r.bucket = w.bucket group by rev"),
        each("select row_number() over () from indexer.repo r where r.bucket = w.bucket"),
        each("select from (select from indexer.repo r where r.bucket = w.bucket) x limit 1"),
        each("select from indexer.repo r where r.bucket = w.bucket union all select from indexer.identity limit 1"),
        each("select from indexer.repo r join indexer.queue q using (bucket) where q.bucket = w.bucket limit 1"),
        each("select from indexer.queue q where q.bucket = w.bucket limit 1", of=f"{ARRAYS}, lateral ({ONE}) other"),
        each(
            "select from indexer.repo r where r.did > w.start limit 1", of=f"{ARRAYS} join indexer.queue using (bucket)"
        ),
        each(
            "select from indexer.repo where rev = n and bucket = any($2) limit 1", of="json_to_recordset($1) w(n text)"
        ),
        each(ONE, of="(select 1 as bucket) w"),
        each(ONE, of="(select bucket from indexer.queue limit 1) w"),
        "select (select rev from indexer.repo r where r.bucket = w.bucket) from unnest($1) w(bucket)",
    ),
    recursion_is_of_one_bucket: (
        "with recursive c as (select from indexer.repo where bucket = any($1) union select from c) select from c",
    ),
    samples_are_of_one_bucket: (
        "select from indexer.repo tablesample system (1) where bucket = any($1)",
        "select from indexer.repo r tablesample bernoulli ($1)",
    ),
}
GOOD = (
    each(
        "select from indexer.repo r where r.bucket = w.bucket and r.bucket = any($1) limit 1",
        of="(select bucket from indexer.queue where bucket = any($1)) w",
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

SHARDS = "works, at the cost of every shard"
FACE = "works, at the cost of every shard; a column bucket at the end of the view would say which one"
EXCEPTIONS = {
    buckets_are_named: {
        "export._ESTIMATE": "see sizes",
        "export._EXPORT": SHARDS,
        "identities._CONTEST": SHARDS,
        "identities._DID_OF_HANDLE": SHARDS,
        "queries._COUNT_REPOS": SHARDS,
        "queries._PAGE": SHARDS,
        "queries._RECORD": FACE,
        "queries._SAMPLE": "see samples",
        "queries.visible_records": FACE,
        "queries.visible_repos": SHARDS,
        "resync.DUE": f"{SHARDS}; with the array in the look-up, too, the planner sorts all that is due",
    },
    sizes_are_not_asked: {
        "export._ESTIMATE": "citus_shards has the sizes; now it says what the planner makes up",
        "queries._COUNT_RECORDS": "citus_shards has the sizes; now it says none",
        "queries._PAGES": "citus_relation_size has them; now it says none",
    },
    samples_are_of_one_bucket: {
        "queries._SAMPLE": "an audit's alone, for whom it may choose buckets first, and sample within each",
    },
}


def broken(statement: Statement, schema: Schema) -> set[str]:
    return {rule.__name__ for rule in RULES if not rule(statement, schema)}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
async def test_a_rule_tells_what_breaks_it(schema: Schema, rule: Callable[[Statement, Schema], bool]) -> None:
    for example in RULES[rule]:
        assert rule.__name__ in broken(Statement("example", example), schema), example


async def test_what_citus_would_need_keeps_to_the_rules(schema: Schema) -> None:
    for example in GOOD:
        assert broken(Statement("example", example), schema) == set(), example


async def test_every_statement_keeps_to_the_rules(schema: Schema, sql: asyncpg.Connection) -> None:
    every = [*statements.sent(), *await statements.within(sql)]
    assert {"apply._UPDATE_REPOS", "view atproto.records", "function atproto.request_resync"} <= {s.name for s in every}
    found = {(rule, statement.name) for statement in every for rule in broken(statement, schema)}
    assert found == {(rule.__name__, name) for rule, names in EXCEPTIONS.items() for name in names}


# Keys without the bucket, keys of others, and what runs where no coordinator is.
UNFIT = """
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


async def test_keys_are_of_a_bucket(schema: Schema, sql: asyncpg.Connection) -> None:
    """Measured: keys without the distribution column fail. Documented: so do references to other keys, and triggers."""
    assert await sql.fetch(UNFIT, schema.distributed) == []
    await sql.execute(BAD)
    unfit = {name for (name,) in await sql.fetch(UNFIT, [*schema.distributed, "indexer.bad"])}
    assert unfit == {"indexer.bad_pkey", "bad_other_fkey", "bad_bucket_fkey", "bad_trigger"}


async def test_tables_are_of_a_bucket_or_stay_on_the_coordinator(schema: Schema, sql: asyncpg.Connection) -> None:
    tables = await sql.fetch("select schemaname || '.' || tablename from pg_tables where schemaname = 'indexer'")
    assert {family(name) for (name,) in tables if name not in schema.distributed} == LOCAL.keys()


async def test_migrations_make_views_after_tables_were_changed(empty_database: str, schema: Schema) -> None:
    """Measured: a view can't be made after what ran on all shards in the same transaction, and all migrations are one.

    An exception, of use only where tables are distributed already: `set local citus.multi_shard_modify_mode to
    'sequential'` in `migrate`, which plain Postgres accepts.
    """
    heard: list[Statement] = []

    def hear(_connection: object, _cursor: object, text: str, *_: object) -> None:
        heard.append(Statement("migrate", text))

    event.listen(Engine, "before_cursor_execute", hear)
    try:
        await migrate(empty_database)
    finally:
        event.remove(Engine, "before_cursor_execute", hear)
    changed = [
        place for place, one in enumerate(heard) if one.tables & schema.distributed and "create table" not in one.sql
    ]
    views = [place for place, one in enumerate(heard) if any(nodes(one.trees, "ViewStmt"))]
    assert min(changed) < max(views)
    assert not any("citus.multi_shard_modify_mode" in one.sql for one in heard)


def test_only_the_store_knows_a_driver() -> None:
    driver = re.compile(r"^\s*(?:from|import) (?:asyncpg|sqlalchemy|alembic|psycopg)\b", re.MULTILINE)
    found = {name for name, source in statements.sources().items() if driver.search(source)}
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
def test_a_statement_that_cannot_be_told_is_an_error(line: str) -> None:
    module = ModuleType("indexer.store.example")
    module.SQL = "select 1"  # type: ignore[attr-defined]
    good = "async def some(connection):\n    end = SQL + ', 2'\n    await connection.fetch(end)"
    assert [one.sql for one in statements.statements_of(module, good)] == ["select 1, 2"]
    with pytest.raises(LookupError):
        list(statements.statements_of(module, f"async def some(connection, words):\n    {line}"))
