import json
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
    assert shown(session)["collections"] == ["*"]


@pytest.mark.usefixtures("stored_account")
def test_change_that_untracks_repos_asks_for_confirmation(session: Session) -> None:
    result = session("scope", "set", "--track", "listed")
    assert result.returncode == 1
    assert result.stderr.startswith("Untrack 1 repos that no command has added, and delete their records? [y/N]")
    assert shown(session)["track"] == "all"
    result = session("scope", "set", "--track", "signal", "--signal-collections", "com.example.c")
    assert "no command has added, except those with a record of a signal collection, and" in result.stderr
    assert shown(session)["signal_collections"] == []
    assert session("scope", "set", "--track", "listed", "--yes").returncode == 0
    assert shown(session)["track"] == "listed"
    assert session("scope", "set", "--track", "signal", "--signal-collections", "com.example.c").returncode == 0


@pytest.mark.usefixtures("stored_account")
def test_repos_are_untracked_and_tracked(session: Session, tmp_path: Path) -> None:
    assert session("scope", "untrack", DID, OTHER).stdout == "repos: 1 untracked, 1 were not tracked\n"
    assert json.loads(session("repo", DID, "--json").stdout)["tracked"] is False
    (tmp_path / "dids").write_text(f"{DID}\n{OTHER}\n")
    result = session("scope", "track", "--file", str(tmp_path / "dids"))
    assert result.stdout == "repos: 2 tracked, 0 were tracked already\n"
    assert session("scope", "set", "--track", "listed").returncode == 0, "chosen repos need no confirmation"
    assert session("scope", "untrack", OTHER, "--json").stdout == '{"untracked": 1, "not_tracked": 0}\n'
    assert session("add", OTHER).stdout == "repos: 1 added, 0 already tracked\n"
    assert session("scope", "untrack").returncode == 2
