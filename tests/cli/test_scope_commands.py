import json
from pathlib import Path

import pytest

from tests.cli.command_line import Session
from tests.cli.stored_account import DID

OTHER = "did:web:two.example"


def shown(session: Session) -> dict[str, object]:
    document: dict[str, object] = json.loads(session("scope", "show", "--json").stdout)
    return document


def test_scope_is_that_of_the_settings_until_it_is_changed(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INDEXER_COLLECTIONS", "com.example.*")
    assert session("scope", "show").stdout == "version 0: repos all, collections com.example.*\n"
    result = session("scope", "set", "--track", "listed", "--collections", "com.example.b, com.example.a")
    assert result.stdout.splitlines()[0] == "version 2: repos listed, collections com.example.a,com.example.b"
    monkeypatch.setenv("INDEXER_COLLECTIONS", "*")
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
    session("scope", "set", "--signal-collections", "com.example.c")
    result = session("scope", "set", "--track", "signal")
    assert result.stdout.splitlines()[0].endswith("repos signal, collections com.example.a,com.example.b, signal "
                                                  "collections com.example.c")  # fmt: skip


def test_signal_pattern_without_a_list_is_named(session: Session) -> None:
    session("scope", "set", "--track", "signal", "--signal-collections", "com.example.a,com.example.b.*,org.*")
    assert session("scope", "show").stdout.splitlines()[1] == (
        "found on the stream only, because relays list repos by complete NSIDs: repos of com.example.b.*,org.*"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "Give --track, --collections or --signal-collections"),
        (("--collections", ""), "no collection is named; use * for all collections"),
        (("--collections", "posts"), "'posts' is neither an NSID, nor the beginning of one with .*, nor *"),
        (("--track", "signal"), "no signal collection is named, and repos are tracked by signal collections"),
        (("--track", "some"), "Invalid value for '--track'"),
    ],
)
def test_bad_scope_is_one_clear_line_and_changes_nothing(
    session: Session, arguments: tuple[str, ...], message: str
) -> None:
    result = session("scope", "set", *arguments)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith(f"indexer: {message}")
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
def test_chosen_repos_need_no_confirmation(session: Session) -> None:
    session("scope", "track", DID)
    assert session("scope", "set", "--track", "listed").returncode == 0


@pytest.mark.usefixtures("stored_account")
def test_repos_are_untracked_and_tracked(session: Session, tmp_path: Path) -> None:
    assert session("scope", "untrack", DID, OTHER).stdout == "repos: 1 untracked, 1 were not tracked\n"
    assert json.loads(session("repo", DID, "--json").stdout)["tracked"] is False
    (tmp_path / "dids").write_text(f"{DID}\n{OTHER}\n")
    result = session("scope", "track", "--file", str(tmp_path / "dids"))
    assert result.stdout == "repos: 2 tracked, 0 were tracked already\n"
    assert session("scope", "untrack", OTHER, "--json").stdout == '{"untracked": 1, "not_tracked": 0}\n'
    assert session("add", OTHER).stdout == "repos: 1 added, 0 already tracked\n"
    assert session("scope", "track", "nobody").returncode == 2
    assert session("scope", "untrack").returncode == 2
