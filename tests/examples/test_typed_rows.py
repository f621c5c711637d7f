"""The types that `indexer lexicon types` prints fit rows of the views; so do the recipes of docs/sql.md."""

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, get_type_hints

import asyncpg
import pytest
from pydantic import TypeAdapter

from docs.generate import PROJECT
from indexer.db import Database
from indexer.embedded.cluster import find_binaries
from tests.cli.command_line import Session
from tests.cli.conftest import session, session_without_database
from tests.db.repo_rows import insert, put, synchronized
from tests.examples.test_public_schema_types import connection_options, values_of
from tests.feed_clients.node_process import HERE as NPM_DIRECTORY
from tests.feed_clients.node_process import needs_clients, node_process
from tests.lexicons.samples import (
    DEFS_DOCUMENT,
    LIKE,
    LIKE_DOCUMENT,
    REVIEW,
    REVIEW_DOCUMENT,
    REVIEW_VALUE,
    copy_of,
    properties_of,
    sourced,
)
from tests.realnet.real_network import NODE
from tests.waiting import until

pytestmark = pytest.mark.slow

__all__ = ["session", "session_without_database"]

TEXT, NUMBER, JSON = ("str | None", "string | null"), ("int | None", "Int8 | null"), ("Any", "Json")
TIME, KEY = ("datetime | None", "Date | null"), ("str", "string")
COLUMNS = {
    **dict.fromkeys(("did", "rkey", "uri", "cid", "rev"), KEY),
    "indexed_at": ("datetime", "Date"),
    "lexicon_problem": TEXT,
    "bucket": ("int", "number"),
    "first_seen": ("datetime", "Date"),
    "first_seen_live": ("bool | None", "boolean | null"),
    "sort_at": ("datetime", "Date"),
    "title": TEXT,
    "stars": NUMBER,
    "public": ("bool | None", "boolean | null"),
    "created_at": TIME,
    "tags": ("list[str | None] | None", "(string | null)[] | null"),
    "scores": JSON,
    "place": JSON,
    "details": JSON,
    "kind": TEXT,
    "mystery": JSON,
    "subject_uri": TEXT,
    "subject_cid": TEXT,
    "photo_cid": TEXT,
    "photo_mime_type": TEXT,
    "photo_size": NUMBER,
    "previous": TEXT,
    "secret": JSON,
    **dict.fromkeys(("note", "uri_2", "foo_bar", "foo_bar_2", "a_b_", "type", "list", "from", "2fa", "text"), TEXT),
}
"""The types of the columns of the view of reviews in Python and in TypeScript."""
DESCRIPTIONS = {
    "type": "ignore",
    "list": '*/ """ \\',
    "from": "two\nlines\u2028or three",
    "2fa": "\x1b",
    "text": "x " * 100 + "*/",
}
"""Fields whose names and descriptions would break code or the types of other columns."""

COLUMN_OF_AN_EARLIER_RELEASE = f"""
    update indexer.lexicon set fields = replace(fields::text, '"created_at"', '"bucket"')::jsonb
    where nsid = '{REVIEW}.a';
    select indexer.create_lexicon_view('{REVIEW}.a')
"""  # noqa: S608


@pytest.fixture
async def reviews(db: Database, sql: asyncpg.Connection) -> None:
    """Create the view of reviews with hostile fields, and rows of all kinds of values; one record type has its name."""
    document = copy_of(REVIEW_DOCUMENT)
    document["defs"]["main"]["description"] = '*/ """ \\'
    for name, description in DESCRIPTIONS.items():
        properties_of(document)[name] = {"type": "string", "description": description}
    other = copy_of(LIKE_DOCUMENT) | {"id": "com.example-review.a"}, copy_of(LIKE_DOCUMENT) | {"id": REVIEW + ".a"}
    await db.lexicons.add(sourced(document, DEFS_DOCUMENT, *other))
    long = {"tags": ["a", "x" * 11], "stars": 2**62}
    await sql.execute(COLUMN_OF_AN_EARLIER_RELEASE)
    wrong = {name: [1] for name in REVIEW_VALUE}
    values: tuple[dict[str, Any], ...] = (REVIEW_VALUE, {}, REVIEW_VALUE | long, wrong, REVIEW_VALUE | DESCRIPTIONS)
    changes = [put(f"{REVIEW}/{number}", json.dumps(value)) for number, value in enumerate(values)]
    await insert(db, synchronized(1), changes=tuple(changes))


async def write_types(session: Session, language: str, path: Path, *nsids: str) -> str:
    """Write and return the module that the command prints."""
    result = await session.run("lexicon", "types", f"--{language}", *nsids)
    assert (result.returncode, result.stderr) == (0, "")
    path.write_text(result.stdout)
    return result.stdout


