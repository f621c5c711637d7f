import asyncio
import json
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from indexer.atproto.lexicon import MAX_FIELDS, STRONG_REFERENCE
from indexer.demo.local_pds import GET_RECORD
from indexer.net.http.checked_connector import DnsResolver
from tests.backups import back_up, restore
from tests.cli.command_line import Session, error_line
from tests.faulty_network import Fault, FaultyAccount, FaultyNetwork
from tests.lexicons.published import published_directory
from tests.lexicons.samples import (
    DEFS,
    DEFS_DOCUMENT,
    LIKE,
    LIKE_DOCUMENT,
    QUERY_DOCUMENT,
    REVIEW,
    REVIEW_DOCUMENT,
    copy_of,
    properties_of,
)
from tests.net.identity.name_server import NameServer

pytestmark = pytest.mark.slow

SCHEMA = "com.atproto.lexicon.schema"


def write(path: Path, document: Any) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document))
    return str(path)


def stored(session: Session) -> dict[str, dict[str, Any]]:
    """Return the lexicons that `list` prints, by NSID."""
    lines = session("lexicon", "list", "--json").stdout.splitlines()
    return {row["nsid"]: row for row in map(json.loads, lines)}


def test_file_is_added_listed_indexed_and_removed(session: Session, tmp_path: Path) -> None:
    file = write(tmp_path / "like.json", LIKE_DOCUMENT)
    added = session("lexicon", "add", file)
    assert (added.returncode, added.stderr) == (0, "")
    assert added.stdout == f'{LIKE}: added, view lexicon."{LIKE}"\n'
    assert session("lexicon", "add", file).stdout == f'{LIKE}: unchanged, view lexicon."{LIKE}"\n'
    built = session("lexicon", "index", LIKE, "subject_uri", "createdAt", "--json")
    assert [json.loads(line) for line in built.stdout.splitlines()] == [
        {"nsid": LIKE, "columns": ["subject_uri"], "built": True},
        {"nsid": LIKE, "columns": ["created_at"], "built": True},
    ]
    again = session("lexicon", "index", LIKE, "subject_uri")
    assert (again.returncode, again.stdout) == (0, f"{LIKE} (subject_uri): there is an index already\n")
    assert stored(session) == {
        LIKE: {
            "nsid": LIKE,
            "view": LIKE,
            "columns": ["subject_uri", "subject_cid", "created_at", "via_uri", "via_cid"],
            "indexes": [{"columns": "created_at", "valid": True}, {"columns": "subject_uri", "valid": True}],
            "source": file,
        }
    }
    shown = session("lexicon", "list").stdout
    assert "created_at, subject_uri" in shown
    removed = session("lexicon", "remove", LIKE)
    assert (removed.returncode, removed.stdout) == (0, f"{LIKE}: removed\n")
    assert removed.stderr.count("dropped an index that no view uses any more") == 2
    assert stored(session) == {}
    assert session("lexicon", "list").stderr == "No lexicon is stored; see indexer lexicon add --help.\n"


def test_directory_is_added_with_one_notice_for_what_it_skips(session: Session, tmp_path: Path) -> None:
    for number, document in enumerate((LIKE_DOCUMENT, REVIEW_DOCUMENT, DEFS_DOCUMENT, QUERY_DOCUMENT)):
        write(tmp_path / "lexicons" / f"{number}" / "lexicon.json", document)
    hostile = copy_of(LIKE_DOCUMENT) | {"id": "com.evil.thing"}
    properties_of(hostile)["a"] = {"type": "ref", "ref": "com.evil.\x1b]0;title\x07x"}
    write(tmp_path / "lexicons" / "evil.json", hostile)
    write(tmp_path / "lexicons" / "package.json", {"name": "lexicons"})
    added = session("lexicon", "add", str(tmp_path / "lexicons"))
    assert added.returncode == 0
    assert f'{REVIEW}: added, view lexicon."{REVIEW}"' in added.stdout.splitlines()
    assert "\x1b" not in added.stderr
    assert "com.evil.\\x1b]0;title\\x07x" in added.stderr
    assert set(added.stderr.splitlines()) > {
        f"lexicons without a record type, skipped: {QUERY_DOCUMENT['id']}",
        f"{REVIEW}: fields that refer to com.elsewhere.defs have the type jsonb until it is added",
    }
    assert set(stored(session)) == {LIKE, REVIEW, DEFS, "com.evil.thing"}


