"""All SQL that the program sends and all that its schema runs: found, not listed, and parsed by Postgres's own parser.

What is sent: the argument of every call of a driver's method that takes SQL, evaluated in the module where it stands.
One that can't be evaluated is an error, and so is such a method that is passed on. What runs: every function and view.
"""

import ast
import importlib
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
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

Tree = Any  # dicts and lists: Postgres's own parse tree as JSON
Node = dict[str, Any]

SQL = {"query", "command", "table_name", "statement"}
SENDERS = {
    name
    for driver in (asyncpg.Connection, asyncpg.Pool, AsyncConnection)
    for name, method in getmembers(driver, isfunction)
    if not name.startswith("_") and SQL & set(signature(method).parameters)
}
LOCALS = {"segment": 0}  # what is put into a statement at run time: the number of a segment of the log
COPY = ("schema_name", "columns")
CONNECTION = re.compile("connection|pool")
LEVELS = ("SelectStmt", "InsertStmt", "UpdateStmt", "DeleteStmt")
SIDES = ("larg", "rarg")
BESIDE = (*SIDES, "withClause", "selectStmt")  # parts of a level that name what it may name, but nothing of its own
BOUND = {"JOIN_INNER": SIDES, "JOIN_LEFT": ("rarg",), "JOIN_RIGHT": ("larg",)}  # an outer join keeps what doesn't fit
PURE = {"bucket_of"}  # functions whose value may be a bucket


@dataclass(eq=False)
class Level:
    """A SELECT, INSERT, UPDATE or DELETE within a statement; in `items` what it reads or changes, by alias.

    `outer` is the one whose columns it may name, `part_of` the one in which it stands.
    """

    kind: str
    node: Node
    outer: "Level | None"
    part_of: "Level | None"

    @cached_property
    def items(self) -> dict[str, Node]:
        return dict(_items(self.sources))

    @property
    def sources(self) -> list[Tree]:
        target = [{"RangeVar": self.node["relation"]}] if self.kind in ("UpdateStmt", "DeleteStmt") else []
        return [*target, *self.node.get("fromClause", ()), *self.node.get("usingClause", ())]

    @property
    def target(self) -> str:
        """The table that is written; "" for a SELECT."""
        return "" if self.kind == "SelectStmt" else table_of(self.node["relation"])

    @property
    def around(self) -> "list[Level]":
        """This one and those whose columns it may name, the innermost first."""
        return [self, *(self.outer.around if self.outer else ())]

    @property
    def whole(self) -> "list[Level]":
        """This one and all that it is part of, the innermost first."""
        return [self, *(self.part_of.whole if self.part_of else ())]

    @cached_property
    def columns(self) -> list[list[str]]:
        """The words of each column that it names itself."""
        return [_words(column) for column in nodes(self.node, "ColumnRef", LEVELS) if _words(column) != ["*"]]


# What a bucket is equal to: that of an item, by level and alias; or "one" value, which equals itself; or one of "some".
Term = tuple[Level | str, str]


@dataclass(frozen=True)
class Statement:
    name: str
    sql: str

    @cached_property
    def trees(self) -> list[Node]:
        commands = json.loads(json.dumps(pgparse.parse(self.sql)), object_hook=_branches)
        return [command["stmt"] for command in commands]

    @cached_property
    def levels(self) -> list[Level]:
        return list(_levels(self.trees, None, None))

    @cached_property
    def tables(self) -> set[str]:
        """All that are named, with their schemas."""
        named = {table_of(node) for kind in ("RangeVar", "relation") for node in nodes(self.trees, kind)}
        return named - {""}

    @cached_property
    def buckets(self) -> dict[tuple[Level, str], frozenset[Term]]:
        """Of each item, by level and alias: all that its bucket is equal to, itself included."""
        equal: defaultdict[Term, set[Term]] = defaultdict(set)
        for level in self.levels:
            for item, other in (*_equalities(level), *_derived(level, self.levels)):
                equal[item].add(other)
        return {(level, alias): _closure((level, alias), equal) for level in self.levels for alias in level.items}


