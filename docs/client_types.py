"""Generate SQLAlchemy models and TypeScript types of the public schema from the catalog of a migrated database.

`make docs` writes them to examples/public_schema/.
"""

import re
from collections.abc import Sequence

import asyncpg

from indexer.cli.client_types import TYPESCRIPT_HEAD, interface, python_type, typescript_type, wrapped
from indexer.db.view_columns import ViewColumn, load_view_columns

KEYS = {
    "repos": "did",
    "records": "did collection rkey",
    "blobs": "did collection rkey cid",
    "links": "target did collection rkey path",
    "link_progress": "state",
    "changes": "seq",
    "readers": "name",
    "cursors": "relay shard",
    "gaps": "relay shard opened_at",
    "hosts": "host",
    "relay_hosts": "relay host",
    "rejected": "id",
    "scope_progress": "collection",
}
"""The columns that identify a row of each view. SQLAlchemy needs them, and Postgres knows no keys of views."""
CLASSES = {"rejected": "RejectedMessage", "link_progress": "LinkProgress", "scope_progress": "ScopeProgress"}
"""Names of classes, if they are not the name of the view without its last letter."""
SQLALCHEMY_TYPES = {
    "bigint": "BigInteger",
    "boolean": "Boolean",
    "integer": "Integer",
    "jsonb": "JSONB",
    "smallint": "SmallInteger",
    "text": "Text",
    "timestamp with time zone": "DateTime(timezone=True)",
}

_MODELS_HEAD = '''\
"""SQLAlchemy models of the public views of the indexer (schema `atproto`). Generated from the database: do not edit.

Copy this file into your project. The views are read-only.
"""

from datetime import datetime
from typing import Any

from sqlalchemy import BigInteger, Boolean, DateTime, Integer, MetaData, SmallInteger, Text
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column


class PublicView(DeclarativeBase):
    """Base class of all views."""

    metadata = MetaData(schema="atproto")
'''
_TYPES_HEAD = f"""\
// TypeScript types of the public views of the indexer (schema `atproto`). Generated from the database: do not edit.
// Copy this file into your project. The types are those of the values that node-postgres returns.

{TYPESCRIPT_HEAD}
/** A time that may be infinity, which node-postgres returns as the number Infinity. */
export type DateOrInfinity = Date | number;
"""


class PublicColumn(ViewColumn):
    """A column of a public view."""

    @property
    def nullable(self) -> bool:
        """Return True if the column may be null: a column may be null only if its comment says so (docs/sql.md)."""
        return self._comment_has("null")

    @property
    def infinite(self) -> bool:
        """Return True if the time may be infinity: the comment says so."""
        return self._comment_has("infinity")

    def _comment_has(self, word: str) -> bool:
        return re.search(rf"\b{word}\b", self.comment, re.IGNORECASE) is not None


async def load_public_columns(connection: asyncpg.Connection) -> list[PublicColumn]:
    """Return the columns of all public views, by view in the order of their names."""
    return [PublicColumn(*column) for column in await load_view_columns(connection, "atproto")]


def sqlalchemy_models(columns: Sequence[PublicColumn]) -> str:
    """Return a Python module with a class for each view."""
    return _MODELS_HEAD + "".join(map(_model, _by_view(columns)))


def typescript_types(columns: Sequence[PublicColumn]) -> str:
    """Return a TypeScript module with an interface for each view, and one that names all views."""
    views = _by_view(columns)
    names = "".join(f'  "atproto.{view[0].view}": {class_of(view[0].view)};\n' for view in views)
    interfaces = "".join(map(_interface, views))
    index = f"/** All views by name, for example for Kysely. */\nexport interface Views {{\n{names}}}\n"
    return f"{_TYPES_HEAD}{interfaces}\n{index}"


def class_of(view: str) -> str:
    """Return the name of the class or interface of a view, in the singular."""
    return CLASSES.get(view) or view.removesuffix("s").title().replace("_", "")


def _by_view(columns: Sequence[PublicColumn]) -> list[list[PublicColumn]]:
    views: dict[str, list[PublicColumn]] = {}
    for column in columns:
        views.setdefault(column.view, []).append(column)
    return list(views.values())


def _model(view: Sequence[PublicColumn]) -> str:
    first, keys = view[0], KEYS[view[0].view].split()
    lines = [f"\n\nclass {class_of(first.view)}(PublicView):\n    {_docstring(first.view_comment)}\n\n"]
    lines.append(f'    __tablename__ = "{first.view}"\n\n')
    for column in view:
        python, sql = python_type(column.type, nullable=column.nullable), SQLALCHEMY_TYPES[column.type]
        key = ", primary_key=True" if column.name in keys else ""
        lines.append(f"    {column.name}: Mapped[{python}] = mapped_column({sql}{key})\n")
        lines.append(f'    """{wrapped(column.comment, "    ")}"""\n')
    return "".join(lines)


def _docstring(text: str) -> str:
    """Return the docstring of a class: the first sentence in its own paragraph."""
    first, end, rest = text.partition(". ")
    return f'"""{first}.\n\n    {wrapped(rest, "    ")}\n    """' if end else f'"""{wrapped(text, "    ")}"""'


def _interface(view: Sequence[PublicColumn]) -> str:
    types = [typescript_type(column.type, nullable=column.nullable) for column in view]
    fields = [
        (column.name, type_.replace("Date", "DateOrInfinity") if column.infinite else type_, column.comment)
        for column, type_ in zip(view, types, strict=True)
    ]
    return interface(class_of(view[0].view), view[0].view_comment, fields)