@pytest.mark.proof("clients")
def test_all_published_lexicons_are_added(session: Session) -> None:
    added = session("lexicon", "add", str(published_directory()))
    assert added.returncode == 0
    assert 'app.bsky.feed.post: added, view lexicon."app.bsky.feed.post"' in added.stdout.splitlines()


def test_lexicon_whose_collection_is_not_selected_is_reported(session: Session, tmp_path: Path) -> None:
    """The stored scope decides; that of the settings, only before the first daemon has stored one."""
    file = write(tmp_path / "like.json", LIKE_DOCUMENT)
    notice = f"{LIKE}: the scope does not select this collection, so the view has no records; see indexer scope show\n"
    session.configure(INDEXER_COLLECTIONS="com.example.*")
    added = session("lexicon", "add", file)
    assert (added.returncode, added.stderr) == (0, notice)
    session("scope", "set", "--collections", "app.bsky.*")
    assert session("lexicon", "add", file).stderr == ""


BAD_FILES: dict[str, tuple[str | bytes, str]] = {
    "text.json": ("hello", "is not a lexicon: it is not JSON: Expecting value"),
    "binary.json": (b"\xff\x00", "is not a lexicon: it is not JSON: "),
    "deep.json": ("[" * 100_000, "is not a lexicon: it is not JSON: "),
    "list.json": ("[]", "is not a lexicon: it has no field `lexicon`"),
    "type.json": (json.dumps(LIKE_DOCUMENT | {"lexicon": 3}), "version 3 of the lexicon language is unknown"),
    "levels.json": ('{"lexicon": ' + 250 * "[" + 250 * "]" + "}", "is not a lexicon: it has over 250 levels"),
    "large.json": (" " * 1_048_577, "is not a lexicon: it has over 1048576 bytes"),
}


def test_file_that_is_no_lexicon_is_reported_in_one_line(session_without_database: Session, tmp_path: Path) -> None:
    """Nothing is added, not even the valid lexicons among the arguments."""
    good = write(tmp_path / "good" / "like.json", LIKE_DOCUMENT)
    for name, (content, problem) in BAD_FILES.items():
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        result = session_without_database("lexicon", "add", good, str(tmp_path / name))
        assert result.returncode == 2
        assert problem in error_line(result)


def test_odd_parts_of_a_valid_lexicon_are_named(session: Session, tmp_path: Path) -> None:
    """A field of a type that is not known is shown as jsonb."""
    odd = copy_of(LIKE_DOCUMENT)
    properties_of(odd)["via"] = {"type": "later"}
    added = session("lexicon", "add", write(tmp_path / "like.json", odd))
    assert (added.returncode, added.stdout) == (0, f'{LIKE}: added, view lexicon."{LIKE}"\n')
    problem = "`defs.main.record.properties.'via'` has no known type, and is shown as jsonb: 'later'"
    assert added.stderr == f"{LIKE}: {problem}\n"
    assert stored(session)[LIKE]["columns"] == ["subject_uri", "subject_cid", "created_at", "via"]


def test_directory_with_an_invalid_file_adds_nothing(session: Session, tmp_path: Path) -> None:
    write(tmp_path / "lexicons" / "like.json", LIKE_DOCUMENT)
    (tmp_path / "lexicons" / "away.json").symlink_to(tmp_path / "nothing")
    added = session("lexicon", "add", str(tmp_path / "lexicons"))
    assert added.returncode == 2
    assert error_line(added) == f"{tmp_path}/lexicons/away.json cannot be read: No such file or directory"
    assert stored(session) == {}


def test_directory_without_a_lexicon_and_two_different_lexicons_of_one_nsid_are_refused(
    session: Session, tmp_path: Path
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    result = session("lexicon", "add", str(empty))
    assert (result.returncode, error_line(result)) == (2, f"{empty} contains no lexicon")
    one, same = (write(tmp_path / name, LIKE_DOCUMENT) for name in ("one.json", "same.json"))
    two = write(tmp_path / "two.json", LIKE_DOCUMENT | {"description": "Another version."})
    result = session("lexicon", "add", one, two)
    expected = f"{one} and {two} are different lexicons of {LIKE}; give only one of them"
    assert (result.returncode, error_line(result)) == (2, expected)
    assert session("lexicon", "add", one, same).returncode == 0
    assert stored(session)[LIKE]["source"] == one


def test_unknown_nsid_and_unknown_field_are_reported_in_one_line(session: Session, tmp_path: Path) -> None:
    for arguments in (("remove", REVIEW), ("index", REVIEW, "title")):
        result = session("lexicon", *arguments)
        assert result.returncode == 4
        assert error_line(result) == f"the lexicon of {REVIEW} was not added, or has no view; see indexer lexicon list"
    session("lexicon", "add", write(tmp_path / "like.json", LIKE_DOCUMENT))
    result = session("lexicon", "index", LIKE, "subject")
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1] == (
        f"indexer: {LIKE} has no column subject; the columns are subject_uri, subject_cid, created_at, via_uri, "
        "via_cid, did, rkey, indexed_at, sort_at"
    )


