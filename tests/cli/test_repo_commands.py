import json
from io import StringIO
from pathlib import Path

import pytest

from indexer.reasons import Desync
from tests.cli.command_line import Session, error_line
from tests.cli.stored_account import DID


class Stdin(StringIO):
    name = "<stdin>"


FIRST, SECOND, THIRD = (f"did:web:{name}.example" for name in ("one", "two", "three"))


def test_add_accepts_dids_as_arguments_from_a_file_and_from_stdin(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert session("add", FIRST).stdout == "repos: 1 added, 0 already tracked\n"
    (tmp_path / "dids").write_text(f"# a comment\n{SECOND}\n\n  {FIRST}\r\n")
    assert session("add", "--file", str(tmp_path / "dids")).stdout == "repos: 1 added, 1 already tracked\n"
    monkeypatch.setattr("sys.stdin", Stdin(f"{THIRD}\n"))
    assert session("add", "-", "--json").stdout == '{"added": 1, "already_tracked": 0, "redacted": 0}\n'
    assert json.loads(session("repo", THIRD, "--json").stdout)["sync_status"] == "desynchronized"
    monkeypatch.setattr("sys.stdin", Stdin(f"{FIRST}\ninvalid\n"))
    result = session("add", "-")
    assert result.returncode == 2
    assert "line 2 of <stdin>: 'invalid' is not the DID of an account" in error_line(result)


@pytest.mark.parametrize("did", ["did:plc:xyz", "did:plc:" + "1" * 24, "did:web:one.example:two", "did:key:zQ3sh"])
def test_did_that_no_account_can_have_is_refused_in_one_line(session: Session, did: str) -> None:
    result = session("add", did)
    assert result.returncode == 2
    assert error_line(result).startswith(f"Invalid value for 'DID…|-': '{did}' is not the DID of an account")
    assert session("repo", did).returncode == 4, "one that is stored can be shown and untracked"


@pytest.mark.slow
@pytest.mark.usefixtures("stored_account")
def test_takedown_hides_a_repo_and_its_reverse_shows_it(session: Session) -> None:
    assert session("takedown", DID).stdout == f"{DID} is taken down\n"
    assert json.loads(session("repo", DID, "--json").stdout)["visible"] is False
    assert session("takedown", DID, "--reverse").stdout == f"{DID} is no longer taken down\n"
    assert json.loads(session("repo", DID, "--json").stdout)["visible"] is True
    result = session("takedown", THIRD)
    assert (result.returncode, error_line(result)) == (4, f"{THIRD} is not in the database")


@pytest.mark.slow
@pytest.mark.usefixtures("stored_account")
def test_resync_is_requested_for_named_errored_or_all_repos(session: Session) -> None:
    assert session("resync", "--errored").stdout == "resyncs: 0 requested\n"
    assert session("resync", DID).stdout == "resyncs: 1 requested\n"
    report = json.loads(session("repo", DID, "--json").stdout)
    assert (report["sync_status"], report["sync_reason"]) == ("desynchronized", "requested")
    assert Desync.REQUESTED.text in session("repo", DID).stdout
    assert session("resync", "--all").stdout == "resyncs: 1 requested\n"
    result = session("resync", DID, THIRD)
    assert (result.returncode, result.stdout) == (4, "resyncs: 1 requested\n")
    assert result.stderr == "indexer: 1 of the DIDs are not in the database\n"