def _closure(item: Term, equal: Mapping[Term, set[Term]]) -> frozenset[Term]:
    """A value is passed on from one to the next; that it is one of some is not, in Postgres nor in Citus."""
    found, new = set[Term](), {item}
    while new:
        found |= new
        new = {other for term in new for other in equal[term] if term == item or other[0] != "some"} - found
    return frozenset(found)


def nodes(tree: Tree, kind: str, but: tuple[str, ...] = ()) -> Iterator[Node]:
    """Every node of this kind in the tree, but for what is within nodes of those kinds."""
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
    """Names of the functions that are called, without their schemas."""
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
    """Those of a UNION as statements, as all others are."""
    return node | {side: {"SelectStmt": node[side]} for side in SIDES if "op" in node and side in node}


def table_of(item: Node) -> str:
    """With its schema; "" for what is no table."""
    return f"{item['schemaname']}.{item['relname']}" if "schemaname" in item else ""


def query_of(item: Node, levels: list[Level]) -> Level | None:
    """The sub-query that an item is."""
    return next((level for level in levels if level.node is item.get("subquery", {}).get("SelectStmt")), None)


def columns_of(item: Node) -> dict[str, Node]:
    """Columns that the statement itself names, each with what it is, as far as that can be told."""
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
    """What must all be true."""
    if tree and tree.get("BoolExpr", {}).get("boolop") == "AND_EXPR":
        for part in tree["BoolExpr"]["args"]:
            yield from _conditions(part)
    elif tree:
        yield tree


def _words(column: Node) -> list[str]:
    return [field.get("String", {}).get("sval", "*") for field in column.get("fields", ({},))]


def _bucket_of(items: Mapping[str, Node]) -> str:
    """Whose an unqualified bucket is."""
    return next((alias for alias, item in items.items() if table_of(item)), next(iter(items), ""))


def _column(level: Level, node: Node) -> Term | None:
    """None for any other column than a bucket; one that no item has is a variable of a function, a value."""
    names = _words(node)
    for around in level.around:
        alias = _bucket_of(around.items) if names == ["bucket"] else names[0]
        if alias in around.items:
            return (around, alias) if names[-1] == "bucket" else None
    return ("one", ".".join(names)) if len(names) == 2 else None


def _term(level: Level, node: Node) -> Term | None:
    """A bucket, or a value that is the same for all rows."""
    if "ColumnRef" in node:
        return _column(level, node["ColumnRef"])
    while "TypeCast" in node:
        node = node["TypeCast"]["arg"]
    columns = [_column(level, column) or (level, "") for column in nodes(node, "ColumnRef")]
    varies = any(kind != "one" for kind, _ in columns) or calls(node) - PURE or any(nodes(node, "SubLink"))
    return None if varies else ("one", re.sub(r'"location": -?\d+', "", json.dumps(node)))


def _equal(level: Level, condition: Node) -> tuple[Term | None, Term | None]:
    match condition.get("A_Expr"):
        case {"kind": "AEXPR_OP", "name": [{"String": {"sval": "="}}], "lexpr": left, "rexpr": right}:
            return _term(level, left), _term(level, right)
        case {"kind": "AEXPR_OP_ANY", "name": [{"String": {"sval": "="}}], "lexpr": left, "rexpr": right}:
            array = _term(level, right)
            return _term(level, left), ("some", str(id(right))) if array and array[0] == "one" else None
    return None, None


def _equalities(level: Level) -> Iterator[tuple[Term, Term]]:
    """Buckets of the level's own items, each with what it is equal to in every row that counts."""
    joins = [join for source in level.sources for join in nodes(source, "JoinExpr", LEVELS)]
    said = [(level.items, _equal(level, part)) for part in _conditions(level.node.get("whereClause"))]
    for join in joins:
        bound = dict(_items([join[side] for side in BOUND.get(join["jointype"], ())]))
        said += [(bound, _equal(level, part)) for part in _conditions(join.get("quals"))]
        if {"String": {"sval": "bucket"}} in join.get("usingClause", ()):
            owners = [_bucket_of(dict(_items([join[side]]))) for side in SIDES]
            said.append((bound, ((level, owners[0]), (level, owners[1]))))
    for bound, (left, right) in said:
        for item, other in ((left, right), (right, left)):
            if item and other and item in {(level, alias) for alias in bound}:
                yield item, other