async def test_objects_of_users_that_depend_on_a_view_are_named(
    session: Session, sql: asyncpg.Connection, tmp_path: Path
) -> None:
    file = tmp_path / "like.json"
    await session.run("lexicon", "add", write(file, LIKE_DOCUMENT))
    await sql.execute(f'create view public.own as select created_at from lexicon."{LIKE}"')  # noqa: S608
    changed = copy_of(LIKE_DOCUMENT)
    properties_of(changed)["createdAt"] = {"type": "integer"}
    for arguments in (("add", write(file, changed)), ("remove", LIKE)):
        result = await session.run("lexicon", *arguments)
        assert result.returncode == 1
        assert error_line(result) == (
            f'nothing was changed: view public.own depends on view lexicon."{LIKE}"; drop what depends on the view, '
            "run the command again, and create it again"
        )


def test_backup_contains_typed_views(session: Session, database: str, empty_database: str, tmp_path: Path) -> None:
    session("lexicon", "add", write(tmp_path / "review.json", REVIEW_DOCUMENT))
    session("lexicon", "index", REVIEW, "title")
    before = stored(session)
    assert before != {}
    back_up(database, tmp_path / "indexer.dump")
    session.configure(INDEXER_DATABASE_URL=empty_database)
    restore(empty_database, tmp_path / "indexer.dump")
    assert stored(session) == before


# Published lexicons.


@pytest.fixture
async def name_server() -> AsyncIterator[NameServer]:
    async with NameServer() as server:
        yield server


@pytest.fixture
async def publisher(session: Session, name_server: NameServer, tmp_path: Path) -> AsyncIterator[FaultyAccount]:
    """Publish the lexicons of com.example by an account of a local network, which the settings name."""
    async with FaultyNetwork() as network:
        session.configure(
            INDEXER_PLC_URL=network.plc_url,
            INDEXER_RELAYS=network.relay_url,
            INDEXER_ALLOW_PRIVATE_HOSTS="true",
            INDEXER_DATA_DIR=str(tmp_path / "data"),
            INDEXER_DNS_SERVERS="{}:{}".format(*name_server.address),
        )
        account = network.create_account("ada.test")
        for document in (REVIEW_DOCUMENT, DEFS_DOCUMENT, QUERY_DOCUMENT):
            account.create(SCHEMA, {"$type": SCHEMA} | document, rkey=document["id"])
        for number in range(50):
            account.create("com.example.other", {"$type": "com.example.other", "n": number})
        name_server.texts["_lexicon.example.com"] = [f'"did={account.did}"']
        yield account


async def add(session: Session, *nsids: str) -> Any:
    return await session.run("lexicon", "add", *nsids)


async def test_nsid_is_resolved_and_verified_with_the_lexicons_that_it_refers_to(
    session: Session, publisher: FaultyAccount, name_server: NameServer
) -> None:
    result = await add(session, REVIEW)
    assert (result.returncode, result.stdout.splitlines()) == (
        0,
        [f"{DEFS}: added, no view, other lexicons refer to it", f'{REVIEW}: added, view lexicon."{REVIEW}"'],
    )
    missing = "com.elsewhere.defs is not published: _lexicon.elsewhere.com has no TXT record with a DID"
    assert result.stderr.splitlines() == [
        f"a lexicon that another one refers to is missing: {missing}",
        f"{REVIEW}: fields that refer to com.elsewhere.defs have the type jsonb until it is added",
    ]
    assert set(name_server.queries) == {"_lexicon.example.com", "_lexicon.elsewhere.com"}
    rows = await asyncio.to_thread(stored, session)
    assert rows[REVIEW]["source"] == f"at://{publisher.did}/{SCHEMA}/{REVIEW}"
    assert "kind" in rows[REVIEW]["columns"]


