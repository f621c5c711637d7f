"""The command `completion`."""

from pathlib import Path
from typing import Literal

import click
from click.shell_completion import get_completion_class

from indexer.cli.command import ExitCode, config_option

PROGRAM, VARIABLE = "indexer", "_INDEXER_COMPLETE"
"""The script runs the program with this variable, and the program prints the completions."""


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@config_option
@click.pass_context
def completion_command(
    context: click.Context,
    /,
    shell: Literal["bash", "zsh", "fish"],
    config: Path | None,  # noqa: ARG001 - as in every command; no setting is used here
) -> int:
    """Print the script that completes commands and options in a shell.

    \b
    bash:  indexer completion bash > ~/.local/share/bash-completion/completions/indexer
    zsh:   indexer completion zsh > "${fpath[1]}/_indexer"
    fish:  indexer completion fish > ~/.config/fish/completions/indexer.fish
    """  # noqa: D301 - click wants the character itself
    completion = get_completion_class(shell)
    assert completion is not None  # noqa: S101 - click has a class for each of the choices
    click.echo(completion(context.find_root().command, {}, PROGRAM, VARIABLE).source())
    return ExitCode.OK