def check_python(directory: Path, *files: str) -> None:
    """Assert that mypy accepts the files."""
    cache = directory.parent / "mypy"  # of all tests of this process
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", f"--cache-dir={cache}", *files]
    result = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, ""), result.stdout


def check_typescript(directory: Path, *files: str) -> None:
    """Assert that the compiler accepts the files, which may then run in this directory."""
    (directory / "node_modules").symlink_to(NPM_DIRECTORY / "node_modules")
    (directory / "package.json").write_text('{"type": "module"}')
    options = {"extends": str(NPM_DIRECTORY / "tsconfig.json"), "files": files}
    (directory / "tsconfig.json").write_text(json.dumps(options))
    compiler = NPM_DIRECTORY / "node_modules" / "typescript" / "bin" / "tsc"
    result = subprocess.run([NODE, compiler, "--project", directory], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, "")


PYTHON_USE = """\
from datetime import datetime
from typing import Any, assert_type
from rows import ComExampleReview, ComExampleReviewA_
def use(row: ComExampleReview, other: ComExampleReviewA_) -> None:
    print(row["stars"] + 1)  # type: ignore[operator]
    print(row["title"].upper())  # type: ignore[union-attr]
    print(row["nothing"])  # type: ignore[typeddict-item]
    assert_type(other["bucket"], datetime | None)
"""


@pytest.mark.usefixtures("reviews")
async def test_python_types_are_those_of_the_rows(session: Session, sql: asyncpg.Connection, tmp_path: Path) -> None:
    """Mypy refuses wrong uses: with --strict, it reports each comment that it does not need."""
    module = await write_types(session, "python", tmp_path / "rows.py")
    checks = "".join(f'    assert_type(row["{name}"], {python})\n' for name, (python, _) in COLUMNS.items())
    (tmp_path / "use.py").write_text(PYTHON_USE + checks)
    check_python(tmp_path, "use.py")
    names: dict[str, Any] = {}
    exec(module, names)  # noqa: S102 - it is what the command has printed
    assert "#: from: two lines or three\n" in module
    assert "\x1b" not in module
    hints = get_type_hints(names["ComExampleReview"])
    rows = await sql.fetch(f'select * from lexicon."{REVIEW}"')  # noqa: S608
    assert len(rows) == 5
    for row in rows:
        assert list(row.keys()) == list(hints)
        for name, value in row.items():
            TypeAdapter(hints[name]).validate_python(value, strict=True)


TYPESCRIPT_USE = """\
import type { ComExampleReview as Row, Int8, Json } from './rows.ts'
type Equal<A, B> = (<T>() => T extends A ? 1 : 2) extends <T>() => T extends B ? 1 : 2 ? true : false
export function mistakes(row: Row): unknown[] {
  return [
    // @ts-expect-error the title may be null
    row.title.length,
    // @ts-expect-error a bigint is text
    row.stars! - 1,
    // @ts-expect-error there is no such column
    row.nothing,
  ]
}
"""


@pytest.mark.proof("clients")
@needs_clients
@pytest.mark.usefixtures("reviews")
async def test_typescript_types_are_those_of_the_rows(session: Session, database: str, tmp_path: Path) -> None:
    """The compiler refuses wrong uses: it reports each comment that it does not need."""
    module = await write_types(session, "typescript", tmp_path / "rows.ts")
    assert "\x1b" not in module
    checks = (f"true satisfies Equal<Row['{name}'], {type_}>\n" for name, (_, type_) in COLUMNS.items())
    keys = " | ".join(f"'{name}'" for name in COLUMNS)
    use = f"{TYPESCRIPT_USE}true satisfies Equal<keyof Row, {keys}>\n{''.join(checks)}"
    (tmp_path / "use.ts").write_text(use)
    check_typescript(tmp_path, "use.ts", "rows.ts")
    view = f'lexicon."{REVIEW}"'
    async with node_process("public_schema.ts", json.dumps(connection_options(database)), view) as client:
        await until(lambda: bool(client.lines))
    rows = client.lines[0]["types"][view]
    assert len(rows) == 5
    for row in rows:
        assert row.keys() == COLUMNS.keys()
        for name, type_ in row.items():
            assert type_ in values_of(COLUMNS[name][1]), name


@pytest.mark.usefixtures("reviews")
async def test_only_chosen_types_are_printed_with_the_names_that_they_have_among_all(
    session: Session, tmp_path: Path
) -> None:
    module = await write_types(session, "python", tmp_path / "rows.py", f"{REVIEW}.a")
    assert re.findall(r"(?m)^(\w+) = ", module) == ["ComExampleReviewA_"]
    for arguments, code, message in (
        (("--python", REVIEW, LIKE), 4, f"the lexicon of {LIKE} was not added, or has no view; see "),
        ((REVIEW,), 2, "Give --python or --typescript"),
    ):
        result = await session.run("lexicon", "types", *arguments)
        assert (result.returncode, result.stdout) == (code, "")
        assert message in result.stderr


