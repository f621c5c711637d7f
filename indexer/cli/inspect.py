"""The command `inspect`: verify a CAR export offline, and list its records."""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, closing
from dataclasses import dataclass
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
from indexer.cli.command import ExitCode, command, json_lines_option, report_error
from indexer.cli.output import echo_result, show_progress
from indexer.core.spool import Spool
from indexer.errors import UnavailableError, UpstreamError
from indexer.reasons import FetchFailure
from indexer.sync.verify import verify_export_commit
from indexer.telemetry.log import printable

_CHUNK_BYTES = 1 << 18


class InspectedRecord(NamedTuple):
    """A record of an export. `problem` describes what is unusual about its value; it is empty for a usual value."""

    path: str
    cid: bytes
    problem: str


@dataclass(frozen=True, slots=True)
class InspectedExport:
    """A verified export, whose tree is complete.

    Attributes:
        signature_checked: True if the signature was verified with a key, False if no key was given.
        count: Number of records.
    """

    commit: Commit
    signature_checked: bool
    count: int
    block_of: BlockOf
    limits: Limits

    def records(self) -> Iterator[InspectedRecord]:
        """Yield the records in path order."""
        for path, cid in leaves(self.block_of, self.commit.data):
            yield InspectedRecord(path.decode(), cid, self._problem(path.decode(), self.block_of(cid)))

    def _problem(self, path: str, block: bytes | None) -> str:
        if block is None:
            return Problem.MISSING
        problem = decode_record(block, split_path(path)[0], self.limits).problem
        if problem is Problem.NOT_DAG_CBOR:
            try:
                decode_canonical(block)
            except CborError as error:
                return f"{problem}: {error}"
        return problem or ""


@asynccontextmanager
async def open_export(
    file: Path, key: PublicKey | None, limits: Limits, on_read: Callable[[int], None] = lambda _: None
) -> AsyncIterator[InspectedExport]:
    """Read and verify a CAR file. The memory use hardly depends on its size.

    `on_read` is called with the number of bytes that are read.

    Raises:
        OSError: The file cannot be read.
        UpstreamError: The file breaks a rule of the protocol.
        UnavailableError: The file is incomplete.
    """
    with closing(Spool(Path(gettempdir()), limits)) as spool:
        with file.open("rb") as opened:
            while chunk := opened.read(_CHUNK_BYTES):
                spool.write(chunk)
                on_read(opened.tell())
        spool.finish()
        yield _verify(spool.block, spool.root, key, limits)


def _verify(block_of: BlockOf, root: bytes, key: PublicKey | None, limits: Limits) -> InspectedExport:
    commit = verify_export_commit(root, block_of, key, did=None)
    count = 0
    for path, _ in walk(block_of, commit.data, limits):
        split_path(path.decode(errors="replace"))
        count += 1
    return InspectedExport(commit, key is not None, count, block_of, limits)


@command("inspect")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE.car")
@click.option(
    "--key", metavar="did:key:…", type=parse_key, help="Check the signature with this signing key of the account."
)
@json_lines_option
async def inspect_command(settings: Settings, *, file: Path, key: PublicKey | None, as_json: bool) -> int:
    """Verify a CAR export of a repo offline and list its records.

    The command hashes every block, decodes the commit and walks the whole tree. The exit code is 1, with the reason, if
    the export breaks a rule or is incomplete.
    """
    try:
        with ExitStack() as shown:
            size = file.stat().st_size  # noqa: ASYNC240 - nothing else runs
            progress = shown.enter_context(show_progress("bytes read", size))
            async with open_export(file, key, settings.limits, progress.update) as export:
                shown.close()  # stdout may be the terminal of the progress
                return _print_export(export, as_json=as_json)
    except (UpstreamError, UnavailableError) as error:
        return report_error(f"{file} is invalid: {error}", ExitCode.FAILED)


def _print_export(export: InspectedExport, *, as_json: bool) -> int:
    commit = export.commit
    facts: dict[str, Any] = {
        "did": commit.did,
        "rev": commit.rev,
        "commit": cid_text(commit.cid),
        "data": cid_text(commit.data),
        "records": export.count,
        "signature": "valid" if export.signature_checked else "not checked: no --key",
    }
    echo_result(facts, "\n".join(f"{name:<9}  {value}" for name, value in facts.items()) + "\n", as_json=as_json)
    missing = 0
    for record in export.records():
        missing += record.problem == Problem.MISSING
        result = {"cid": cid_text(record.cid), "path": record.path, "problem": record.problem or None}
        note = f"  ({printable(record.problem)})" if record.problem else ""
        echo_result(result, f"{result['cid']} {record.path}{note}", as_json=as_json)
    if missing:
        message = f"{FetchFailure.EXPORT_LACKS_RECORDS}: records that are not in the file: {missing}"
        return report_error(message, ExitCode.FAILED)
    return ExitCode.OK
