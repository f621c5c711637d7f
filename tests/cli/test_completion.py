import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from indexer.cli.main import COMMANDS, main

PROGRAM = """
    source "$1"
    shift
    COMP_WORDS=(indexer "$@") COMP_CWORD=$#
    _indexer_completion indexer
    printf '%s\\n' "${COMPREPLY[@]}"
"""
"""Load the script and print the completions of the last argument."""


def complete(script: Path, *words: str) -> set[str]:
    bash = shutil.which("bash")
    assert bash is not None
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    result = subprocess.run(
        [bash, "-ec", PROGRAM, "bash", script, *words],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert result.stderr == ""
    return set(result.stdout.splitlines())


@pytest.mark.slow
def test_shell_completes_commands_options_and_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "completion"
    assert main(["completion", "bash"]) == 0
    script.write_text(capsys.readouterr().out)
    assert complete(script, "") == set(COMMANDS)
    assert {"--all", "--errored", "--json"} <= complete(script, "resync", "--")
    assert complete(script, "export", "--format", "") == {"jsonl", "parquet"}


def test_script_of_each_shell_runs_the_program(capsys: pytest.CaptureFixture[str]) -> None:
    for shell in ("bash", "zsh", "fish"):
        assert main(["completion", shell]) == 0
        assert f"_INDEXER_COMPLETE={shell}_complete" in capsys.readouterr().out
