import json
import os
import pty
from pathlib import Path

import pytest

from tests.cli.command_line import Session
from tests.cli.stored_account import DID

OTHER = "did:web:two.example"
pytestmark = pytest.mark.slow


def shown(session: Session) -> dict[str, object]:
    document: dict[str, object] = json.loads(session("scope", "show", "--json").stdout)
    return document


def test_scope_is_that_of_the_settings_until_it_is_changed(session: Session) -> None:
    session.configure(INDEXER_COLLECTIONS="com.example.*")
    assert session("scope", "show").stdout == "version 0: repos all, collections com.example.*\n"
    session("scope", "set", "--track", "listed", "--collections", "com.example.b, com.example.a")
    session.configure(INDEXER_COLLECTIONS="*")
    assert shown(session) == {
        "version": 2,
        "track": "listed",
        "collections": ["com.example.a", "com.example.b"],
        "signal_collections": [],
        "redacted_collections": [],
        "progress": [
            {"collection": "com.example.a", "repos": 0, "complete": 0},
            {"collection": "com.example.b", "repos": 0, "complete": 0},
        ],
    }
    session("scope", "set", "--signal-collections", "com.example.c,com.example.d.*,org.*")
    result = session("scope", "set", "--track", "signal")
    assert "repos signal, collections com.example.a,com.example.b" in result.stdout
    found_on_stream_only = session("scope", "show").stdout.splitlines()[1]
    assert found_on_stream_only.endswith(": repos of com.example.d.*,org.*"), "relays list repos by complete NSIDs"


def test_bad_scope_is_one_line_and_changes_nothing(session: Session) -> None:
    for options in ("", "--collections=", "--collections=posts", "--track=signal", "--track=some"):
        result = session("scope", "set", *options.split())
        assert (result.returncode, result.stdout, len(result.stderr.splitlines())) == (2, "", 1)
        assert session("scope", "show").returncode == 2, "no scope is stored"


@pytest.mark.usefixtures("stored_account")
def test_typo_deletes_nothing(session: Session) -> None:
    """It deleted all records within seconds, with exit code 0."""
    result = session("scope", "set", "--collections", "com.example.statsu")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(
        "indexer: Delete the records of 1 collections (com.example.note)? There is no terminal"
    )
    assert session("scope", "show").returncode == 2, "no scope is stored"
    assert session("scope", "set", "--collections", "com.example.other.*", "--yes").returncode == 0
    assert session("scope", "set", "--track", "all", "--collections", "*").stderr == "", "nothing is lost"
    assert session("scope", "set", "--collections", "com.example.*").stderr == "", "it selects all stored records"


@pytest.mark.usefixtures("stored_account")
def test_change_that_untracks_repos_asks_for_confirmation(session: Session) -> None:
    result = session("scope", "set", "--track", "listed")
    assert result.returncode == 2
    text = "Untrack 1 repos that no command has added, and delete their records? There is no terminal"
    assert result.stderr.startswith(f"indexer: {text}")
    assert session("scope", "show").returncode == 2, "no scope is stored"
    result = session("scope", "set", "--track", "signal", "--signal-collections", "com.example.note")
    assert "no command has added, except those with a record of a signal collection, and" in result.stderr
    assert session("scope", "show").returncode == 2, "no scope is stored"
    assert session("scope", "set", "--track", "listed", "--yes").returncode == 0
    assert shown(session)["track"] == "listed"
    assert session("scope", "set", "--track", "signal", "--signal-collections", "com.example.note").returncode == 0


@pytest.mark.usefixtures("stored_account")
def test_question_on_a_terminal_is_answered_with_yes(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    for answer, code in ((b"n\n", 130), (b"y\n", 0)):
        terminal, theirs = pty.openpty()
        os.write(terminal, answer)
        with open(theirs) as stdin:  # noqa: PTH123 - a descriptor has no path
            monkeypatch.setattr("sys.stdin", stdin)
            result = session("scope", "set", "--collections", "com.example.other")
        assert (result.returncode, "Delete the records" in result.stderr) == (code, True)
        os.close(terminal)


@pytest.mark.usefixtures("stored_account")
def test_repos_are_untracked_and_tracked(session: Session, tmp_path: Path) -> None:
    assert session("scope", "untrack", DID, OTHER).stdout == "repos: 1 untracked, 1 were not tracked\n"
    assert json.loads(session("repo", DID, "--json").stdout)["tracked"] is False
    (tmp_path / "dids").write_text(f"{DID}\n{OTHER}\n")
    assert session("add", "--file", str(tmp_path / "dids")).stdout == "repos: 2 added, 0 already tracked\n"
    assert session("scope", "set", "--track", "listed").returncode == 0, "chosen repos need no confirmation"
    result = session("scope", "untrack", "--file", str(tmp_path / "dids"))
    assert result.returncode == 2
    assert result.stderr.startswith("indexer: Untrack 2 repos, and delete their records? There is no terminal")
    assert session("scope", "untrack", OTHER, "--json").stdout == '{"untracked": 1, "not_tracked": 0}\n'
    assert session("add", OTHER).stdout == "repos: 1 added, 0 already tracked\n"
    assert session("scope", "untrack").returncode == 2
