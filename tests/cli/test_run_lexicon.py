"""`indexer run --lexicon`, and `indexer run` without a choice of what to index."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import asyncpg
import pytest

from indexer.db.database_errors import without_password
from tests.cli.command_line import Session, error_line, run_indexer
from tests.daemon_process import Network, daemon_environment, indexer_run, log_tail
from tests.database_checks import fetch
from tests.db.change_log_helpers import connected
from tests.faulty_network import FaultyAccount, FaultyNetwork
from tests.lexicons.samples import DEFS_DOCUMENT, LIKE, LIKE_DOCUMENT, REVIEW, REVIEW_DOCUMENT
from tests.local_jetstream import LocalJetstream, local_jetstream
from tests.net.identity.name_server import NameServer
from tests.waiting import until

pytestmark = pytest.mark.slow

SCHEMA = "com.atproto.lexicon.schema"
SCOPE = "select track, collections, signal_collections from indexer.scope"
LEXICONS = "select nsid from indexer.lexicon"
NO_SERVER = "127.0.0.1:1"


@pytest.fixture
def session(session: Session, tmp_path: Path) -> Session:
    session.configure(INDEXER_DATA_DIR=str(tmp_path / "data"), INDEXER_HTTP_BIND="127.0.0.1:0")
    return session


@pytest.fixture
def like_file(tmp_path: Path) -> str:
    file = tmp_path / "like.json"
    file.write_text(json.dumps(LIKE_DOCUMENT))
    return str(file)


def fetched(dsn: str, query: str) -> list[tuple[object, ...]]:
    return [tuple(row) for row in asyncio.run(fetch(dsn, query))]


@pytest.mark.parametrize("options", [[], ["--processes", "2"]], ids=["one process", "two processes"])
def test_without_a_choice_the_choices_are_shown_and_nothing_changes(
    session: Session, empty_database: str, database: str, options: list[str]
) -> None:
    """Also if the database has a schema."""
    for url in (empty_database, database):
        session.configure(INDEXER_DATABASE_URL=url)
        result = session("run", *options)
        assert (result.returncode, result.stdout) == (2, "")
        for choice in ("indexer run --lexicon NSID ", "INDEXER_TRACK=listed ", "INDEXER_TRACK=all "):
            assert choice in result.stderr
    assert fetched(database, SCOPE) == []
    assert fetched(empty_database, "select to_regnamespace('indexer')") == [(None,)]
    result = session("scope", "show")
    assert (result.returncode, error_line(result).partition(".")[0]) == (2, "Nothing says what to index")


@pytest.mark.parametrize("options", [[], ["--processes", "2"]], ids=["one process", "two processes"])
def test_without_a_choice_no_embedded_database_is_created(
    session_without_database: Session, tmp_path: Path, options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("INDEXER_DATABASE_URL")
    session_without_database.configure(INDEXER_DATA_DIR=str(tmp_path / "data"), INDEXER_HTTP_BIND="127.0.0.1:0")
    result = session_without_database("run", *options)
    assert (result.returncode, "INDEXER_TRACK=listed " in result.stderr) == (2, True)
    assert not (tmp_path / "data").exists()


@asynccontextmanager
async def running(network: Network, dsn: str, directory: Path, *arguments: str, **settings: str) -> AsyncIterator[None]:
    """Run `indexer run` with these arguments during the block, without a setting that says what to index."""
    environment = daemon_environment(network, dsn, directory) | {"INDEXER_START": "live"}
    del environment["INDEXER_TRACK"]
    async with indexer_run(directory, environment | settings, *arguments) as process:
        yield
        process.terminate()
        assert await process.wait() == 0, log_tail(directory)


def review(account: FaultyAccount, title: str) -> None:
    account.create(REVIEW, {"$type": REVIEW, "title": title, "stars": 5, "createdAt": "2026-01-01T00:00:00Z"})


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.proof("daemon"))])
async def test_one_lexicon_leads_to_typed_rows_of_all_its_accounts(
    empty_database: str, tmp_path: Path, processes: int
) -> None:
    """By its NSID alone: found in the relay's list, followed by hints, and again after a restart without the DNS.

    Also after one without the option: the database says that its upstream is a Jetstream.
    """
    async with FaultyNetwork() as network, local_jetstream(network) as jetstream, NameServer() as dns:
        publisher, ada, bob, other = (network.create_account(f"{name}.test") for name in ("pub", "ada", "bob", "other"))
        for document in (REVIEW_DOCUMENT, DEFS_DOCUMENT):
            publisher.create(SCHEMA, {"$type": SCHEMA} | document, rkey=document["id"])
        dns.texts["_lexicon.example.com"] = [f'"did={publisher.did}"']
        review(ada, "old")
        for account in (ada, other):
            account.create(LIKE, {"$type": LIKE})
        arguments = ("--lexicon", REVIEW, "--processes", str(processes))
        settings = {"INDEXER_JETSTREAMS": jetstream.ws_url, "INDEXER_DNS_SERVERS": "{}:{}".format(*dns.address)}
        async with running(network, empty_database, tmp_path, *arguments, **settings):
            await wait_for_titles(empty_database, tmp_path, {(ada.did, "old")})
            await until(lambda: len(jetstream.queries) == processes, lambda: log_tail(tmp_path))
            review(bob, "new")
            await wait_for_titles(empty_database, tmp_path, {(ada.did, "old"), (bob.did, "new")})
        settings["INDEXER_DNS_SERVERS"] = NO_SERVER
        async with running(network, empty_database, tmp_path, *arguments, **settings):
            await until(lambda: len(jetstream.queries) == 2 * processes, lambda: log_tail(tmp_path))
            review(ada, "later")
            expected = {(ada.did, "old"), (bob.did, "new"), (ada.did, "later")}
            await wait_for_titles(empty_database, tmp_path, expected)
        async with running(network, empty_database, tmp_path, *arguments[2:], **settings):
            await until(lambda: len(jetstream.queries) == 3 * processes, lambda: log_tail(tmp_path))
            review(bob, "last")
            await wait_for_titles(empty_database, tmp_path, expected | {(bob.did, "last")})
        await check_database(empty_database, {ada.did, bob.did})
        check_connections(jetstream, network)
    log = (tmp_path / "daemon.log").read_text()
    assert f'{REVIEW}: added, view lexicon."{REVIEW}"\n' in log
    query = f'select * from lexicon."{REVIEW}" limit 10'  # noqa: S608
    assert f"Query the records: psql '{without_password(empty_database)}' -c '{query}'\n" in log
    assert "scope.settings-ignored" not in log


async def test_start_without_the_option_reads_a_jetstream_although_none_has_answered(
    database: str, tmp_path: Path
) -> None:
    document = tmp_path / "review.json"
    document.write_text(json.dumps(REVIEW_DOCUMENT))
    async with FaultyNetwork() as network, local_jetstream(network) as jetstream:
        no_jetstream = {"INDEXER_JETSTREAMS": f"ws://{NO_SERVER}"}
        async with running(network, database, tmp_path, "--lexicon", str(document), **no_jetstream):
            await until(lambda: "daemon.started" in log_tail(tmp_path), lambda: log_tail(tmp_path))
        async with running(network, database, tmp_path, INDEXER_JETSTREAMS=jetstream.ws_url):
            await until(lambda: bool(jetstream.queries), lambda: log_tail(tmp_path))
        check_connections(jetstream, network)


@pytest.mark.parametrize("processes", ["1", pytest.param("2", marks=pytest.mark.proof("daemon"))])
async def test_lexicon_does_not_move_a_database_from_its_relay_to_a_jetstream(
    database: str, tmp_path: Path, like_file: str, processes: str
) -> None:
    async with FaultyNetwork() as network, local_jetstream(network) as jetstream:
        ada = network.create_account("ada.test")
        choice = {"INDEXER_COLLECTIONS": LIKE, "INDEXER_SIGNAL_COLLECTIONS": LIKE}

        async def cursor_moved() -> bool:
            if network.relay.subscribers:
                ada.create(LIKE, {"$type": LIKE})
            rows = await fetch(database, "select seq from atproto.cursors")
            return len(rows) >= int(processes) and all(seq > last for (seq,) in rows)

        for options in ((), ("--lexicon", like_file)):
            last = network.relay.seq
            arguments = ("--processes", processes, *options)
            urls = {"INDEXER_JETSTREAMS": jetstream.ws_url}
            async with running(network, database, tmp_path, *arguments, **urls, **choice):
                await until(cursor_moved, lambda: log_tail(tmp_path))
            choice = {}
        assert not jetstream.queries


async def wait_for_titles(dsn: str, directory: Path, expected: set[tuple[str, str]]) -> None:
    found: object = None

    async def equal() -> bool:
        nonlocal found
        async with connected(dsn) as connection:
            with suppress(asyncpg.UndefinedTableError):
                query = f'select did, title from lexicon."{REVIEW}"'  # noqa: S608
                found = {tuple(row) for row in await connection.fetch(query)}
        return found == expected

    await until(equal, lambda: (found, log_tail(directory)))


async def check_database(dsn: str, dids: set[str]) -> None:
    async with connected(dsn) as connection:
        assert [tuple(row) for row in await connection.fetch(SCOPE)] == [("signal", [REVIEW], [REVIEW])]
        assert {row["did"] for row in await connection.fetch("select did from atproto.repos")} == dids
        assert await connection.fetchval("select count(*) from atproto.records where collection <> $1", REVIEW) == 0


def check_connections(jetstream: LocalJetstream, network: FaultyNetwork) -> None:
    """Check that only the Jetstream was followed, for this collection only."""
    assert {tuple(collections) for collections, _ in jetstream.queries} == {(REVIEW,)}
    assert network.relay.requests["/xrpc/com.atproto.sync.subscribeRepos"] == 0


def test_lexicon_outside_the_scope_of_a_database_is_refused_with_the_command_that_adds_it(
    session: Session, database: str, like_file: str
) -> None:
    session("scope", "set", "--collections", "com.example.*", "--signal-collections", REVIEW)
    for track, signals in (("listed", ""), ("signal", f" --signal-collections '{REVIEW},{LIKE}'")):
        session("scope", "set", "--track", track, "--yes")
        before = fetched(database, SCOPE)
        result = session("run", "--lexicon", like_file)
        change = f"indexer scope set --collections 'com.example.*,{LIKE}'{signals}"
        message = f"--lexicon: the database does not index {LIKE}; run: {change}"
        assert (result.returncode, error_line(result)) == (2, message)
        assert fetched(database, SCOPE) == before
    assert fetched(database, LEXICONS) == []


@pytest.mark.parametrize("options", [[], ["--processes", "2"]], ids=["one process", "two processes"])
def test_lexicon_that_gives_nothing_to_index_is_refused_in_one_line(
    session: Session, database: str, tmp_path: Path, like_file: str, options: list[str]
) -> None:
    defs = tmp_path / "defs.json"
    defs.write_text(json.dumps(DEFS_DOCUMENT))
    session.configure(INDEXER_COLLECTIONS="com.example.*")
    for argument, message in (
        (str(defs), "--lexicon: none of the lexicons has a record type"),
        ("none.json", "'none.json' is neither a file, nor a directory, nor an NSID; see indexer run --help"),
        (like_file, f"--lexicon: INDEXER_COLLECTIONS does not match {LIKE}"),
    ):
        result = session("run", *options, "--lexicon", argument)
        assert (result.returncode, error_line(result)) == (2, message)
    assert fetched(database, SCOPE) == fetched(database, LEXICONS) == []


async def test_lexicon_that_nobody_publishes_is_refused_with_what_to_do_instead(database: str, tmp_path: Path) -> None:
    """It may be a typing error. If the DNS does not answer, another start may succeed."""
    async with NameServer() as dns:
        for silent, code, message in (
            (
                False,
                2,
                "com.none.thing is not published: _lexicon.none.com has no TXT record with a DID; give its file",
            ),
            (
                True,
                1,
                "timeout: com.none.thing: the TXT record of _lexicon.none.com: no answer within 5 s from "
                "{}:{}; set INDEXER_DNS_SERVERS, or give the lexicon as a file".format(*dns.address),
            ),
        ):
            dns.silent = silent
            result = await asyncio.to_thread(
                run_indexer, "run", "--lexicon", "com.none.thing",
                INDEXER_DATABASE_URL=database, INDEXER_DATA_DIR=str(tmp_path), INDEXER_HTTP_BIND="127.0.0.1:0",
                INDEXER_DNS_SERVERS="{}:{}".format(*dns.address),
            )  # fmt: skip
            assert result.returncode == code
            assert message in error_line(result)
    async with connected(database) as connection:
        assert await connection.fetch(SCOPE) == await connection.fetch(LEXICONS) == []
