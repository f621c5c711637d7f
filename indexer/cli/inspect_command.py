"""The command `inspect`."""

from pathlib import Path

import click

from indexer.atproto.cid import cid_text
from indexer.atproto.crypto import PublicKey
from indexer.atproto.record import Problem
from indexer.cli.arguments import KEY
from indexer.cli.command import ExitCode, command, report_error
from indexer.cli.inspect_car import InspectedExport, open_export
from indexer.errors import UnavailableError, UpstreamError
from indexer.monitoring.log import printable
from indexer.reasons import FetchFailure
from indexer.settings import Settings


@command("inspect")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE.car")
@click.option("--key", metavar="did:key:…", type=KEY, help="Check the signature with this signing key of the account.")
async def inspect_command(settings: Settings, *, file: Path, key: PublicKey | None) -> int:
    """Verify a CAR export of a repo offline and list its records.

    The command hashes every block, decodes the commit and walks the whole tree. The exit code is 1, with the reason, if
    the export breaks a rule or is incomplete.
    """
    try:
        async with open_export(file, key, settings.limits) as export:
            return _print_export(export)
    except (UpstreamError, UnavailableError) as error:
        return report_error(f"{file} is invalid: {error}", ExitCode.FAILED)


def _print_export(export: InspectedExport) -> int:
    commit = export.commit
    click.echo(f"did        {commit.did}\nrev        {commit.rev}\ncommit     {cid_text(commit.cid)}")
    click.echo(f"data       {cid_text(commit.data)}\nrecords    {export.count}")
    click.echo(f"signature  {'valid' if export.signature_checked else 'not checked: no --key'}\n")
    missing = 0
    for record in export.records():
        missing += record.problem == Problem.MISSING
        note = f"  ({printable(record.problem)})" if record.problem else ""
        click.echo(f"{cid_text(record.cid)} {record.path}{note}")
    if missing:
        message = f"{FetchFailure.EXPORT_LACKS_RECORDS}: {missing} records are not in the file"
        return report_error(message, ExitCode.FAILED)
    return ExitCode.OK
