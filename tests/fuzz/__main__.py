"""`python -m tests.fuzz`: give mutated inputs to the code that reads what comes from outside, and check what it does.

atheris guides the mutations by the coverage of the Python code: an input that reaches a new branch is mutated further.
An input is a finding if it causes an undocumented error, a result that differs from that of the native core or of an
obvious reference, or a cost out of proportion to its size. tests/fuzz/targets.py has the table of targets.
"""

import os
import sys
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from hashlib import sha256
from math import inf
from pathlib import Path
from time import monotonic
from typing import NoReturn

import atheris
import click

from tests.fuzz.all_targets import fuzz_all
from tests.fuzz.corpus import MAX_BYTES, open_corpus, open_folder
from tests.fuzz.session import Session

REPORT_SECONDS = 10.0
SEED = 20_261_122
INSTRUMENTED = [
    "indexer.atproto",
    "indexer.core.core",
    "indexer.core.spool",
    "indexer.net.identity",
    "indexer.net.http.content_decoding",
    "indexer.net.pds.pds_client",
    "indexer.net.pds.xrpc",
    "indexer.net.relay",
    "indexer.readers",
    "indexer.app.settings",
    "indexer.db.lexicons",
    "indexer.sync",
]
MANY = 10
"""A run must have every outcome if it has this many times the least number of inputs. A shorter run, on a slow machine,
may lack one by chance."""
INPUT_TIMEOUT = 300
"""Seconds after which libFuzzer gives an input up. Slow inputs are found by their CPU time, long before."""


@click.command()
@click.option("--target", default="all", show_default=True, help="A target of tests/fuzz/targets.py, or all of them.")
@click.option(
    "--seconds",
    default=0,
    help="Stop after this time, which includes the start; fail if an outcome never occurred in many inputs. 0: run on.",
)
@click.option("--seeds", default=100, show_default=True, help="Number of inputs to start from.")
@click.option(
    "--corpus",
    type=click.Path(file_okay=False, path_type=Path),
    help="Directory with a directory for each target: inputs to continue with, and new ones. Default: .fuzz-corpus in "
    "the repository, or with --seconds a temporary one.",
)
@click.argument("inputs", nargs=-1, type=click.Path(exists=True, dir_okay=False, path_type=Path))
def main(target: str, seconds: int, seeds: int, corpus: Path | None, inputs: tuple[Path, ...]) -> None:
    """Fuzz one target or all of them, or run only the INPUTS of one target.

    A finding ends the run: the input is written to the working directory, as crash-… .
    """
    began = monotonic()
    if target == "all":
        sys.exit(fuzz_all(seconds, corpus))
    assert not any(name.startswith("indexer.") for name in sys.modules), "imported without the counters of coverage"
    with atheris.instrument_imports(include=INSTRUMENTED, enable_loader_override=False):
        session = Session(target, SEED)  # imports the target
    with ExitStack() as resources:
        resources.callback(session.close)
        if inputs:
            session.replay(path.read_bytes() for path in inputs)
            return
        folder = open_folder(resources.enter_context(open_corpus(corpus, seconds)), target)
        session.write_seeds(folder, seeds)
        least = 2 * len(list(folder.iterdir()))  # all inputs to start from, and as many new ones
        arguments = [sys.argv[0], str(folder), f"-max_len={MAX_BYTES}", f"-timeout={INPUT_TIMEOUT}"]
        arguments += [f"-report_slow_units={INPUT_TIMEOUT}", f"-artifact_prefix=crash-{target}-"]
        arguments += [f"-seed={SEED}"] if seconds else []
        ends_at = began + seconds if seconds else inf
        run = _until_ended(session, target, ends_at, least, resources)
        atheris.Setup(arguments, run, custom_mutator=session.mutate)
        atheris.Fuzz()


def _until_ended(
    session: Session, target: str, ends_at: float, least: int, resources: ExitStack
) -> Callable[[bytes], None]:
    """Return a function that runs an input, and prints the report from time to time.

    At `ends_at` (monotonic seconds), but not before the `least` number of inputs, it ends the process. A limit of
    libFuzzer would end it without the last check.
    """
    last = monotonic()
    count = 0

    def run(data: bytes) -> None:
        nonlocal last, count
        try:
            session.run(data)
        except Exception:  # noqa: BLE001 - each one is a finding, and ends the process
            _write_finding(data, target)
            _end(resources, 1)
        count += 1
        now = monotonic()
        ended = now >= ends_at and count >= least
        if ended or now - last > REPORT_SECONDS:
            last = now
            click.echo(f"{target}: {session.report()}")
        if ended:
            unused = session.unused if count >= MANY * least else []
            if unused:
                click.echo(f"FAILED: {target}: no input was {', none was '.join(unused)}", err=True)
            _end(resources, 1 if unused else 0)

    return run


def _write_finding(data: bytes, target: str) -> None:
    """Write the input, and print the present error and the command that runs the input again."""
    path = Path(f"crash-{target}-{sha256(data).hexdigest()[:16]}")
    path.write_bytes(data)
    traceback.print_exc()
    click.echo(f"FOUND: {target}: run it again with: .venv/bin/python -m tests.fuzz --target {target} {path}", err=True)


def _end(resources: ExitStack, code: int) -> NoReturn:
    """End the process. libFuzzer would take an ordinary exit for a crash."""
    resources.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


main()
