import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from indexer.cli.main import COMMANDS, main

PROGRAMS = {
    "bash": """
        source <(indexer completion bash)
        COMP_WORDS=(indexer "$@") COMP_CWORD=$#
        _indexer_completion indexer
        printf '%s\\n' "${COMPREPLY[@]}"
    """,
    # The functions that take the completions exist only while somebody types.
    "zsh": """
        autoload -Uz compinit && compinit -D -u
        source <(indexer completion zsh)
        _describe() { print -rl -- "${(@P)3}" }
        compadd() { print -rl -- "${(@P)argv[-1]}" }
        words=(indexer "$@") CURRENT=$(($# + 1))
        $_comps[indexer]
    """,
    "fish": """
        indexer completion fish | source
        complete --do-complete "indexer $argv"
    """,
}
"""For each shell, a program that loads the script and prints the completions of the last of its arguments."""


def complete(shell: str, words: Sequence[str]) -> set[str]:
    """Return the completions of the last word, without their descriptions. Skip the test if the shell is absent."""
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed; run tests/cli/install_shells.sh")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = {
        "bash": ["bash", "-ec", PROGRAMS[shell], "bash", *words],
        "zsh": ["zsh", "-fec", PROGRAMS[shell], "zsh", *words],
        "fish": ["fish", "--no-config", "-c", PROGRAMS[shell], " ".join(words)],
    }[shell]
    environment = os.environ | {"PATH": path}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    assert result.stderr == ""
    separator = {"bash": "\n", "zsh": ":", "fish": "\t"}[shell]
    return {line.partition(separator)[0] for line in result.stdout.splitlines()}


@pytest.mark.slow
@pytest.mark.parametrize("shell", PROGRAMS)
def test_shell_completes_commands_subcommands_options_and_values(shell: str) -> None:
    assert complete(shell, [""]) == set(COMMANDS)
    assert complete(shell, ["re"]) == {name for name in COMMANDS if name.startswith("re")}
    assert complete(shell, ["cursor", ""]) == {"show", "reset"}
    assert {"--all", "--errored", "--json"} <= complete(shell, ["resync", "--"])
    assert complete(shell, ["export", "--format", ""]) == {"jsonl", "parquet"}


@pytest.mark.parametrize("shell", PROGRAMS)
def test_script_of_each_shell_runs_the_program(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert f"_INDEXER_COMPLETE={shell}_complete" in script