async def test_lexicons_that_refer_to_others_without_end_are_bounded_in_bytes(
    session: Session, publisher: FaultyAccount
) -> None:
    """Each has a record type, and would get a view with a thousand columns. Nothing is fetched after that."""
    reference = {"type": "ref", "ref": STRONG_REFERENCE}
    for number in range(5):
        document = copy_of(LIKE_DOCUMENT) | {"id": f"com.example.n{number}", "description": 400_000 * "x"}
        fields = {f"f{field}": reference for field in range(MAX_FIELDS - 2)}
        fields["last"] = {"type": "ref", "ref": "com.example.zzz"}
        properties_of(document).clear()
        properties_of(document).update(fields | {"next": {"type": "ref", "ref": f"com.example.n{number + 1}"}})
        publisher.create(SCHEMA, {"$type": SCHEMA} | document, rkey=document["id"])
    result = await add(session, "com.example.n0")
    assert result.returncode == 0
    assert set(await asyncio.to_thread(stored, session)) == {"com.example.n0", "com.example.n1", "com.example.n2"}
    assert "com.example.n3: together with the others, it has over 1048576 bytes" in result.stderr
    assert "com.example.zzz is not published" not in result.stderr


async def test_nsid_that_nobody_publishes_is_reported_in_one_line(
    session: Session, publisher: FaultyAccount, name_server: NameServer
) -> None:
    result = await add(session, "com.example.nothing")
    assert result.returncode == 2
    assert error_line(result) == (
        f"com.example.nothing is not published: at://{publisher.did}/{SCHEMA}/com.example.nothing does not exist"
    )
    result = await add(session, "com.example.sub.nothing")  # the authority is exact: no parent domain is asked
    assert result.returncode == 2
    assert error_line(result) == (
        "com.example.sub.nothing is not published: _lexicon.sub.example.com has no TXT record with a DID"
    )
    name_server.texts["_lexicon.example.com"].append('"did=did:plc:bbbbbbbbbbbbbbbbbbbbbbbb"')
    result = await add(session, REVIEW)
    assert result.returncode == 2
    assert error_line(result) == f"{REVIEW} is not published: _lexicon.example.com names 2 DIDs"
    name_server.texts["_lexicon.example.com"] = ['"did=did:plc:bbbbbbbbbbbbbbbbbbbbbbbb"']
    result = await add(session, REVIEW)
    assert result.returncode == 2
    assert "its authority did:plc:bbbbbbbbbbbbbbbbbbbbbbbb cannot be resolved: not registered" in error_line(result)


async def test_lexicon_with_a_wrong_signature_is_rejected(session: Session, publisher: FaultyAccount) -> None:
    publisher.swap_key()
    publisher.create(SCHEMA, {"$type": SCHEMA} | LIKE_DOCUMENT, rkey="com.example.more")
    result = await add(session, REVIEW)
    assert result.returncode == 2
    assert "signature-invalid" in error_line(result)
    assert await asyncio.to_thread(stored, session) == {}


async def test_published_record_that_is_no_lexicon_is_reported(session: Session, publisher: FaultyAccount) -> None:
    for rkey, record, problem in (
        ("com.example.wrong", {"$type": SCHEMA} | LIKE_DOCUMENT, f"is the lexicon of {LIKE}"),
        ("com.example.empty", {"$type": SCHEMA}, "is not a lexicon: it has no field `lexicon`"),
        ("com.example.bytes", b"\xff", "is not a lexicon: not-dag-cbor"),
    ):
        publisher.create(SCHEMA, record, rkey=rkey)
        result = await add(session, rkey)
        assert result.returncode == 2
        assert error_line(result) == f"at://{publisher.did}/{SCHEMA}/{rkey} {problem}"


async def test_dns_or_pds_that_does_not_answer_is_reported(
    session: Session, publisher: FaultyAccount, name_server: NameServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("indexer.cli.lexicon.DnsResolver", partial(DnsResolver, timeout=0.5))
    publisher.pds.faults.append(Fault(GET_RECORD, status=500))
    result = await add(session, REVIEW)
    assert result.returncode == 1
    assert error_line(result).startswith(f"http-status: {REVIEW}: at://{publisher.did}/{SCHEMA}/{REVIEW}: 500")
    name_server.silent = True
    result = await add(session, REVIEW)
    assert result.returncode == 1
    assert error_line(result).startswith(f"timeout: {REVIEW}: the TXT record of _lexicon.example.com: ")
