"""The command `audit`: fetch repos again and compare every record with the database. Nothing is written.

The comparison covers what a resync would write: the head of the repo, and the CID and the value of every record in the
selected collections. Repos change during an audit. An export that is older than the stored rev is fetched again, and
the daemon gets some time to store a rev that is newer.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager
from dataclasses import asdict, dataclass, field
from itertools import islice
from time import monotonic, time

import click

from indexer.app.clients import make_did_resolver, make_pds_client, open_outbound_client, stored_policy
from indexer.app.settings import Settings
from indexer.atproto.cid import cid_text
from indexer.atproto.crypto import PublicKey, parse_did_key
from indexer.cli.arguments import parse_did
from indexer.cli.audit_comparison import RepoAudit, RepoComparison
from indexer.cli.command import ExitCode, command, json_lines_option, report_error
from indexer.cli.database import connect_database
from indexer.cli.output import show_progress, to_json
from indexer.db import Database, DatabaseError
from indexer.db.exports import ConsistentRead
from indexer.errors import BrokenInvariantError, UnavailableError, UpstreamError
from indexer.net.identity.did_resolver import DidResolver
from indexer.net.pds.pds_client import PdsClient
from indexer.reasons import FetchFailure, Rejection
from indexer.sync.policy import Policy, is_future
from indexer.sync.repo import Head, Repo, SyncStatus
from indexer.sync.verify import Snapshot
from indexer.telemetry.log import printable

DEFAULT_SAMPLE = 100
MAX_CONCURRENCY = 16
"""Repos at a time. Each may hold a database connection, and one thread compares all of them."""
NOT_IN_DATABASE = "not in the database"
"""Reason why a repo is skipped that the database does not have."""


@dataclass(frozen=True, slots=True)
class AuditTimeouts:
    """Limits of the wait until database and host have the same rev of a repo.

    Attributes:
        max_fetches: How often an export is fetched that is older than the stored rev.
        catch_up_seconds: How long the daemon may take to store the rev of the export.
        poll_seconds: Interval between two checks of the stored rev.
    """

    max_fetches: int = 5
    catch_up_seconds: float = 10.0
    poll_seconds: float = 0.2


class SkippedRepoError(Exception):
    """The repo cannot be compared in its present state. The message is the reason for `RepoAudit.reason_skipped`."""


@dataclass(frozen=True, slots=True)
class Auditor:
    """Audits several repos at a time.

    Attributes:
        thread: Verifies and compares, so that the event loop is free for the downloads.
    """

    db: Database
    resolver: DidResolver
    pds: PdsClient
    policy: Policy
    concurrency: int
    timeouts: AuditTimeouts
    thread: ThreadPoolExecutor

    async def audit(self, dids: Iterable[str]) -> AsyncGenerator[RepoAudit]:
        """Yield the result of each repo as soon as it is complete.

        Raises:
            DatabaseError: The database does not answer.
        """
        waiting = iter(dids)
        running: set[asyncio.Task[RepoAudit]] = set()
        try:
            while True:
                for did in islice(waiting, self.concurrency - len(running)):
                    running.add(asyncio.create_task(self._audit_repo(did), name=f"audit of {did}"))
                if not running:
                    return
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    running.remove(task)
                    yield task.result()
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _audit_repo(self, did: str) -> RepoAudit:
        try:
            return await self._fetch_until_current(did)
        except DatabaseError:
            raise
        except (SkippedRepoError, UnavailableError) as error:
            return RepoAudit(did, reason_skipped=str(error))
        except UpstreamError as error:
            return RepoAudit(did, reason_skipped=f"{FetchFailure.EXPORT_REJECTED}: {error}")
        except BrokenInvariantError as error:  # stored rows that form no valid path, or a damaged index
            result = RepoAudit(did)
            result.add_difference(did, str(error))
            return result

    async def _fetch_until_current(self, did: str) -> RepoAudit:
        """Fetch and compare the repo, again if the export is older than the stored rev."""
        _comparable_head((await self.db.repos.load([did])).get(did))
        identity = await self.resolver.resolve(did)
        if identity.signing_key is None or identity.pds is None:
            raise UnavailableError(FetchFailure.IDENTITY_MISSING, identity.problem or "")
        key = parse_did_key(identity.signing_key)
        fetches = 0
        while True:
            fetches += 1
            try:
                return await self._fetch_and_compare(did, identity.pds, key)
            except UnavailableError as error:
                if error.reason is not FetchFailure.EXPORT_STALE or fetches == self.timeouts.max_fetches:
                    raise

    async def _fetch_and_compare(self, did: str, host: str, key: PublicKey) -> RepoAudit:
        loop = asyncio.get_running_loop()
        async with self.pds.fetch_export(did, host) as export:
            snapshot = await loop.run_in_executor(self.thread, export.verify, did, key, self.policy.limits)
            if is_future(snapshot.head.rev, time(), self.policy.limits):
                raise UpstreamError(Rejection.FUTURE_REV, snapshot.head.rev)
            return await self._compare_at_same_rev(snapshot)

    async def _compare_at_same_rev(self, snapshot: Snapshot) -> RepoAudit:
        """Wait until the database has the rev of the snapshot, then compare. If it takes too long, report that."""
        deadline = monotonic() + self.timeouts.catch_up_seconds
        exported = snapshot.head
        while True:
            async with self.db.exports.consistent_read(snapshot.did) as read:
                repo = await read.repo()
                stored = _comparable_head(repo)
                if stored.rev > exported.rev:
                    raise UnavailableError(FetchFailure.EXPORT_STALE, f"{exported.rev} < {stored.rev}")
                if stored.rev == exported.rev:
                    return await self._compare(snapshot, stored, read, repo.scope_version if repo else 0)
            if monotonic() >= deadline:
                result = RepoAudit(snapshot.did)
                result.add_difference(snapshot.did, f"behind: database {stored.rev}, host {exported.rev}")
                return result
            await asyncio.sleep(self.timeouts.poll_seconds)

    async def _compare(self, snapshot: Snapshot, stored: Head, read: ConsistentRead, scope_version: int) -> RepoAudit:
        loop = asyncio.get_running_loop()
        comparison = RepoComparison(snapshot, self.policy, scope_version)
        if stored.data != snapshot.head.data:
            description = f"different data: database {cid_text(stored.data)}, host {cid_text(snapshot.head.data)}"
            comparison.result.add_difference(snapshot.did, description)
        async for chunk in read.records():
            await loop.run_in_executor(self.thread, comparison.compare_chunk, chunk)
        await loop.run_in_executor(self.thread, comparison.finish)
        return comparison.result


@asynccontextmanager
async def open_auditor(
    settings: Settings, db: Database, timeouts: AuditTimeouts | None = None
) -> AsyncIterator[Auditor]:
    """Open an auditor with the clients that the settings describe. It sends no requests to hosts that are paused."""
    async with open_outbound_client(settings) as outbound:
        outbound.hosts.restore(await db.hosts.load())
        with ThreadPoolExecutor(1, "audit") as thread:
            yield Auditor(
                db,
                make_did_resolver(settings, outbound),
                make_pds_client(settings, outbound),
                await stored_policy(settings, db),
                audit_concurrency(settings),
                timeouts or AuditTimeouts(),
                thread,
            )


def audit_concurrency(settings: Settings) -> int:
    """Return the number of repos that are audited at a time, each with a database connection."""
    return min(settings.resync_workers, MAX_CONCURRENCY)


def _comparable_head(repo: Repo | None) -> Head:
    """Return the head of a repo that can be compared; raise `SkippedRepoError` otherwise."""
    if repo is None:
        raise SkippedRepoError(NOT_IN_DATABASE)
    if not repo.tracked:
        raise SkippedRepoError("not tracked")
    if not repo.active:
        raise SkippedRepoError(f"inactive: {repo.hosting_status or 'reported by the relay'}")
    if repo.sync_status is not SyncStatus.SYNCHRONIZED or repo.head is None:
        raise SkippedRepoError(f"not synchronized: {repo.sync_reason}")
    return repo.head


@dataclass(slots=True)
class AuditSummary:
    """The sum of the results of many repos.

    Attributes:
        repos: Number of repos compared completely.
        equal: Number of those without a difference.
        skipped: Number of the other repos.
        reasons_skipped: Their number by kind of reason.
    """

    repos: int = 0
    equal: int = 0
    records: int = 0
    differences: int = 0
    reasons_skipped: dict[str, int] = field(default_factory=dict)
    skipped: int = 0

    def add(self, result: RepoAudit) -> None:
        """Add the result of a repo."""
        self.records += result.records
        self.differences += result.differences
        if result.reason_skipped is not None:
            self.skipped += 1
            kind = result.reason_skipped.partition(":")[0]
            self.reasons_skipped[kind] = self.reasons_skipped.get(kind, 0) + 1
        else:
            self.repos += 1
            self.equal += not result.differences

    @property
    def exit_code(self) -> ExitCode:
        """The exit code: that of the worst result."""
        unknown = self.reasons_skipped.get(NOT_IN_DATABASE, 0)
        if self.differences:
            return ExitCode.DIFFERENT
        if self.skipped > unknown:
            return ExitCode.FAILED
        return ExitCode.UNKNOWN if unknown else ExitCode.OK


@command("audit")
@click.argument("dids", nargs=-1, metavar="[DID…]", type=parse_did)
@click.option(
    "--sample",
    type=click.IntRange(1, 1_000_000),
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
                    if lines := [to_json(asdict(result))] if as_json else _result_lines(result):
                        with progress.hidden():
                            click.echo("\n".join(lines))
                    progress.update(summary.repos + summary.skipped, note=f"differences: {summary.differences:,}")
    if as_json:
        click.echo(to_json({"summary": asdict(summary)}))
    else:
        _print_summary(summary)
    return summary.exit_code


def _result_lines(result: RepoAudit) -> list[str]:
    lines = [f"{printable(one.subject)} {printable(one.description)}" for one in result.listed]
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
