"""The command `audit`."""

from contextlib import aclosing

import click

from indexer.app.settings import Settings
from indexer.cli.arguments import DID, WholeNumber
from indexer.cli.audit import audit_concurrency, open_auditor
from indexer.cli.audit_result import AuditSummary, RepoAudit
from indexer.cli.command import ExitCode, command, json_lines_option, report_error
from indexer.cli.database import connect_database
from indexer.cli.output import show_progress, to_json
from indexer.telemetry.log import printable

DEFAULT_SAMPLE = 100


@command("audit")
@click.argument("dids", nargs=-1, metavar="[DID…]", type=DID)
@click.option(
    "--sample",
    type=WholeNumber(1, 1_000_000),
    metavar="N",
    help=f"Audit N random synchronized repos. Default without DIDs: {DEFAULT_SAMPLE}.",
)
@json_lines_option
async def audit_command(settings: Settings, *, dids: tuple[str, ...], sample: int | None, as_json: bool) -> int:
    """Fetch repos again and compare every record with the database.

    Nothing is changed. Each repo is fetched from its own host, verified completely, and compared as of one point in
    time: the head, the records, their CIDs and their values. If the host has a newer rev than the database, the daemon
    gets some seconds to store it; the daemon need not run.

    Print one line for each difference (the first hundred of a repo), one line for each repo that could not be compared,
    and a summary. With --json, print one line for each repo, and the summary as the last one. The exit code is 5 if
    there are differences, otherwise 1 if a repo in the database could not be compared or none is synchronized,
    otherwise 4 if a DID is not in the database.
    """
    if dids and sample is not None:
        raise click.UsageError("Give either DIDs or --sample, not both.")
    summary = AuditSummary()
    async with (
        connect_database(settings, connections=audit_concurrency(settings), readonly=True) as db,
        open_auditor(settings, db) as auditor,
    ):
        repos = list(dict.fromkeys(dids)) or await db.reports.sample_synchronized(sample or DEFAULT_SAMPLE)
        if not repos:
            return report_error("no repo is synchronized, so there is nothing to compare", ExitCode.FAILED)
        with show_progress("repos", len(repos)) as progress:
            async with aclosing(auditor.audit(repos)) as results:
                async for result in results:
                    summary.add(result)
                    if lines := [to_json(result.to_dict())] if as_json else _result_lines(result):
                        with progress.hidden():
                            click.echo("\n".join(lines))
                    progress.update(summary.repos + summary.skipped, note=f"differences: {summary.differences:,}")
    if as_json:
        click.echo(to_json({"summary": summary.to_dict()}))
    else:
        _print_summary(summary)
    return _exit_code(summary)


def _result_lines(result: RepoAudit) -> list[str]:
    lines = [f"{printable(subject)} {printable(description)}" for subject, description in result.listed]
    if more := result.differences - len(result.listed):
        lines.append(f"{printable(result.did)} differences that are not listed: {more:,}")
    if result.reason_skipped is not None:
        lines.append(f"{printable(result.did)} not compared: {printable(result.reason_skipped)}")
    return lines


def _print_summary(summary: AuditSummary) -> None:
    click.echo(f"repos: {summary.repos:,} compared, {summary.equal:,} equal")
    click.echo(f"records: {summary.records:,} compared, differences: {summary.differences:,}")
    if summary.skipped:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in sorted(summary.reasons_skipped.items()))
        click.echo(f"not compared: {summary.skipped:,} ({reasons})")


def _exit_code(summary: AuditSummary) -> ExitCode:
    if summary.differences:
        return ExitCode.DIFFERENT
    if summary.skipped > summary.unknown:
        return ExitCode.FAILED
    return ExitCode.UNKNOWN if summary.unknown else ExitCode.OK
