"""Find and parse all SQL that the program sends, and all SQL in the functions and views of its schema.

`sent_statements` evaluates the SQL argument of every call of a driver method in its module. It is an error if an
argument cannot be evaluated from the source alone, or if a driver method is used other than by a call. The statements
are parsed by the parser of Postgres.
"""

import ast
import importlib
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from inspect import getmembers, isfunction, signature
from itertools import takewhile
from pathlib import Path
from types import ModuleType
from typing import Any

import asyncpg
import pgparse
from sqlalchemy import TextClause
from sqlalchemy.dialects.postgresql.asyncpg import PGDialect_asyncpg
from sqlalchemy.ext.asyncio import AsyncConnection

import indexer

Tree = Any
"""The parse tree of Postgres as JSON: dicts and lists."""
Node = dict[str, Any]

SQL = {"query", "command", "table_name", "statement"}
SENDERS = {
    name
    for driver in (asyncpg.Connection, asyncpg.Pool, AsyncConnection)
    for name, method in getmembers(driver, isfunction)
    if not name.startswith("_") and SQL & set(signature(method).parameters)
}
LOCALS = {
    "segment": 0,
    "role": "atproto_reader",
    "index": "lexicon_a_b",
    "method": "btree",
    "expressions": "(lexicon.to_text((value -> 'a'), 1))",
    "collection": "'a.b.c'",
    "comment": "'a'",
    "percentage": 1.0,
    "table": "repo",
    "database": "indexer",
    "setting": "jit",
    "value": "off",
    "milliseconds": 2_000,
    "row": {"functions": "pg_catalog.now()", "roles": "atproto_reader"},
}
"""Values of local variables that are put into a statement: a segment, a public role, the parts of an index, the size of
a sample, names, a setting, a time limit, and functions with the roles that may call them."""
DYNAMIC = {
    "indexer.adapt_public_schema": "creates the public views, of which those of a plain database are read as views",
    "indexer.grant_shards_to_readers": "grants rights on tables and on a schema",
    "indexer.parts_of": "asks each node for the sizes of its shards",
    "indexer.create_lexicon_view": "creates and drops views, comments on them and grants access to them",
    "indexer.drop_lexicon_view": "drops a view",
}
"""Functions that execute statements which are not in the source: DDL of views, which Citus runs on the coordinator."""
COPY = ("schema_name", "columns")
CONNECTION = re.compile("connection|pool")
LEVELS = ("SelectStmt", "InsertStmt", "UpdateStmt", "DeleteStmt")
SIDES = ("larg", "rarg")
BESIDE = (*SIDES, "withClause", "selectStmt")
"""Parts of a level that cannot refer to the tables of the level itself, only to those of its outer levels."""
BOUND = {"JOIN_INNER": SIDES, "JOIN_LEFT": ("rarg",), "JOIN_RIGHT": ("larg",)}
"""The sides of a join that its condition restricts. An outer join returns all rows of the other side."""
BUCKET_FUNCTIONS = {"bucket_of"}
"""Functions that return a bucket."""


@dataclass(eq=False)
class Level:
    """A SELECT, INSERT, UPDATE or DELETE in a statement.

    Attributes:
        outer: The level whose columns it may refer to.
        part_of: The level that contains it.
    """

    kind: str
    node: Node
    outer: "Level | None"
    part_of: "Level | None"

    @cached_property
    def items(self) -> dict[str, Node]:
        """The tables and sub-queries that it reads or changes, by alias."""
        return dict(_items(self.sources))

    @property
    def sources(self) -> list[Tree]:
        """The parts of the level that contain its items."""
        target = [{"RangeVar": self.node["relation"]}] if self.kind in ("UpdateStmt", "DeleteStmt") else []
        return [*target, *self.node.get("fromClause", ()), *self.node.get("usingClause", ())]

    @property
    def target(self) -> str:
        """The table that it writes; "" for a SELECT."""
        return "" if self.kind == "SelectStmt" else table_of(self.node["relation"])

    @property
    def scopes(self) -> "list[Level]":
        """This level and those whose columns it may refer to, innermost first."""
        return [self, *(self.outer.scopes if self.outer else ())]

    @property
    def enclosing(self) -> "list[Level]":
        """This level and all that contain it, innermost first."""
        return [self, *(self.part_of.enclosing if self.part_of else ())]

    @cached_property
    def columns(self) -> list[list[str]]:
        """The parts of each column name in the level itself, without its sub-queries."""
        return [_words(column) for column in nodes(self.node, "ColumnRef", LEVELS) if _words(column) != ["*"]]


