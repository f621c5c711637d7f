import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command_line import Session, error_line, run_indexer
from tests.cli.stored_account import DID


def test_add_accepts_dids_as_arguments_and_from_a_file(session: Session, tmp_path: Path) -> None:
    first, second, third = (f"did:web:{name}.example" for name in ("one", "two", "three"))
    assert session("add", first, second).stdout == "repos: 2 added, 0 already tracked\n"
    (tmp_path / "dids").write_text(f"# a comment\n{second}\n\n  {third}\r\n")
    assert session("add", "--file", str(tmp_path / "dids")).stdout == "repos: 1 added, 1 already tracked\n"
    assert json.loads(session("repo", third, "--json").stdout)["sync_status"] == "desynchronized"


@pytest.mark.slow
def test_add_accepts_dids_from_stdin(database: str) -> None:
    add_from_stdin = partial(run_indexer, "add", "-", INDEXER_DATABASE_URL=database)
    first, second = "did:web:one.example", "did:web:two.example"
    assert add_from_stdin(stdin=f"{first}\n{second}").stdout == "repos: 2 added, 0 already tracked\n"
    result = add_from_stdin(stdin=f"{first}\ninvalid\n")
    assert result.returncode == 2
    assert "'invalid' on line 2 of <stdin> is not a DID" in error_line(result)


@pytest.mark.usefixtures("stored_account")
def test_takedown_hides_a_repo_and_its_reverse_shows_it(session: Session) -> None:
    assert session("takedown", DID).stdout == f"{DID} is taken down\n"
    assert json.loads(session("repo", DID, "--json").stdout)["visible"] is False
    assert session("takedown", DID, "--reverse").stdout == f"{DID} is no longer taken down\n"
    assert json.loads(session("repo", DID, "--json").stdout)["visible"] is True
    result = session("takedown", "did:web:nobody.example")
    assert (result.returncode, result.stderr) == (4, "indexer: did:web:nobody.example is not in the database\n")


@pytest.mark.usefixtures("stored_account")
def test_resync_is_requested_for_named_errored_or_all_repos(session: Session) -> None:
    assert session("resync", "--errored").stdout == "resyncs: 0 requested\n"
    assert session("resync", DID).stdout == "resyncs: 1 requested\n"
    report = json.loads(session("repo", DID, "--json").stdout)
    assert (report["sync_status"], report["sync_reason"]) == ("desynchronized", "requested")
    assert session("resync", "--all").stdout == "resyncs: 1 requested\n"
    result = session("resync", DID, "did:web:nobody.example")
    assert (result.returncode, result.stdout) == (4, "resyncs: 1 requested\n")
    assert result.stderr == "indexer: 1 of the DIDs are not in the database\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["add"],
        ["add", DID, "--file", __file__],
        ["add", DID, "-"],
        ["add", "someone.example"],
        ["resync"],
        ["resync", DID, "--all"],
        ["resync", "someone.example"],
    ],
)
def test_bad_argument_has_exit_code_2(arguments: list[str], session_without_database: Session) -> None:
    result = session_without_database(*arguments)
    assert result.returncode == 2
    error_line(result)


@pytest.mark.slow
@pytest.mark.usefixtures("stored_account")
def test_results_are_printed_as_json(session: Session) -> None:
    def result(*arguments: str) -> Any:
        (line,) = session(*arguments, "--json").stdout.splitlines()
        return json.loads(line)

    assert result("add", "did:web:one.example", DID) == {"added": 1, "already_tracked": 1}
    assert result("resync", DID) == {"requested": 1}
    assert result("takedown", DID) == {"did": DID, "takedown": True}
    assert result("migrate").keys() == {"version"}
    assert result("cursor", "reset", "wss://one.example", "--to", "5", "--yes") == {
        "relay": "wss://one.example",
        "seq": 5,
        "shards": ["0/1"],
    }
