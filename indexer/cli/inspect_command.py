"""The command `inspect`."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from indexer.app.settings import Settings
from indexer.atproto.cid import cid_text
from indexer.atproto.crypto import PublicKey
from indexer.atproto.record import Problem
from indexer.cli.arguments import KEY
from indexer.cli.command import ExitCode, command, json_lines_option, report_error
from indexer.cli.inspect_car import InspectedExport, open_export
from indexer.cli.output import echo_result, progress_console
from indexer.cli.progress_bars import show_progress
from indexer.errors import UnavailableError, UpstreamError
from indexer.reasons import FetchFailure
from indexer.telemetry.log import printable


@command("inspect")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE.car")
@click.option("--key", metavar="did:key:…", type=KEY, help="Check the signature with this signing key of the account.")
@json_lines_option
async def inspect_command(settings: Settings, *, file: Path, key: PublicKey | None, as_json: bool) -> int:
    """Verify a CAR export of a repo offline and list its records.

    The command hashes every block, decodes the commit and walks the whole tree. The exit code is 1, with the reason, if
    the export breaks a rule or is incomplete.
    """
    try:
        with ExitStack() as shown:
            size = file.stat().st_size  # noqa: ASYNC240 - nothing else runs
            progress = shown.enter_context(show_progress("bytes read", size, progress_console()))
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