# The recipes.

LIKES = 60


def recipe(language: str) -> str:
    """Return the program of docs/sql.md#typed-rows-live in a language. It waits for notifications, or reads often."""
    section = (PROJECT / "docs" / "sql.md").read_text().partition("### Typed rows, live")[2].partition("\n## ")[0]
    [program] = re.findall(rf"(?s)```{language}\n(.*?)```", section)
    assert isinstance(program, str)
    assert len([line for line in program.splitlines() if line]) <= 20
    for old, new in (("later(5, ", "later(500, "), ("5_000", "500_000"), ("watch 1", "watch 0.001")):
        program = program.replace(old, new)
    return program


@asynccontextmanager
async def running(database: str, output: Path, *command: str | Path) -> AsyncIterator[None]:
    """Run a program during the block, as a client of the database; kill it at the end."""
    names = {"user": "PGUSER", "database": "PGDATABASE", "host": "PGHOST", "port": "PGPORT"}
    options = {names[name]: str(value) for name, value in connection_options(database).items()}
    environment = os.environ | options | {"PYTHONUNBUFFERED": "1"}
    with output.open("ab") as file:
        process = await asyncio.create_subprocess_exec(
            *command, cwd=output.parent, env=environment, stdout=file, stderr=file
        )
    try:
        yield
    finally:
        process.kill()
        await process.wait()


async def follow(db: Database, sql: asyncpg.Connection, database: str, output: Path, *command: str | Path) -> None:
    """Run a recipe, and kill and start it again; assert that it prints each like, and each only once.

    Most come while it reads: no statement may advance the position beyond what it shows.
    """
    await sql.execute("select atproto.register_reader('likes')")

    async def like(number: int) -> None:
        value = {"$type": LIKE, "createdAt": "2026-01-02T03:04:05Z", "subject": {"uri": f"at://{number}", "cid": "c"}}
        other = put("com.example.other/a")
        await insert(db, synchronized(number), changes=(put(f"{LIKE}/a", json.dumps(value)), other))

    async def wait_for(number: int) -> None:
        async def committed() -> bool:
            behind = await sql.fetchval("select behind from atproto.readers where name = 'likes'")
            return behind == 0 and f"at://{number} " in output.read_text()

        await until(committed, output.read_text)

    for first in (1, LIKES + 1):
        await like(first)
        async with running(database, output, *command):
            await wait_for(first)
            for number in range(first + 1, first + LIKES):
                await like(number)
            await wait_for(first + LIKES - 1)
    printed = output.read_text()
    assert re.findall("None|null", printed) == []
    assert re.findall(r"at://(\d+)", printed) == [str(number) for number in range(1, 2 * LIKES + 1)]
    assert len(re.findall(r"did:.*2026-01-02.03:04:05", printed)) == len(re.findall("did:", printed)) == 2 * LIKES


@pytest.fixture
async def likes(db: Database) -> None:
    await db.lexicons.add(sourced(LIKE_DOCUMENT))


@pytest.mark.usefixtures("likes")
async def test_recipe_in_sql_prints_typed_rows_live(
    db: Database, sql: asyncpg.Connection, database: str, tmp_path: Path
) -> None:
    (tmp_path / "recipe.sql").write_text(recipe("sql"))
    psql = find_binaries() / "psql"
    await follow(db, sql, database, tmp_path / "output", psql, "--no-psqlrc", "--file=recipe.sql")


@pytest.mark.usefixtures("likes")
async def test_recipe_in_python_prints_typed_rows_live(
    db: Database, sql: asyncpg.Connection, session: Session, database: str, tmp_path: Path
) -> None:
    await write_types(session, "python", tmp_path / "rows.py", LIKE)
    (tmp_path / "recipe.py").write_text(recipe("python"))
    check_python(tmp_path, "recipe.py")
    await follow(db, sql, database, tmp_path / "output", sys.executable, "recipe.py")


@pytest.mark.proof("clients")
@needs_clients
@pytest.mark.usefixtures("likes")
async def test_recipe_in_typescript_prints_typed_rows_live(
    db: Database, sql: asyncpg.Connection, session: Session, database: str, tmp_path: Path
) -> None:
    await write_types(session, "typescript", tmp_path / "rows.ts", LIKE)
    (tmp_path / "recipe.ts").write_text(recipe("typescript"))
    check_typescript(tmp_path, "recipe.ts", "rows.ts")
    await follow(db, sql, database, tmp_path / "output", NODE, "recipe.ts")
