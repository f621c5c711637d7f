"""Rules that a schema and its statements follow to work on Citus, distributed by bucket.

Citus cannot be installed here, so rules replace it. Each rule names its source. Measured: a statement that breaks the
rule failed or was slow on Citus 13.2 with two workers, and one that follows it worked. Documented: the documentation
says that it is not supported. Planner: the source of the planner rejects it.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

import asyncpg

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
    "disconnected_consumer": "a row for each disconnected consumer of the whole change log",
    "dead_letter": "limited by relay and reason, not by DID",
    "distribution": "one row, which says that the tables are distributed",
    "feed_delivery": "a row for each feed of the whole change log",
    "host": "a row for each host, without a DID",
    "lexicon": "a row for each lexicon, without a DID",
    "lexicon_index_lock": "no rows, only a lock",
    "link_bucket": "a row for each bucket, which are compared with each other",
    "gap": "a row for each gap in the stream of a relay, without a DID",
    "migration_lock": "no rows, only a lock",
    "numbering_lock": "no rows, only a lock",
    "scope": "one row, which is locked by a change of the scope",
    "shard_owner": "a row for each process, locked together by each claim",
    "stored_setting": "a row for each setting",
    "unnumbered_batch": "a row for each change batch that is not numbered yet",
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
