"""The command `inspect`: verify a CAR export offline, and list its records."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import gettempdir
from typing import Any, NamedTuple

import click

from indexer.app.settings import Settings
from indexer.atproto.cbor import CborError, decode_canonical
from indexer.atproto.cid import cid_text
from indexer.atproto.commit import Commit
from indexer.atproto.crypto import PublicKey
from indexer.atproto.limits import Limits
from indexer.atproto.mst import BlockOf, leaves, walk
from indexer.atproto.record import Problem, decode_record
from indexer.atproto.syntax import split_path
from indexer.cli.arguments import parse_key
from indexer.cli.command import CommandError, ExitCode, command, json_lines_option
from indexer.cli.output import echo_result
from indexer.core.spool import Spool
from indexer.errors import UnavailableError, UpstreamError
from indexer.reasons import FetchFailure
from indexer.sync.verify import verify_signed
from indexer.telemetry.log import printable

_CHUNK_BYTES = 1 << 18


class InspectedRecord(NamedTuple):
    """A record of an export. `problem` describes what is unusual about its value; it is empty for a usual value."""

    path: str
    cid: bytes
    problem: str


class InspectedExport(NamedTuple):
    """A verified export, whose tree is complete: its commit, the number of its records, and these in path order."""

    commit: Commit
    total: int
    records: Iterator[InspectedRecord]


@contextmanager
def open_export(file: Path, key: PublicKey | None, limits: Limits) -> Iterator[InspectedExport]:
    """Read and verify a CAR file. The memory use hardly depends on its size.

    Raises:
        OSError: The file cannot be read.
        UpstreamError: The file breaks a rule of the protocol.
        UnavailableError: The file is incomplete.
    """
    with closing(Spool(Path(gettempdir()), limits)) as spool:
        with file.open("rb") as opened:
            while chunk := opened.read(_CHUNK_BYTES):
                spool.write(chunk)
        spool.finish()
        commit = verify_signed(spool.root, spool.block, key, did=None)
        count = 0
        for count, (path, _) in enumerate(walk(spool.block, commit.data, limits), 1):  # noqa: B007 - the last number
            split_path(path.decode(errors="replace"))
        yield InspectedExport(commit, count, _records(spool.block, commit.data, limits))


def _records(block_of: BlockOf, data: bytes, limits: Limits) -> Iterator[InspectedRecord]:
    for key, cid in leaves(block_of, data):
        path, block = key.decode(), block_of(cid)
        problem: str = Problem.MISSING
        if block is not None:
            problem = decode_record(block, split_path(path)[0], limits).problem or ""
        if block is not None and problem == Problem.NOT_DAG_CBOR:
            try:
                decode_canonical(block)
            except CborError as error:
                problem = f"{problem}: {error}"
        yield InspectedRecord(path, cid, problem)


@command("inspect")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE.car")
@click.option(
    "--key", metavar="did:key:…", type=parse_key, help="Check the signature with this signing key of the account."
)
@json_lines_option
async def inspect_command(settings: Settings, *, file: Path, key: PublicKey | None) -> None:
    """Verify a CAR export of a repo offline and list its records.

    The exit code is 1, with the reason, if the export breaks a rule or is incomplete.
    """
    try:
        with open_export(file, key, settings.limits) as export:
            _print_export(export, "not checked: no --key" if key is None else "valid")
    except (UpstreamError, UnavailableError) as error:
        raise CommandError(f"{file} is invalid: {error}", ExitCode.FAILED) from error


def _print_export(export: InspectedExport, signature: str) -> None:
    commit = export.commit
    facts: dict[str, Any] = {
        "did": commit.did,
        "rev": commit.rev,
        "commit": cid_text(commit.cid),
        "data": cid_text(commit.data),
        "records": export.total,
        "signature": signature,
    }
    echo_result(facts, "\n".join(f"{name:<9}  {value}" for name, value in facts.items()) + "\n")
    missing = 0
    for record in export.records:
        missing += record.problem == Problem.MISSING
        result = {"cid": cid_text(record.cid), "path": record.path, "problem": record.problem or None}
        note = f"  ({printable(record.problem)})" if record.problem else ""
        echo_result(result, f"{result['cid']} {record.path}{note}")
    if missing:
        message = f"{FetchFailure.EXPORT_LACKS_RECORDS}: records that are not in the file: {missing}"
        raise CommandError(message, ExitCode.FAILED)