Term = tuple[Level | str, str]
"""An operand of a comparison with a bucket: the bucket of an item (level and alias), "one" value, or one of "some"."""


@dataclass(frozen=True)
class Statement:
    """An SQL statement with a name for messages."""

    name: str
    sql: str

    @cached_property
    def trees(self) -> list[Node]:
        """The parse tree of each command."""
        commands = json.loads(json.dumps(pgparse.parse(self.sql)), object_hook=_branches)
        return [command["stmt"] for command in commands]

    @cached_property
    def levels(self) -> list[Level]:
        """All levels of all commands."""
        return list(_levels(self.trees, None, None))

    @cached_property
    def tables(self) -> set[str]:
        """All tables that are named, with their schemas."""
        named = {table_of(node) for kind in ("RangeVar", "relation") for node in nodes(self.trees, kind)}
        return named - {""}

    @cached_property
    def buckets(self) -> dict[tuple[Level, str], frozenset[Term]]:
        """For each item (level and alias), all terms that its bucket is equal to, including itself."""
        equal: defaultdict[Term, set[Term]] = defaultdict(set)
        for level in self.levels:
            for item, other in (*_equalities(level), *_derived(level, self.levels)):
                equal[item].add(other)
        return {(level, alias): _closure((level, alias), equal) for level in self.levels for alias in level.items}


def _closure(item: Term, equal: Mapping[Term, set[Term]]) -> frozenset[Term]:
    """Return all terms that are equal to the item.

    Equality is transitive. That a term is one of "some" values is not passed on, neither by Postgres nor by Citus.
    """
    found, new = set[Term](), {item}
    while new:
        found |= new
        new = {other for term in new for other in equal[term] if term == item or other[0] != "some"} - found
    return frozenset(found)


def nodes(tree: Tree, kind: str, but: tuple[str, ...] = ()) -> Iterator[Node]:
    """Yield every node of the kind in the tree, except those inside nodes of the kinds `but`."""
    if isinstance(tree, list):
        for inner in tree:
            yield from nodes(inner, kind, but)
    elif isinstance(tree, dict):
        for key, inner in tree.items():
            if key == kind and isinstance(inner, dict):
                yield inner
            if key not in but:
                yield from nodes(inner, kind, but)


def calls(tree: Tree, but: tuple[str, ...] = ()) -> set[str]:
    """Return the names of the functions that are called, without their schemas."""
    return {call["funcname"][-1]["String"]["sval"] for call in nodes(tree, "FuncCall", but)}


def _levels(tree: Tree, outer: Level | None, part_of: Level | None) -> Iterator[Level]:
    if isinstance(tree, list):
        for inner in tree:
            yield from _levels(inner, outer, part_of)
    elif isinstance(tree, dict):
        for key, inner in tree.items():
            if key not in LEVELS:
                yield from _levels(inner, outer, part_of)
                continue
            level = Level(key, inner, outer, part_of)
            yield level
            for field, part in inner.items():
                yield from _levels(part, outer if field in BESIDE else level, level)


def _branches(node: Node) -> Node:
    """Return the node with the sides of a UNION as SELECT statements, in the form of all others."""
    return node | {side: {"SelectStmt": node[side]} for side in SIDES if "op" in node and side in node}


def table_of(item: Node) -> str:
    """Return the name of a table with its schema; "" if the item is no table."""
    return f"{item['schemaname']}.{item['relname']}" if "schemaname" in item else ""


def query_of(item: Node, levels: list[Level]) -> Level | None:
    """Return the level of an item that is a sub-query; None for other items."""
    return next((level for level in levels if level.node is item.get("subquery", {}).get("SelectStmt")), None)


def columns_of(item: Node) -> dict[str, Node]:
    """Return the columns of a sub-query or function by name, each with its expression if that is known, else {}."""
    targets = [target["ResTarget"] for target in item.get("subquery", {}).get("SelectStmt", {}).get("targetList", ())]
    targets = list(takewhile(lambda target: not any(nodes(target, "A_Star")), targets))
    names = [name["String"]["sval"] for name in item.get("alias", {}).get("colnames", ())]
    names += [target.get("name", _words(target["val"].get("ColumnRef", {}))[-1]) for target in targets[len(names) :]]
    values = [target["val"] for target in targets]
    return dict(zip(names, [*values, *[{}] * len(names)], strict=False))


def _items(sources: list[Tree]) -> Iterator[tuple[str, Node]]:
    for source in sources:
        [(kind, node)] = source.items()
        if kind == "JoinExpr":
            yield from _items([node[side] for side in SIDES])
        if kind == "RangeTableSample":
            yield from _items([node["relation"]])
            continue
        if kind != "JoinExpr" or "alias" in node:
            yield node.get("alias", {}).get("aliasname", node.get("relname", "")), node


