"""The directory of the fuzzer's corpus, which all rounds of a run share."""

import subprocess
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests.fuzz import all_targets
from tests.fuzz.corpus import KEPT, open_corpus, open_folder


def test_only_a_run_without_an_end_keeps_its_corpus_by_default(tmp_path: Path) -> None:
    with open_corpus(None, 0) as endless, open_corpus(None, 60) as limited, open_corpus(tmp_path, 60) as given:
        assert endless == KEPT
        assert limited not in {KEPT, tmp_path}
        assert given == tmp_path
    assert not limited.exists()
    assert given.exists()


def test_the_kept_corpus_is_ignored_by_git() -> None:
    assert f"/{KEPT.name}/" in (KEPT.parent / ".gitignore").read_text().splitlines()


def test_all_rounds_of_a_run_continue_with_the_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process adds an input to the directory of its target; the third one of a target has a finding."""

    def add_input(command: list[str], **_: object) -> CompletedProcess[str]:
        target, corpus = (command[command.index(option) + 1] for option in ("--target", "--corpus"))
        folder = open_folder(Path(corpus), target)
        count = len(list(folder.iterdir()))
        (folder / f"{count}").touch()
        return CompletedProcess(command, int(count == 2), "")

    monkeypatch.setattr(subprocess, "run", add_input)
    assert all_targets.fuzz_all(0, tmp_path) == 1
    assert {len(list(folder.iterdir())) for folder in tmp_path.iterdir()} == {3}
