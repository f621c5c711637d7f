"""Values of records and lexicons in a real Postgres: what the program would store is accepted, and read back equal."""

import json
from base64 import b32encode, b64encode
from contextlib import ExitStack
from decimal import Decimal
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import asyncpg

from indexer.atproto.cbor import encode
from indexer.atproto.cid import cid_of
from indexer.atproto.lexicon import Lexicon, parse_lexicon
from indexer.atproto.limits import DEFAULT_LIMITS
from indexer.atproto.links import links_of
from indexer.atproto.record import Problem, decode_record
from indexer.db import Database
from indexer.sync.changes import Batch, RecordChange, RecordConverter, RepoWrite
from indexer.sync.policy import Policy
from indexer.sync.repo import Repo
from indexer.sync.scope import Scope
from indexer.sync.verify import VerifiedChange
from tests.atproto.dag_cbor_oracle import Cid, canonical_value
from tests.atproto.dag_cbor_oracle import encode as reference_encode
from tests.database_server import DatabaseServer, memory_directory
from tests.db.link_steps import settle, turn_on
from tests.db.repo_rows import head, synchronized
from tests.fuzz.comparison import DifferenceError
from tests.fuzz.fuzz_target import FuzzTarget, MutateBytes, canonical
from tests.fuzz.json_mutation import mutate_json
from tests.fuzz.outcome_counts import OutcomeCounts
from tests.fuzz.seed_files import seed_files
from tests.fuzz.seeds import LINK, random_record, random_value
from tests.lexicons.samples import DEFS_DOCUMENT, LIKE_DOCUMENT, QUERY_DOCUMENT, REVIEW_DOCUMENT, REVIEW_VALUE

COLLECTION = "com.example.record"
POLICY = Policy(Scope(), DEFAULT_LIMITS)
STATEMENT_SECONDS = 10.0
"""Time limit of the server for a statement. One of an input takes milliseconds; a busy machine may be much slower."""
SAME_VALUE = frozenset({None, Problem.NOT_A_MAP, Problem.NO_TYPE, Problem.OTHER_TYPE})
"""Problems with which the value is that of the whole record."""


class FuzzDatabase:
    """A database on a server of its own, which ends with the process. A statement that takes too long is an error."""

    def __init__(self) -> None:
        self._directories = ExitStack()
        directory = self._directories.enter_context(memory_directory())
        if directory is None:
            directory = Path(self._directories.enter_context(TemporaryDirectory(prefix="indexer-fuzz-")))
        self._server = DatabaseServer(directory)
        dsn = self._server.create(migrated=True)
        self.run = self._server.run
        self.run(_limit_statements(dsn))
        self.db = self.run(Database.open(dsn, connections=2))
        self.connection: asyncpg.Connection = self.run(asyncpg.connect(dsn))

    def close(self) -> None:
        """Stop the server."""
        self.run(self.connection.close())
        self.run(self.db.close())
        self._server.close()
        self._directories.close()


async def _limit_statements(dsn: str) -> None:
    """Set the time limit of all later sessions of the database."""
    connection = await asyncpg.connect(dsn)
    name = await connection.fetchval("select quote_ident(current_database())")
    await connection.execute(f"alter database {name} set statement_timeout = '{STATEMENT_SECONDS}s'")
    await connection.close()


class Records(FuzzTarget):
    """Records of any bytes: the database takes what is to be stored of them, and gives it back.

    A value whose problem says that it is complete equals the record, as an obvious decoder reads it.
    """

    def __init__(self) -> None:
        self._database = FuzzDatabase()
        self._database.run(turn_on(self._database.db))
        self._repo = synchronized("records", version=0)
        self.counts = OutcomeCounts("stored whole", "with a problem", "with links")

    def close(self) -> None:
        """Stop the server."""
        self._database.close()

    def seeds(self, random: Random, count: int) -> list[bytes]:
        """Return records with links and with all kinds of values, and published DAG-CBOR."""
        linking = [
            {
                "subject": {"uri": f"at://{self._repo.did}/a.b.c/self", "cid": "x"},
                "ref": self._repo.did,
                "n": [n, Cid(LINK)],
            }
            for n in (0, -1, 2**63)
        ]
        published = list(seed_files("cbor/**/*.dag-cbor"))
        made = [reference_encode({"$type": COLLECTION} | value) for value in linking] + published
        return made[:count] + [random_record(random) for _ in range(count - len(made))]

    def mutate(self, data: bytes, random: Random, mutate_bytes: MutateBytes) -> bytes:
        """Return mutated bytes, or a record with another value in it."""
        value = canonical(data)
        if not isinstance(value, dict) or random.random() < 0.4:
            return mutate_bytes(data)
        key = random.choice([*value, "$type", "$link", "uri", "\0", "é" * 40])
        texts = (f"at://{self._repo.did}/a.b.c/{'r' * random.randrange(600)}", "did:web:" + "é" * random.randrange(400))
        other = random.choice((*value.values(), random_value(random, 3), *texts, [value], {key: value}, 1.5e-300))
        try:
            return reference_encode(value | {key: other})
        except (TypeError, ValueError, RecursionError):
            return mutate_bytes(data)

    def compare(self, data: bytes) -> None:
        """Store a record. Raises `DifferenceError`."""
        self.counts.executions += 1
        converter = RecordConverter(POLICY, self._repo.did, head().rev, len(data))
        change = converter.convert(VerifiedChange(f"{COLLECTION}/self".encode(), None, cid_of(data), data))
        assert change is not None
        self._database.run(self._db(change))
        self._database.run(settle(self._database.db))
        complete = change.problem in SAME_VALUE
        expected, found = _loads(change.value), self._database.run(self._load())
        if found != (expected, change.original):
            raise DifferenceError(f"stored: {change}\nread back: {found}")
        if complete and expected != _json_of(canonical_value(data)):
            raise DifferenceError(f"the value is not that of the record: {change.value}")
        self.counts.add("stored whole" if complete else "with a problem")
        self.counts.add("with links", bool(links_of(change.value)))

    async def _db(self, change: RecordChange) -> None:
        repo = self._repo._replace(version=self._repo.version + 1)
        skipped = (await self._database.db.write(Batch((RepoWrite(self._repo, repo, (change,)),)))).skipped
        assert not skipped
        self._repo = repo

    async def _load(self) -> tuple[Any, bytes | None]:
        """Return the stored value, and the bytes of the record."""
        row = await self._database.connection.fetchrow(
            "select value::text, atproto.record_bytes(did, collection, rkey) from atproto.records"
        )
        assert row is not None
        return _loads(row[0]), row[1]


