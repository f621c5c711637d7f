import asyncio
import json

import pytest

from tests.cli.command_line import Session, error_line
from tests.cli.stored_account import DID, HANDLE
from tests.database_checks import fetch

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("stored_account")]

NOTE = "com.example.note"
URI = f"at://{DID}/{NOTE}/one"


def test_redaction_is_confirmed_and_says_what_it_did_and_cannot_reach(session: Session) -> None:
    refused = session("redact", URI)
    assert (refused.returncode, session("record", URI).returncode) == (2, 0), "it needs --yes without a terminal"
    result = session("redact", f"at://{HANDLE.upper()}/{NOTE}/one", "--yes", "--reason", "by order")
    assert (result.returncode, result.stderr) == (0, "")
    first, *rest = result.stdout.splitlines()
    assert first.startswith(f"{URI} is redacted: 1 records ")
    assert "VACUUM" in " ".join(rest)
    again = session("redact", URI, "--yes", "--json")
    assert again.stderr == "indexer: no such record was stored; it will not be stored in future\n"
    assert json.loads(again.stdout) == {"target": URI, "records": 0, "dead_letters": 0, "links_deleted": True}
    record = session("record", URI)
    assert record.returncode == 4
    assert error_line(record).startswith(f"{URI} is redacted by ")
    assert error_line(record).endswith(": by order")
    reverse = session("takedown", URI, "--reverse")
    assert reverse.returncode == 2
    assert error_line(reverse).startswith(f"{URI} is redacted, which is irreversible")
    report = json.loads(session("repo", DID, "--json").stdout)
    assert (report["removed"], report["redacted"], report["records"]) == (1, None, 0)


def test_account_and_collection_are_redacted(session: Session) -> None:
    session("scope", "set", "--collections", "com.example.*")
    assert session("redact", NOTE, "--yes").stdout.startswith(f"{NOTE} is redacted: 1 records")
    assert session("record", URI).returncode == 4
    session("scope", "set", "--collections", "com.example.other")
    assert session("redact", NOTE, "--yes").returncode == 0, "it is repeated"
    session("scope", "set", "--collections", "com.example.*")
    assert json.loads(session("scope", "show", "--json").stdout)["redacted_collections"] == [NOTE]
    assert f"collections com.example.*, redacted {NOTE}\n" in session("scope", "show").stdout
    assert session("redact", DID, "--yes", "--reason", "asked for").stdout.startswith(f"{DID} is redacted: 0 records")
    assert session("redact", DID, "--yes").returncode == 0
    assert session("add", "did:web:new.example", DID).stdout == "repos: 1 added, 0 already tracked, 1 redacted\n"
    report = json.loads(session("repo", DID, "--json").stdout)
    assert (report["tracked"], report["handle"]) == (False, None)
    assert "never tracked again. Reason: asked for." in " ".join(report["summary"])


def test_handle_is_no_collection(session: Session, database: str) -> None:
    """Both may have the same syntax, and a redaction is irreversible."""
    handle = "alice.bsky.example"
    asyncio.run(fetch(database, "update indexer.identity set handle = $1", handle))
    session("scope", "set", "--track", "all", "--collections", "com.example.*")
    known, unknown = session("redact", handle.upper(), "--yes"), session("redact", "bob.bsky.example", "--yes")
    assert (known.returncode, unknown.returncode) == (2, 4)
    assert error_line(known).endswith(f"is a handle: name the account by its DID, {DID}")
    assert json.loads(session("scope", "show", "--json").stdout)["redacted_collections"] == []
    assert session("redact", "com.example.future", "--yes").returncode == 0, "the scope matches it"
    session("scope", "set", "--collections", "*,com.other.*", "--yes")
    for text in ("bob.bsky.example", "com.example.other"):
        assert session("redact", text, "--yes").returncode == 4, "it is not named"
    assert session("redact", NOTE, "--yes").returncode == 0, "a record is stored"
    assert session("redact", NOTE, "--yes").returncode == 0, "it is repeated"


def test_record_is_hidden_and_shown_again(session: Session) -> None:
    session("scope", "set", "--track", "all")
    assert session("takedown", URI, "--reason", "why").stdout == f"{URI} is taken down\n"
    assert error_line(session("record", URI)).startswith(f"{URI} is hidden by ")
    shown = session("takedown", URI, "--reverse", "--json")
    assert json.loads(shown.stdout) == {"did": DID, "uri": URI, "takedown": False}
    assert error_line(session("record", URI)) == f"{URI} is not in the database, or its account is hidden"
    report = json.loads(session("repo", DID, "--json").stdout)
    assert (report["removed"], report["sync_reason"]) == (0, "requested")


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("redact", "a post", "--yes"), 2),
        (("redact", f"at://{DID}/{NOTE}", "--yes"), 2),
        (("redact", "com.example.*", "--yes"), 2),
        (("redact", f"at://other.example/{NOTE}/one", "--yes"), 4),
        (("takedown", NOTE), 2),
        (("takedown", f"at://other.example/{NOTE}/one"), 4),
    ],
)
def test_bad_or_unknown_target_changes_nothing(session: Session, arguments: tuple[str, ...], code: int) -> None:
    result = session(*arguments)
    assert result.returncode == code
    assert error_line(result)
    assert session("record", URI).returncode == 0