def _conditions(tree: Tree) -> Iterator[Node]:
    """Yield the parts of a conjunction."""
    if tree and tree.get("BoolExpr", {}).get("boolop") == "AND_EXPR":
        for part in tree["BoolExpr"]["args"]:
            yield from _conditions(part)
    elif tree:
        yield tree


def _words(column: Node) -> list[str]:
    return [field.get("String", {}).get("sval", "*") for field in column.get("fields", ({},))]


def _bucket_of(items: Mapping[str, Node]) -> str:
    """Return the alias of the item that an unqualified column `bucket` belongs to."""
    return next((alias for alias, item in items.items() if table_of(item)), next(iter(items), ""))


def _column(level: Level, node: Node) -> Term | None:
    """Return the term of a column; None if it is no bucket. A qualified name of no item is a variable of a function."""
    names = _words(node)
    for scope in level.scopes:
        alias = _bucket_of(scope.items) if names == ["bucket"] else names[0]
        if alias in scope.items:
            return (scope, alias) if names[-1] == "bucket" else None
    return ("one", ".".join(names)) if len(names) == 2 else None


def _term(level: Level, node: Node) -> Term | None:
    """Return the term of an expression that is a bucket or has the same value for all rows; None for others."""
    if "ColumnRef" in node:
        return _column(level, node["ColumnRef"])
    while "TypeCast" in node:
        node = node["TypeCast"]["arg"]
    columns = [_column(level, column) or (level, "") for column in nodes(node, "ColumnRef")]
    varies = any(kind != "one" for kind, _ in columns) or calls(node) - BUCKET_FUNCTIONS or any(nodes(node, "SubLink"))
    return None if varies else ("one", re.sub(r'"location": -?\d+', "", json.dumps(node)))


def _equal(level: Level, condition: Node) -> tuple[Term | None, Term | None]:
    """Return the two terms that a condition makes equal."""
    match condition.get("A_Expr"):
        case {"kind": "AEXPR_OP", "name": [{"String": {"sval": "="}}], "lexpr": left, "rexpr": right}:
            return _term(level, left), _term(level, right)
        case {"kind": "AEXPR_OP_ANY", "name": [{"String": {"sval": "="}}], "lexpr": left, "rexpr": right}:
            array = _term(level, right)
            return _term(level, left), ("some", str(id(right))) if array and array[0] == "one" else None
    return None, None


def _equalities(level: Level) -> Iterator[tuple[Term, Term]]:
    """Yield the buckets of the level's own items, each with a term that it equals in every row of the result."""
    joins = [join for source in level.sources for join in nodes(source, "JoinExpr", LEVELS)]
    conditions = [(level.items, _equal(level, part)) for part in _conditions(level.node.get("whereClause"))]
    for join in joins:
        bound = dict(_items([join[side] for side in BOUND.get(join["jointype"], ())]))
        conditions += [(bound, _equal(level, part)) for part in _conditions(join.get("quals"))]
        if {"String": {"sval": "bucket"}} in join.get("usingClause", ()):
            owners = [_bucket_of(dict(_items([join[side]]))) for side in SIDES]
            conditions.append((bound, ((level, owners[0]), (level, owners[1]))))
    for bound, (left, right) in conditions:
        for item, other in ((left, right), (right, left)):
            if item and other and item in {(level, alias) for alias in bound}:
                yield item, other


def _derived(level: Level, levels: list[Level]) -> Iterator[tuple[Term, Term]]:
    """Yield the buckets of sub-queries in FROM, each with the term that the sub-query selects."""
    for alias, item in level.items.items():
        query, bucket = query_of(item, levels), columns_of(item).get("bucket", {})
        of = _column(query, bucket["ColumnRef"]) if query and "ColumnRef" in bucket else None
        if of:
            yield (level, alias), of


def sources() -> dict[str, str]:
    """Return the source of every module of the package, by module name."""
    [root] = map(Path, indexer.__path__)
    names = {path: path.relative_to(root.parent).with_suffix("").parts for path in root.rglob("*.py")}
    return {".".join(name).removesuffix(".__init__"): path.read_text() for path, name in names.items()}


@cache
def sent_statements() -> tuple[Statement, ...]:
    """Return the statements that the program sends, named after their constants, else after their functions."""
    return tuple(
        statement
        for name, source in sources().items()
        if name.startswith("indexer.store")  # no other package imports a driver; a test checks that
        for statement in statements_of(importlib.import_module(name), source)
    )


