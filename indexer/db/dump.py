"""Dump the database to a file, and restore it, with the programs of Postgres that the embedded server comes with."""

import asyncio
import os
import re
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Callable
from pathlib import Path
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

import asyncpg

from indexer.db.database_errors import connect, database_errors, opening, unusable, without_password
from indexer.db.requirements import PUBLIC_ROLES
from indexer.embedded.cluster import find_binaries
from indexer.errors import SettingsError, UnavailableError
from indexer.reasons import FetchFailure
from indexer.redaction import without_secrets

SCHEMAS = ("indexer", "atproto", "lexicon")
POLL_SECONDS = 0.5
MAX_ERROR_CHARACTERS = 1_000
TRANSACTION_TIMEOUT = 17
"""The first version of Postgres with the setting `transaction_timeout`, which its pg_restore changes."""

CLUSTER_OPTIONS = "-c citus.override_table_visibility=on -c citus.enable_ddl_propagation=off"
"""Session settings for a database with Citus: a dump contains tables, and no shards of them. A restore creates
everything on the coordinator; `indexer distribute` creates what the other nodes need."""

_HAS_CITUS = "select exists (select from pg_extension where extname = 'citus')"
_EXISTING = "select nspname from pg_namespace where nspname = any($1::text[]) order by nspname"
_ROLES = "select rolname from pg_roles"


async def dump(dsn: str, file: Path, on_bytes: Callable[[int], None]) -> int:
    """Write the schemas, as of one point in time, to a file in the custom format of pg_dump; return its size.

    The file appears when it is complete. `on_bytes` is called twice a second with the size so far.

    Raises:
        UnavailableError: pg_dump failed.
        SettingsError: There are no binaries of Postgres.
        OSError: The file cannot be written.
    """
    part = file.with_name(f".{file.name}.{os.getpid()}.part")
    schemas = [f"--schema={schema}" for schema in SCHEMAS]
    with opening(dsn):
        connection = await connect(dsn)
    try:
        with database_errors():
            address = await _address(connection, dsn)
    finally:
        await connection.close()
    try:
        part.touch(mode=0o600, exist_ok=False)
        options = ["--format=custom", f"--file={part}", *schemas]
        await _run("pg_dump", address, options, _password(dsn), lambda: on_bytes(_size(part)))
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)
    return _size(file)


async def restore(dsn: str, file: Path, on_poll: Callable[[], None]) -> None:
    """Restore a dump into a database without these schemas, in one transaction. Objects belong to the present role.

    The dump of a cluster has to be distributed again before a daemon can use it (`placement.require_complete`).

    Raises:
        SettingsError: The database has one of the schemas, a role is missing, or there are no binaries of Postgres.
        UnavailableError: The database does not answer, or pg_restore failed.
    """
    with opening(dsn):
        connection = await connect(dsn)
    try:
        with database_errors():
            if existing := await connection.fetch(_EXISTING, SCHEMAS):
                names = ", ".join(row["nspname"] for row in existing)
                raise unusable(dsn, f"it already has the schema {names}; restore into an empty database")
            await _require_older_program(connection.get_server_version().major, dsn)
            await _create_roles(connection, dsn)
            options = ["--single-transaction", "--no-owner", str(file)]
            await _run("pg_restore", await _address(connection, dsn), options, _password(dsn), on_poll)
            await connection.execute("analyze")
    finally:
        await connection.close()


async def _require_older_program(server: int, dsn: str) -> None:
    """Raise `SettingsError` if pg_restore changes a setting that this version of the server does not know."""
    if server >= TRANSACTION_TIMEOUT:
        return
    child = await asyncio.create_subprocess_exec(_program("pg_restore"), "--version", stdin=DEVNULL, stdout=PIPE)
    answer, _ = await child.communicate()
    if (found := re.search(rb"[0-9]+", answer)) and (program := int(found[0])) >= TRANSACTION_TIMEOUT:
        reason = (
            f"the server is Postgres {server}, and pg_restore {program} cannot restore into it; set INDEXER_PG_BINDIR "
            f"to the programs of Postgres {server}, for `indexer backup`, too"
        )
        raise unusable(dsn, reason)


async def _create_roles(connection: asyncpg.Connection, dsn: str) -> None:
    """Create the roles to which the dump grants access to the public schema, unless they exist."""
    existing = {row["rolname"] for row in await connection.fetch(_ROLES)}
    for role in sorted(PUBLIC_ROLES - existing):
        try:
            await connection.execute(f"create role {role} nologin")
        except asyncpg.DuplicateObjectError:
            continue  # another process has created it
        except asyncpg.InsufficientPrivilegeError:
            raise unusable(dsn, f"let an administrator run: create role {role} nologin") from None


async def _address(connection: asyncpg.Connection, dsn: str) -> str:
    """Return the URL without the password, and with the settings that the sessions of the programs need with Citus.

    They come after those of the URL or of PGOPTIONS, which counts only if the URL has none. In the values of
    parameters, the programs of Postgres accept neither + for a space nor an equals sign.
    """
    base, _, query = without_password(dsn).partition("?")
    parameters = dict(parse_qsl(query))
    if await connection.fetchval(_HAS_CITUS):
        options = parameters.get("options", os.environ.get("PGOPTIONS", ""))
        parameters["options"] = f"{options} {CLUSTER_OPTIONS}"
    return f"{base}?{urlencode(parameters, quote_via=quote)}"


async def _run(
    program: str, address: str, options: list[str], password: dict[str, str], on_poll: Callable[[], None]
) -> None:
    """Run a program of Postgres on the database. The password is not among its arguments, which others could see."""
    child = await asyncio.create_subprocess_exec(
        _program(program),
        f"--dbname={address}",
        *options,
        stdin=DEVNULL,
        stdout=DEVNULL,
        stderr=PIPE,
        env=os.environ | password,
    )
    output = asyncio.create_task(child.communicate())
    try:
        while not (await asyncio.wait([output], timeout=POLL_SECONDS))[0]:
            on_poll()
        _, errors = output.result()
    finally:
        if child.returncode is None:
            child.kill()
        await asyncio.gather(output, return_exceptions=True)
    if child.returncode:
        message = without_secrets(" ".join(errors.decode(errors="replace").split()))[-MAX_ERROR_CHARACTERS:]
        raise UnavailableError(FetchFailure.UNREACHABLE, f"{program}: {message}")


def _program(name: str) -> Path:
    path = find_binaries() / name
    if not path.exists():
        raise SettingsError(f"{path} does not exist; install the client programs of Postgres, or set INDEXER_PG_BINDIR")
    return path


def _password(dsn: str) -> dict[str, str]:
    parts = urlsplit(dsn)
    password = unquote(parts.password or "") or dict(parse_qsl(parts.query)).get("password")
    return {} if password is None else {"PGPASSWORD": password}


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0
