"""`python -m tests.fuzz`: give mutated frames or exports to the Python code and to the native core, and compare.

atheris guides the mutations by the coverage of the Python code: an input that reaches a new branch is mutated further.
"""

import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, NoReturn

import atheris
import click

if TYPE_CHECKING:
    from tests.fuzz.session import Session

REPORT_SECONDS = 10.0
SEED = 20_261_122
INSTRUMENTED = ["indexer.atproto", "indexer.sync", "indexer.pds.spool", "indexer.pds.native_reader"]
MAX_INPUT_BYTES = 16_384


@click.command()
@click.option("--target", type=click.Choice(["frames", "exports"]), default="frames", show_default=True)
@click.option("--seconds", default=0, help="Stop after this time; fail if the core was not used. 0: run on.")
@click.option("--seeds", default=200, show_default=True, help="Number of valid inputs to start from.")
@click.option(
    "--corpus",
    type=click.Path(file_okay=False, path_type=Path),
    help="Directory of inputs to continue with, and for new ones. Default: a temporary one.",
)
@click.argument("inputs", nargs=-1, type=click.Path(exists=True, dir_okay=False, path_type=Path))
def main(target: str, seconds: int, seeds: int, corpus: Path | None, inputs: tuple[Path, ...]) -> None:
    """Compare the events and plans of mutated frames, or what mutated exports contain; or those of the INPUTS only.

    A difference ends the run: the input is written to the working directory, as crash-… .
    """
    with atheris.instrument_imports(include=INSTRUMENTED, enable_loader_override=False):
        # atheris instruments what is imported here
        import indexer.pds.native_reader  # noqa: PLC0415
        import indexer.sync.plan_batch  # noqa: F401, PLC0415
    from tests.fuzz.session import Session  # noqa: PLC0415

    session = Session(target, SEED)
    for path in inputs:
        session.compare(path.read_bytes())
    if inputs:
        return
    with tempfile.TemporaryDirectory(prefix="indexer-fuzz-") as directory:
        folder = corpus or Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        session.write_seeds(folder, seeds)
        arguments = [sys.argv[0], str(folder), f"-max_len={MAX_INPUT_BYTES}", "-timeout=60"]
        atheris.Setup(arguments, _reporting(session, seconds), custom_mutator=session.mutate)
        atheris.Fuzz()


def _reporting(session: "Session", seconds: int) -> Callable[[bytes], None]:
    """Return a function that compares an input, and prints the report from time to time.

    After `seconds` it ends the process, if they are not 0. A limit of libFuzzer would end it without the last check.
    """
    last = began = monotonic()

    def run(data: bytes) -> None:
        nonlocal last
        session.compare(data)
        now = monotonic()
        ended = 0 < seconds <= now - began
        if ended or now - last > REPORT_SECONDS:
            last = now
            click.echo(session.report())
        if ended:
            _end(session.unused)

    return run


def _end(unused: Sequence[str]) -> NoReturn:
    """End the process. Fail if the native core left everything of one kind to the Python code."""
    if unused:
        click.echo(f"FAILED: the native core was not compared: 0 {', 0 '.join(unused)}", err=True)
    sys.stdout.flush()
    os._exit(1 if unused else 0)  # libFuzzer takes an ordinary exit for a crash


main()
