"""`python -m tests.fuzz`: give mutated inputs to the code that reads what comes from outside, and check what it does.

atheris guides the mutations by the coverage of the Python code: an input that reaches a new branch is mutated further.
An input is a finding if it causes an undocumented error, a result that differs from that of the native core or of an
obvious reference, or a cost out of proportion to its size. tests/fuzz/targets.py has the table of targets.
"""

import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import closing
from hashlib import sha256
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, NoReturn

import atheris
import click

from tests.fuzz.all_targets import fuzz_all
from tests.fuzz.seed_files import MAX_BYTES

if TYPE_CHECKING:
    from tests.fuzz.session import Session

REPORT_SECONDS = 10.0
SEED = 20_261_122
INSTRUMENTED = [
    "indexer.atproto",
    "indexer.identity",
    "indexer.pds.native_reader",
    "indexer.pds.spool",
    "indexer.store.lexicon_columns",
    "indexer.sync",
]
INPUT_TIMEOUT = 300
"""Seconds after which libFuzzer gives an input up. Slow inputs are found by their CPU time, long before."""


@click.command()
@click.option("--target", default="all", show_default=True, help="A target of tests/fuzz/targets.py, or all of them.")
@click.option("--seconds", default=0, help="Stop after this time; fail if an outcome never occurred. 0: run on.")
@click.option("--seeds", default=100, show_default=True, help="Number of inputs to start from.")
@click.option(
    "--corpus",
    type=click.Path(file_okay=False, path_type=Path),
    help="Directory of inputs to continue with, and for new ones. Default: a temporary one.",
)
@click.argument("inputs", nargs=-1, type=click.Path(exists=True, dir_okay=False, path_type=Path))
def main(target: str, seconds: int, seeds: int, corpus: Path | None, inputs: tuple[Path, ...]) -> None:
    """Fuzz one target or all of them, or run only the INPUTS of one target.

    A finding ends the run: the input is written to the working directory, as crash-… .
    """
    if target == "all":
        sys.exit(fuzz_all(seconds, corpus))
    with atheris.instrument_imports(include=INSTRUMENTED, enable_loader_override=False):
        from tests.fuzz.session import Session  # noqa: PLC0415 - atheris instruments what is imported here
    session = Session(target, SEED)
    if inputs:
        with closing(session):
            session.replay(path.read_bytes() for path in inputs)
        return
    with tempfile.TemporaryDirectory(prefix="indexer-fuzz-") as directory:
        folder = corpus or Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        session.write_seeds(folder, seeds)
        arguments = [sys.argv[0], str(folder), f"-max_len={MAX_BYTES}", f"-timeout={INPUT_TIMEOUT}"]
        arguments += [f"-report_slow_units={INPUT_TIMEOUT}", f"-artifact_prefix=crash-{target}-"]
        atheris.Setup(arguments, _until_ended(session, target, seconds, seeds), custom_mutator=session.mutate)
        atheris.Fuzz()


def _until_ended(session: "Session", target: str, seconds: int, least: int) -> Callable[[bytes], None]:
    """Return a function that runs an input, and prints the report from time to time.

    After `seconds` and the `least` number of inputs, it ends the process, if `seconds` is not 0. A limit of libFuzzer
    would end it without the last check.
    """
    last = began = monotonic()
    count = 0

    def run(data: bytes) -> None:
        nonlocal last, count
        try:
            session.run(data)
        except Exception:  # noqa: BLE001 - each one is a finding, and ends the process
            _write_finding(data, target)
            _end(session, 1)
        count += 1
        now = monotonic()
        ended = 0 < seconds <= now - began and count >= least
        if ended or now - last > REPORT_SECONDS:
            last = now
            click.echo(f"{target}: {session.report()}")
        if ended:
            if session.unused:
                click.echo(f"FAILED: {target}: no input was {', none was '.join(session.unused)}", err=True)
            _end(session, 1 if session.unused else 0)

    return run


def _write_finding(data: bytes, target: str) -> None:
    """Write the input, and print the present error and the command that runs the input again."""
    path = Path(f"crash-{target}-{sha256(data).hexdigest()[:16]}")
    path.write_bytes(data)
    traceback.print_exc()
    click.echo(f"FOUND: {target}: run it again with: .venv/bin/python -m tests.fuzz --target {target} {path}", err=True)


def _end(session: "Session", code: int) -> NoReturn:
    """End the process. libFuzzer would take an ordinary exit for a crash."""
    session.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


main()