class Lexicons(FuzzTarget):
    """Lexicons, each in a list before values of records: one is refused, or it has a view that shows all values."""

    def __init__(self) -> None:
        self._database = FuzzDatabase()
        self.counts = OutcomeCounts("refused", "without a view", "views", "values shown")

    def close(self) -> None:
        """Stop the server."""
        self._database.close()

    def seeds(self, random: Random, count: int) -> list[bytes]:
        """Return lexicons by hand and published ones, with values."""
        documents = [REVIEW_DOCUMENT, LIKE_DOCUMENT, DEFS_DOCUMENT, QUERY_DOCUMENT]
        documents += map(json.loads, seed_files("atproto-interop-tests/lexicon/catalog/*.json"))
        values = [REVIEW_VALUE, dict.fromkeys(REVIEW_VALUE), {"subject": {"uri": "at://a", "cid": 1}}, []]
        for text in seed_files("atproto-interop-tests/lexicon/record-data-*.json"):
            values += [case["data"] for case in json.loads(text)]
        return [json.dumps([documents[n % len(documents)], *random.sample(values, 2)]).encode() for n in range(count)]

    def mutate(self, data: bytes, random: Random, mutate_bytes: MutateBytes) -> bytes:
        """Return mutated JSON."""
        return mutate_json(data, random, mutate_bytes)

    def compare(self, data: bytes) -> None:
        """Read a lexicon; if it is one, create its view, and read the view. Raises `DifferenceError`."""
        self.counts.executions += 1
        try:
            parts = json.loads(data)
            lexicon = parse_lexicon(parts[0] if isinstance(parts, list) and parts else parts)
        except (ValueError, RecursionError):  # JSON is read by a library
            self.counts.add("refused")
            return
        if lexicon.record is None:
            self.counts.add("without a view")
            return
        values = [text for part in parts[1:4] if (text := _stored_value(part, lexicon.nsid)) is not None]
        self._database.run(self._show(lexicon, values))
        self.counts.add("views")
        self.counts.add("values shown", len(values))

    async def _show(self, lexicon: Lexicon, values: list[str]) -> None:
        """Store records of the lexicon, and read all of them from its view."""
        db, connection = self._database.db, self._database.connection
        changes = [
            RecordChange("create", lexicon.nsid, f"{number}", head().rev, cid_of(value.encode()), value)
            for number, value in enumerate(values)
        ]
        repo = synchronized(lexicon.nsid)
        assert not (await db.write(Batch((RepoWrite(Repo(repo.did), repo, tuple(changes)),)))).skipped
        [added] = await db.lexicons.add({lexicon.nsid: (lexicon, "fuzz")})
        stored = (await db.lexicons.load())[lexicon.nsid].lexicon
        rows = await connection.fetch(f'select * from lexicon."{added.view}"')  # noqa: S608
        await db.lexicons.remove([lexicon.nsid])
        await connection.execute("delete from indexer.record")
        await connection.execute("delete from indexer.repo")
        if len(rows) != len(values) or (stored.nsid, stored.record) != (lexicon.nsid, lexicon.record):
            raise DifferenceError(f"{len(rows)} rows of {len(values)}, or another lexicon: {stored}")


def _stored_value(value: Any, collection: str) -> str | None:
    """Return the JSON that is stored for a record; None if there is none."""
    try:
        block = encode(value)
    except (TypeError, ValueError, RecursionError, OverflowError):  # a value that no record can have
        return None
    return decode_record(block, collection, DEFAULT_LIMITS).json


def _loads(text: str | None) -> Any:
    """Return the value of JSON, with exact numbers: jsonb may write a number in another form."""
    return None if text is None else json.loads(text, parse_float=Decimal, parse_int=Decimal)


def _json_of(value: Any) -> Any:
    """Return the AT Protocol JSON of a record, as `_loads` returns it."""
    match value:
        case dict():
            return {key: _json_of(inner) for key, inner in value.items()}
        case list():
            return [_json_of(inner) for inner in value]
        case Cid():
            return {"$link": "b" + b32encode(value.data).decode().rstrip("=").lower()}
        case bytes():
            return {"$bytes": b64encode(value).decode().rstrip("=")}
        case bool() | None | str():
            return value
        case _:
            return Decimal(value)