def _derived(level: Level, levels: list[Level]) -> Iterator[tuple[Term, Term]]:
    """Buckets of sub-queries in FROM, each with that which it is of."""
    for alias, item in level.items.items():
        query, bucket = query_of(item, levels), columns_of(item).get("bucket", {})
        of = _column(query, bucket["ColumnRef"]) if query and "ColumnRef" in bucket else None
        if of:
            yield (level, alias), of


def sources() -> dict[str, str]:
    """The source of every module of the package, by its name."""
    [root] = map(Path, indexer.__path__)
    names = {path: path.relative_to(root.parent).with_suffix("").parts for path in root.rglob("*.py")}
    return {".".join(name).removesuffix(".__init__"): path.read_text() for path, name in names.items()}


def sent() -> list[Statement]:
    """What the program sends, each named after its constant, or after its function where it has none."""
    return [
        statement
        for name, source in sources().items()
        if name.startswith("indexer.store")  # nothing else knows a driver, which a test holds
        for statement in statements_of(importlib.import_module(name), source)
    ]


def statements_of(module: ModuleType, source: str) -> Iterator[Statement]:
    """What a module sends. Raises `LookupError` for a statement that can't be told from the source alone."""
    place = module.__name__.removeprefix("indexer.store.")
    for call, function in _calls(ast.parse(source), None):
        values = {word.arg: _value(word.value, function, module) for word in call.keywords if word.arg in COPY}
        value = _value(call.args[0], function, module)
        if values:
            value = f"copy {values['schema_name']}.{value} ({', '.join(values['columns'])}) from stdin"
        if isinstance(value, TextClause):
            value = str(value.compile(dialect=PGDialect_asyncpg()))  # type: ignore[no-untyped-call]
        if isinstance(value, str):  # and not the number of rows to be had of a cursor
            constant = call.args[0].id if isinstance(call.args[0], ast.Name) else None
            yield Statement(f"{place}.{constant if constant in vars(module) else function.name}", value)


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
    """Names that mean something else in the function than in its module."""
    return _names(function.body) | {name.arg for name in ast.walk(function.args) if isinstance(name, ast.arg)}


def _names(steps: Iterable[ast.AST]) -> set[str]:
    """Those that are given a value."""
    inner = (name for step in steps for name in ast.walk(step))
    return {name.id for name in inner if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)}


_WITHIN = """
    select 'view ' || oid::regclass, null, pg_get_viewdef(oid) from pg_class
    where relkind in ('v', 'm') and relnamespace in ('indexer'::regnamespace, 'atproto'::regnamespace)
    union all
    select 'function ' || oid::regproc, pg_get_functiondef(oid), pg_get_function_sqlbody(oid) from pg_proc
    where pronamespace in ('indexer'::regnamespace, 'atproto'::regnamespace)
"""


async def within(sql: asyncpg.Connection) -> list[Statement]:
    """What the functions and views of the schema run."""
    return [
        Statement(name, body)
        for name, definition, own in await sql.fetch(_WITHIN)
        for body in ([_sql(own)] if own else _plpgsql(definition))
    ]


def _sql(body: str) -> str:
    if body.startswith("RETURN "):
        return f"select {body.removeprefix('RETURN ')}"
    return body.removeprefix("BEGIN ATOMIC").removesuffix("END")


def _plpgsql(definition: str) -> Iterator[str]:
    """The parser knows no row types of ours. Raises `LookupError` for what is put together at run time."""
    body = pgparse.parse_pgsql(re.sub(r"(?m)^(\s*\w+) indexer\.\w+;$", r"\1 record;", definition))
    if any(nodes(body, "PLpgSQL_stmt_dynexecute")):
        raise LookupError(definition)
    for expression in nodes(body, "PLpgSQL_expr"):
        query = expression["query"]
        yield query if expression["parseMode"] == 0 else f"select {query.rpartition(':=')[2]}"