def statements_of(module: ModuleType, source: str) -> Iterator[Statement]:
    """Yield the statements that a module sends.

    Raises:
        LookupError: A statement cannot be evaluated from the source alone.
    """
    prefix = module.__name__.removeprefix("indexer.store.")
    for call, function in _calls(ast.parse(source), None):
        values = {word.arg: _value(word.value, function, module) for word in call.keywords if word.arg in COPY}
        value = _value(call.args[0], function, module)
        if values:
            value = f"copy {values['schema_name']}.{value} ({', '.join(values['columns'])}) from stdin"
        if isinstance(value, TextClause):
            value = str(value.compile(dialect=PGDialect_asyncpg()))  # type: ignore[no-untyped-call]
        if isinstance(value, str):  # and not the number of rows to fetch from a cursor
            constant = call.args[0].id if isinstance(call.args[0], ast.Name) else None
            yield Statement(f"{prefix}.{constant if constant in vars(module) else function.name}", value)


Function = ast.FunctionDef | ast.AsyncFunctionDef


def _calls(tree: ast.AST, function: Function | None) -> Iterator[tuple[ast.Call, Function]]:
    for node in ast.iter_child_nodes(tree):
        inner = node
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in SENDERS:
            if function is None or not node.args:
                raise LookupError(ast.unparse(node))
            yield node, function
            inner = ast.Tuple([node.func.value, *node.args, *(word.value for word in node.keywords)])
        elif isinstance(node, ast.Attribute) and node.attr in SENDERS and CONNECTION.search(ast.unparse(node.value)):
            raise LookupError(f"{ast.unparse(node)} is passed on")
        yield from _calls(inner, node if isinstance(node, Function) else function)


def _value(node: ast.expr, function: Function, module: ModuleType) -> Any:
    known: dict[str, Any] = dict(vars(module))
    for name in {name.id for name in ast.walk(node) if isinstance(name, ast.Name)} & _own(function):
        steps = [step for step in ast.walk(function) if isinstance(step, ast.Assign) and name in _names(step.targets)]
        if name in LOCALS:
            known[name] = LOCALS[name]
        elif len(steps) == 1 and isinstance(steps[0].targets[0], ast.Name):
            known[name] = _value(steps[0].value, function, module)
        else:
            raise LookupError(f"{name} in {function.name}")
    return eval(compile(ast.Expression(node), "", "eval"), known)  # noqa: S307 - our own source


def _own(function: Function) -> set[str]:
    """Return the names that the function defines itself."""
    return _names(function.body) | {name.arg for name in ast.walk(function.args) if isinstance(name, ast.arg)}


def _names(steps: Iterable[ast.AST]) -> set[str]:
    """Return the names that are assigned to."""
    inner = (name for step in steps for name in ast.walk(step))
    return {name.id for name in inner if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)}


_DEFINITIONS = """
    select 'view ' || oid::regclass, null, pg_get_viewdef(oid) from pg_class
    where relkind in ('v', 'm') and relnamespace in ('indexer'::regnamespace, 'atproto'::regnamespace)
    union all
    select 'function ' || oid::regproc, pg_get_functiondef(oid), pg_get_function_sqlbody(oid) from pg_proc
    where pronamespace in ('indexer'::regnamespace, 'atproto'::regnamespace)
"""


async def database_statements(sql: asyncpg.Connection) -> list[Statement]:
    """Return the statements in the functions and views of the schema."""
    return [
        Statement(name, body)
        for name, definition, own in await sql.fetch(_DEFINITIONS)
        for body in ([_sql(own)] if own else _plpgsql(definition, dynamic=name.removeprefix("function ") in DYNAMIC))
    ]


def _sql(body: str) -> str:
    if body.startswith("RETURN "):
        return f"select {body.removeprefix('RETURN ')}"
    return body.removeprefix("BEGIN ATOMIC").removesuffix("END")


def _plpgsql(definition: str, *, dynamic: bool) -> Iterator[str]:
    """Yield the statements of a PL/pgSQL function. Row types are replaced, because the parser does not know them.

    Raises:
        LookupError: The function executes a dynamic statement, and is not expected to.
    """
    body = pgparse.parse_pgsql(re.sub(r"(?m)^(\s*\w+) indexer\.\w+;$", r"\1 record;", definition))
    if any(nodes(body, "PLpgSQL_stmt_dynexecute")) != dynamic:
        raise LookupError(definition)
    for expression in nodes(body, "PLpgSQL_expr"):
        query = expression["query"]
        yield query if expression["parseMode"] == 0 else f"select {query.rpartition(':=')[2]}"
