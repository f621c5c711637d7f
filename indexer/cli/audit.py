"""The command `audit`: fetch repos again and compare every record with the database. Nothing is written.

The chosen records or the export are fetched, as by a resync. The comparison covers what a resync would write: the head
of the repo, and the CID and the value of every record in the selected collections. Repos change during an audit. An
export that is older than the stored rev is fetched again, and the daemon gets some time to store a rev that is newer.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from decimal import Decimal
from time import monotonic, time
from typing import Any

import click

from indexer.app.clients import make_did_resolver, make_pds_client, open_outbound_client, stored_policy
from indexer.app.settings import Settings
from indexer.atproto.cid import CID_BYTES, cid_text
from indexer.atproto.crypto import PublicKey, parse_did_key
from indexer.atproto.record import Problem, decode_record
from indexer.cli.arguments import parse_did
from indexer.cli.command import CommandError, ExitCode, command, json_lines_option
from indexer.cli.database import connect_database
from indexer.cli.output import CommandProgress, counts_text, echo_json, json_wanted, to_json
from indexer.db import Database, DatabaseError
from indexer.db.exports import ConsistentRead, RecordRow
from indexer.errors import BrokenInvariantError, UnavailableError, UpstreamError
from indexer.net.identity.did_resolver import DidResolver
from indexer.net.pds.pds_client import PdsClient
from indexer.reasons import FetchFailure, Rejection
from indexer.resync.sparse import SparseDownload, SparseFetch
from indexer.sync.changes import selected_path
from indexer.sync.export import ExportReader, RangeSnapshot, Snapshot
from indexer.sync.policy import Policy, is_future
from indexer.sync.repo import Head, Repo, SyncStatus
from indexer.sync.resync import Difference, SnapshotDiff, without_value
from indexer.sync.scope import filter_of
from indexer.telemetry.log import printable

DEFAULT_SAMPLE = 100
MAX_CONCURRENCY = 16
"""Repos at a time. Each may hold a database connection."""
MAX_FETCHES = 5
"""How often an export is fetched that is older than the stored rev."""
CATCH_UP_SECONDS = 10.0
"""How long the daemon may take to store the rev of the export."""
POLL_SECONDS = 0.2
"""Interval between two checks of the stored rev."""
MAX_LISTED_DIFFERENCES = 100
"""Differences of one repo that are listed; the rest is only counted."""
NOT_IN_DATABASE = "not in the database"
"""Reason why a repo is skipped that the database does not have."""
BEING_FETCHED = "records of added collections are still being fetched"
"""Reason why a repo is not compared completely that lacks records of a collection that the scope added."""
BEING_DELETED = "records of removed collections are still being deleted"
"""Reason why a repo is not compared completely that has records of a collection that the scope removed."""


@dataclass(slots=True)
class RepoAudit:
    """The result of one repo.

    Attributes:
        proofs: Number of compared records in the database by how they were proven.
        listed: The first differences: the AT-URI of the record, or the DID of the repo, and what differs.
        reason_skipped: Why the repo, or a part of it, was not compared: the kind of reason, then a colon and details.
    """

    did: str
    records: int = 0
    proofs: dict[str, int] = field(default_factory=dict)
    differences: int = 0
    listed: list[dict[str, str]] = field(default_factory=list)
    reason_skipped: str | None = None

    def add_difference(self, subject: str, description: str) -> None:
        """Count a difference, and list it if it is one of the first."""
        self.differences += 1
        if len(self.listed) < MAX_LISTED_DIFFERENCES:
            self.listed.append({"subject": subject, "description": description})


class RepoComparison:
    """Compares a snapshot with stored records that come in chunks, in path order. Holds one chunk at a time.

    Call `compare_chunk` for each chunk, then `finish`, which completes `result`.
    """

    def __init__(self, snapshot: Snapshot, policy: Policy, scope_version: int) -> None:
        """Begin the comparison. `scope_version` is that of the stored repo (`Repo.scope_version`)."""
        self.result = RepoAudit(snapshot.did)
        self._snapshot = snapshot
        self._policy = policy
        selected = (entry for entry in snapshot.records() if selected_path(entry[0], policy))
        self._diff = SnapshotDiff(entry for entry in selected if policy.scope.selects(snapshot.did, entry[0]))
        self._complete = filter_of(policy.scope.added_until(scope_version))
        self._not_compared = Counter[str]()

    def compare_chunk(self, chunk: Sequence[RecordRow]) -> None:
        """Compare the next stored records.

        Raises:
            BrokenInvariantError: The stored records are out of path order.
        """
        self.result.records += len(chunk)
        _add_counts(self.result.proofs, Counter([record.proof or "unknown" for record in chunk]))
        matches = {record.path: self._value_matches(record) for record in chunk}
        # A wrong value is marked like a missing one, so that the merge reports it.
        entries = [(path, without_value(cid) if matches[path] is False else cid) for path, cid, *_ in chunk]
        for difference in self._diff.compare(entries):
            matches.pop(difference.path, None)
            self._add_difference(difference)
        self._not_compared[FetchFailure.EXPORT_LACKS_RECORDS] += [*matches.values()].count(None)

    def finish(self) -> None:
        """Compare the rest of the snapshot."""
        for difference in self._diff.remaining():
            self._add_difference(difference)
        for reason, records in (+self._not_compared).most_common(1):
            self.result.reason_skipped = f"{reason}: {records} records"

    def _value_matches(self, record: RecordRow) -> bool | None:
        """Return True if the stored value is the value of the record's block; None if the export lacks the block.

        If values are not to be stored, only values from before that setting are compared.
        """
        path, cid, value, problem, original, _ = record
        if record[2:5] == (None, None, None) and not self._policy.store_values:
            return True
        block = self._snapshot.block_of(cid)
        if block is None:
            return True if problem == Problem.MISSING else None
        if problem == Problem.OMITTED:
            return True
        if problem == Problem.TOO_MANY_ITEMS:  # it also depends on the other records of its commit
            return original == block
        expected = decode_record(block, _collection(path), self._policy.limits)
        return (problem, original) == expected[1:] and equal_json(value, expected.json)

    def _add_difference(self, difference: Difference) -> None:
        path, stored, exported = difference
        collection = _collection(path)
        if stored is None:
            if self._complete is None or not self._complete.matches(collection):
                self._not_compared[BEING_FETCHED] += 1
                return
            self.result.records += 1
            description = "missing in the database"
        elif exported is None:
            if not self._policy.scope.selects(self.result.did, path):
                self._not_compared[BEING_DELETED] += 1
                return
            description = "not in the repo"
        elif stored == without_value(exported):
            description = "different value"
        else:
            description = f"different CID: database {cid_text(stored[:CID_BYTES])}, host {cid_text(exported)}"
        self.result.add_difference(f"at://{self.result.did}/{path.decode()}", description)


def equal_json(one: str | None, other: str | None) -> bool:
    """Return True if both texts are equal as `jsonb`: numbers by value, objects in any order. None equals only None."""
    if one is None or other is None:
        return one is other
    try:
        return bool(_parse(one) == _parse(other))
    except RecursionError:  # the indexer never stores values that are nested so deeply
        return False


def _parse(text: str) -> Any:
    """Return the value with exact numbers. They are in tuples, because in Python the number 1 equals True."""
    return json.loads(text, parse_int=lambda number: (Decimal(number),), parse_float=lambda number: (Decimal(number),))


def _collection(path: bytes) -> str:
    return path.partition(b"/")[0].decode()


class SkippedRepoError(Exception):
    """The repo cannot be compared in its present state. The message is the reason for `RepoAudit.reason_skipped`."""


@dataclass(frozen=True, slots=True)
class Auditor:
    """Audits repos. Threads verify and compare, so that the event loop is free for the downloads."""

    db: Database
    resolver: DidResolver
    pds: PdsClient
    policy: Policy
    sparse: SparseFetch
    follows_hints: bool

    async def audit(self, did: str) -> RepoAudit:
        """Return the result of a repo.

        Raises:
            DatabaseError: The database does not answer.
        """
        try:
            return await self._fetch_and_compare(did)
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

    async def _fetch_and_compare(self, did: str) -> RepoAudit:
        """Fetch and compare the repo, again if what is fetched is older than the stored rev."""
        _comparable_head((await self.db.repos.load([did])).get(did))
        identity = await self.resolver.resolve(did)
        if identity.signing_key is None or identity.pds is None:
            raise UnavailableError(FetchFailure.IDENTITY_MISSING, identity.problem or "")
        key = parse_did_key(identity.signing_key)
        fetches = 0
        while True:
            fetches += 1
            try:
                if fetches == 1 and (chosen := await self._fetch_chosen(did, identity.pds, key)):
                    return await self._compare_at_same_rev(chosen)
                async with self.pds.open_export(did, identity.pds) as download:
                    await download.fetch()
                    return await self._compare_at_same_rev(await self._verify(did, download.reader, key))
            except UnavailableError as error:
                if error.reason is not FetchFailure.EXPORT_STALE or fetches == MAX_FETCHES:
                    raise

    async def _fetch_chosen(self, did: str, host: str, key: PublicKey) -> Snapshot | None:
        """Return the proven records of the chosen collections; None if the export is to be fetched."""
        policy = replace(self.policy, store_values=True)  # values from before that setting are compared, too
        with suppress(UpstreamError, UnavailableError):
            if download := await self.sparse.fetch(did, host, policy):
                return await self._verify(did, download, key)
        return None

    async def _verify(self, did: str, blocks: ExportReader | SparseDownload, key: PublicKey) -> Snapshot:
        snapshot = await asyncio.to_thread(blocks.verify, did, key, self.policy.limits)
        if is_future(snapshot.head.rev, time(), self.policy.limits):
            raise UpstreamError(Rejection.FUTURE_REV, snapshot.head.rev)
        return snapshot

    async def _compare_at_same_rev(self, snapshot: Snapshot) -> RepoAudit:
        """Wait until the database has the rev of the snapshot, then compare. If it takes too long, report that.

        A database that follows hints, or chosen records with their proof, need not have the rev, only the records:
        commits to other collections change the rev, and no hint tells of them.
        """
        deadline = monotonic() + CATCH_UP_SECONDS
        exported, may_be_behind = snapshot.head, self.follows_hints or isinstance(snapshot, RangeSnapshot)
        while True:
            is_late = monotonic() >= deadline
            async with self.db.exports.consistent_read(snapshot.did) as read:
                repo = await read.repo()
                stored = _comparable_head(repo)
                if stored.rev > exported.rev:
                    raise UnavailableError(FetchFailure.EXPORT_STALE, f"{exported.rev} < {stored.rev}")
                if stored.rev == exported.rev or may_be_behind:
                    result = await self._compare(snapshot, stored, read, repo.scope_version if repo else 0)
                    if stored.rev == exported.rev or not result.differences or is_late:
                        return result
            if is_late:
                result = RepoAudit(snapshot.did)
                result.add_difference(snapshot.did, f"behind: database {stored.rev}, host {exported.rev}")
                return result
            await asyncio.sleep(POLL_SECONDS)

    async def _compare(self, snapshot: Snapshot, stored: Head, read: ConsistentRead, scope_version: int) -> RepoAudit:
        comparison = RepoComparison(snapshot, self.policy, scope_version)
        if stored.rev == snapshot.head.rev and stored.data != snapshot.head.data:
            description = f"different data: database {cid_text(stored.data)}, host {cid_text(snapshot.head.data)}"
            comparison.result.add_difference(snapshot.did, description)
        async for chunk in read.records():
            await asyncio.to_thread(comparison.compare_chunk, chunk)
        await asyncio.to_thread(comparison.finish)
        return comparison.result


async def audit(settings: Settings, db: Database, dids: Iterable[str], report: Callable[[RepoAudit], None]) -> None:
    """Call `report` with the result of each repo as soon as it is complete. Send no requests to paused hosts.

    Raises:
        DatabaseError: The database does not answer.
    """
    async with open_outbound_client(settings) as outbound:
        outbound.hosts.restore(await db.hosts.load())
        resolver, pds = make_did_resolver(settings, outbound), make_pds_client(settings, outbound)
        sparse = SparseFetch(pds, settings.sparse_resync)
        follows_hints = settings.continuing(await db.gaps.cursors()).upstream == "jetstream"
        auditor = Auditor(db, resolver, pds, await stored_policy(settings, db), sparse, follows_hints)
        waiting = iter(dids)

        async def work() -> None:
            for did in waiting:
                report(await auditor.audit(did))

        try:
            async with asyncio.TaskGroup() as group:
                for number in range(audit_concurrency(settings)):
                    group.create_task(work(), name=f"audit {number}")
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None


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


def _add_counts(counts: dict[str, int], more: Mapping[str, int]) -> None:
    counts.update({name: counts.get(name, 0) + count for name, count in more.items()})


@dataclass(slots=True)
class AuditSummary:
    """The sum of the results of many repos.

    Attributes:
        repos: Number of repos compared completely.
        equal: Number of those without a difference.
        proofs: Number of stored records by how they were proven.
        skipped: Number of the other repos.
        reasons_skipped: Their number by kind of reason.
    """

    repos: int = 0
    equal: int = 0
    records: int = 0
    proofs: dict[str, int] = field(default_factory=dict)
    differences: int = 0
    reasons_skipped: dict[str, int] = field(default_factory=dict)
    skipped: int = 0

    def add(self, result: RepoAudit) -> None:
        """Add the result of a repo."""
        self.records += result.records
        self.differences += result.differences
        _add_counts(self.proofs, result.proofs)
        if result.reason_skipped is not None:
            self.skipped += 1
            _add_counts(self.reasons_skipped, {result.reason_skipped.partition(":")[0]: 1})
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
async def audit_command(settings: Settings, *, dids: tuple[str, ...], sample: int | None) -> int:
    """Fetch repos again and compare every record with the database.

    Nothing is changed. Each repo, or only its chosen records with proof, is fetched from its own host, verified,
    and compared as of one point in time.

    Print each difference (the first hundred of a repo), each repo that could not be compared, and a summary with the
    number of stored records by proof. The exit code is
    5 if there are differences, otherwise 1 if a repo in the database could not be compared or none is synchronized,
    otherwise 4 if a DID is not in the database.
    """
    if dids and sample is not None:
        raise click.UsageError("Give either DIDs or --sample, not both.")
    summary = AuditSummary()

    def report(result: RepoAudit) -> None:
        summary.add(result)
        if lines := [to_json(asdict(result))] if json_wanted() else _result_lines(result):
            progress.stop()  # stdout may be the same terminal
            click.echo("\n".join(lines))
            progress.start()
        progress.show(summary.repos + summary.skipped, note=f"differences: {summary.differences:,}")

    async with connect_database(settings, connections=audit_concurrency(settings), readonly=True) as db:
        repos = list(dict.fromkeys(dids)) or await db.reports.sample_synchronized(sample or DEFAULT_SAMPLE)
        if not repos:
            raise CommandError("no repo is synchronized, so there is nothing to compare", ExitCode.FAILED)
        with CommandProgress("repos", len(repos)) as progress:
            await audit(settings, db, repos, report)
    if echo_json({"summary": asdict(summary)}):
        return summary.exit_code
    click.echo(f"repos: {summary.repos:,} compared, {summary.equal:,} equal")
    click.echo(f"records: {summary.records:,} compared, differences: {summary.differences:,}")
    if summary.proofs:
        click.echo(f"proofs: {counts_text(summary.proofs)}")
    if summary.skipped:
        click.echo(f"not compared: {summary.skipped:,} ({counts_text(summary.reasons_skipped)})")
    return summary.exit_code


def _result_lines(result: RepoAudit) -> list[str]:
    lines = [f"{printable(one['subject'])} {printable(one['description'])}" for one in result.listed]
    if more := result.differences - len(result.listed):
        lines.append(f"{printable(result.did)} differences that are not listed: {more:,}")
    if result.reason_skipped is not None:
        lines.append(f"{printable(result.did)} not compared: {printable(result.reason_skipped)}")
    return lines
