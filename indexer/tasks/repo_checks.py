"""Compare each repo with its own host, because a Jetstream may omit events.

The rules are in docs/protocol.md#comparison-with-hosts.

Answers and lists are not signed, so a newer rev only causes a resync. The answers of a host count only for accounts
whose identity names it, so false ones harm no others. Each process compares the repos of its shard. A pass, which
compares each of them once, begins again after an interruption.
"""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from time import monotonic, time
from typing import TypeVar

import structlog

from indexer.concurrency.bounded_dict import BoundedDict
from indexer.concurrency.stage_progress import StageProgress
from indexer.db import Database
from indexer.db.crawls import HostedDid
from indexer.db.periodic import DatabaseAttempt
from indexer.db.scope import CurrentScope
from indexer.errors import UnavailableError
from indexer.net.http.http_client import OutboundClient, host_of
from indexer.net.identity.identity_cache import IdentityCache
from indexer.net.pds.xrpc import RepoStatus, fetch_host_status
from indexer.reasons import Desync, FetchFailure
from indexer.sync.account import plan_active, plan_hidden
from indexer.sync.hints import JETSTREAM
from indexer.sync.policy import is_future
from indexer.sync.repo import DELETED, Repo, SyncStatus
from indexer.sync.shard import Shard
from indexer.tasks.reconcile import HostingStatusChecks
from indexer.tasks.repo_list_pages import ListedAccounts, repo_list_pages
from indexer.telemetry.metrics import Metrics

PAGE_COST = 100
"""Repos of one host for each page of its list that is read: a page has the bytes of so many answers."""
HASHES = 36
"""Number of hashes of the filter of listed accounts. By chance, about one in 10^14 repos is skipped, another in each
pass."""
AT_ONCE = 4
"""Maximum number of concurrent requests to one host."""
MAX_ASKED = 10_000
"""Maximum number of repos that wait to be compared out of turn, and of those that wait for one host."""
ASKED_AT_ONCE = 16
"""Maximum number of hosts that are asked out of turn at the same time, with one request each."""
MAX_FAILED = 10_000
"""Number of repos without a usable answer above which their second attempt begins."""
HOST_SHARE = 1 / 8
"""Part of the interval that each host may use, for its list (at most half of it), its answers and its pauses."""

T = TypeVar("T")

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RepoCheckSettings:
    """Times in seconds, and sizes.

    Attributes:
        shard: Only repos of this shard are compared.
        interval: A pass begins half of it after the last one began, so that a pass may take as long.
        retry: Pause before the second attempt to compare repos.
        failure_pause: Pause before a pass begins again after the database failed.
        page_size: Maximum number of repos in memory.
        concurrency: Maximum number of hosts that are asked at the same time.
        min_rate: Repos per second below which a host is slow.
    """

    shard: Shard = Shard()  # noqa: RUF009 - immutable
    interval: float = 3_600.0
    retry: float = 120.0
    failure_pause: float = 5.0
    page_size: int = 50_000
    concurrency: int = 64
    min_rate: float = 0.8


@dataclass(slots=True)
class _Turn:
    """The progress of one host in a pass.

    Attributes:
        left: Number of its repos that are still to be compared; at least 1.
        share: Seconds that it may use, however slow it is.
        seconds: Seconds that it has used.
        compared: Number of repos that were compared in these seconds.
    """

    left: int
    share: float
    seconds: float = 0.0
    compared: int = 0

    def add(self, compared: int, seconds: float) -> None:
        """Add repos that were compared, and the time that this took."""
        self.left = max(1, self.left - compared)
        self.compared += compared
        self.seconds += seconds


@dataclass(eq=False)
class RepoChecks:
    """Compares all repos with their hosts in passes, and single repos out of turn.

    Attributes:
        stage: Its progress. It moves with each answer.
        began_at: When the last complete pass began (Unix seconds); None if that is not known.
        compared: Number of repos that the present pass has compared.
        total: Number of all repos of this pass.
    """

    db: Database
    outbound: OutboundClient
    metrics: Metrics
    scope: CurrentScope
    identities: IdentityCache
    settings: RepoCheckSettings

    def __post_init__(self) -> None:
        self.stage = StageProgress("repo checks")
        self._requests = self.stage.add()
        parts = self.db, self.outbound, self.metrics, self.scope, self.stage, self.identities
        self._statuses = HostingStatusChecks(*parts, sources_are_hosts=True)
        self.began_at: float | None = None
        self.compared = self.total = 0
        self._asked = BoundedDict[str, None](MAX_ASKED)
        self._is_asked = asyncio.Event()
        self._asking: dict[str, BoundedDict[str, None]] = {}  # repos that wait, by the host that is being asked
        self._turns: dict[str | None, _Turn] = {}  # of one pass
        self._ends_at = 0.0  # when each host that has used its share is left (monotonic seconds)

    @property
    def lacking(self) -> str | None:
        """The reason why repos may be older than the interval allows; None if a pass that began in it has ended."""
        if self.began_at is not None and abs(time() - self.began_at) <= self.settings.interval:
            return None
        progress = f"{self.compared:,} of {self.total:,} repos are compared"
        return f"no comparison with hosts that began in the last {self.settings.interval:g} s has ended: {progress}"

    def ask(self, did: str) -> None:
        """Compare a repo soon. If too many wait, the oldest one is left to the next pass."""
        self._asked[did] = None
        self._is_asked.set()

    async def run(self) -> None:
        """Compare repos forever. Only an exception that is a bug ends it."""
        async with asyncio.TaskGroup() as group:
            for _ in range(ASKED_AT_ONCE):
                group.create_task(self._compare_asked(), name="repo check out of turn")
            while True:
                began = monotonic()
                with DatabaseAttempt(self.stage) as attempt:
                    if self.began_at is None:
                        self.began_at = await self._stored_beginning()
                    await self.compare_all()
                left = began + self.settings.interval / 2 - monotonic()
                await asyncio.sleep(self.settings.failure_pause if attempt.error else max(0.0, left))

    async def compare_all(self) -> None:
        """Compare all repos of the shard with their hosts once, and store when that began."""
        began, buckets = round(time(), 3), self.settings.shard.buckets  # the database stores only microseconds
        self.compared, self._turns, self._ends_at = 0, {}, monotonic() + self.settings.interval / 2
        last_gap = max((gap.id for gap in await self.db.gaps.load_open()), default=0)
        hosts = await self.db.crawls.count_hosted(buckets, PAGE_COST)
        self.total = sum(hosts.values())
        large = [(pds, repos) for pds, repos in hosts.items() if pds is not None]
        listed = ListedAccounts(sum(repos for _, repos in large), HASHES)
        await self._for_each(large, lambda host: self._read_list(*host, listed))
        seconds = (self.total - self.compared) / (self.settings.min_rate * self.settings.concurrency)
        self._ends_at = max(self._ends_at, monotonic() + seconds)
        after: str | None = ""
        failed: list[HostedDid] = []
        while after is not None:
            page = await self.db.crawls.hosted_repos(after, buckets, self.settings.page_size)
            after = page[-1].did if len(page) == self.settings.page_size else None
            unlisted = list[HostedDid]()
            for start in range(0, len(page), 1_000):
                unlisted += [repo for repo in page[start : start + 1_000] if repo.did not in listed]
                await asyncio.sleep(0)  # each takes tens of microseconds
            failed += await self._ask_hosts(unlisted)
            if failed and (after is None or len(failed) > MAX_FAILED):
                self.stage.idle()
                retry = min(self.settings.retry, self.settings.interval / 30)  # less than the share of a host
                await asyncio.sleep(retry)
                for repo in failed:  # the pause counts for the hosts that cause it
                    self._turns[repo.pds].add(0, retry / len(failed))
                await self._give_up(await self._ask_hosts(failed, last=True))
                failed = []
        await self.db.gaps.save_caught_up(JETSTREAM, self.settings.shard, began, last_gap)
        self.began_at = began
        log.info("repo-checks.done", repos=self.compared, seconds=round(time() - began, 1))

    async def _stored_beginning(self) -> float | None:
        """Return when the last complete pass of this shard began, in any process; None if that is not known."""
        own = JETSTREAM, str(self.settings.shard)
        cursors = await self.db.gaps.cursors()
        return next((one.caught_up_at for one in cursors if (one.relay, one.shard) == own), None)

    async def _compare_asked(self) -> None:
        while True:
            await self._is_asked.wait()
            if not self._asked:
                self._is_asked.clear()
                continue
            did, _ = self._asked.popitem(last=False)
            with self.stage.task() as work, suppress(UnavailableError):
                stored = (await self.db.host_lists.hosted([did])).get(did)
                host = host_of(stored.pds or "") if stored else ""
                is_free = host not in self._asking
                waiting = self._asking.setdefault(host, BoundedDict(MAX_ASKED))
                waiting[did] = None
                while is_free and waiting:
                    await self._compare(HostedDid(waiting.popitem(last=False)[0], None), last=True)
                    work.moved()
                if is_free:
                    del self._asking[host]

    async def _read_list(self, pds: str, repos: int, listed: ListedAccounts) -> None:
        """Compare the repos on the first pages of the list of a host, and add those that were compared to `listed`."""
        host, pages, share = host_of(pds), repos // PAGE_COST, HOST_SHARE * self.settings.interval
        turn, began = _Turn(repos, share / 2), monotonic()
        with suppress(UnavailableError):  # otherwise the host is asked about each repo
            async for page in repo_list_pages(self.outbound, pds, "", None, self._requests, attempts=1):
                stored = await self.db.host_lists.hosted([account.did for account in page.entries])
                ours = {did: repo for did, repo in stored.items() if repo.tracked and host_of(repo.pds or "") == host}
                known = {
                    one.did: one.rev if one.active else None
                    for one in page.entries
                    if one.did in ours
                    and one.did not in listed
                    and one.active == ours[one.did].active
                    and not ours[one.did].withheld
                    and (not one.active or ours[one.did].sync_status != SyncStatus.DESYNCHRONIZED)
                    and (not one.active or self._is_possible(one.rev))
                }
                await self._desynchronize({did: r for did, r in known.items() if r and r > (ours[did].rev or "")})
                for did in known:
                    listed.add(did)
                self.compared += len(known)
                self.stage.moved()
                turn.add(len(known), monotonic() - began - turn.seconds)
                if (pages := pages - 1) <= 0 or self._is_late(turn):
                    break
        self._turns[pds] = _Turn(turn.left, share - min(share / 2, monotonic() - began))

    async def _ask_hosts(self, repos: Iterable[HostedDid], *, last: bool = False) -> list[HostedDid]:
        """Compare repos with their hosts. Give up those of late hosts; return the others without a usable answer."""
        hosts = defaultdict[str | None, list[HostedDid]](list)
        failed, late = list[HostedDid](), list[HostedDid]()
        for repo in repos:
            hosts[repo.pds].append(repo)

        async def ask(repos: Sequence[HostedDid]) -> None:
            failed.extend(await self._ask_host(repos, late, last=last))

        await self._for_each(sorted(hosts.values(), key=len, reverse=True), ask)
        await self._give_up(late)
        return failed

    async def _ask_host(self, repos: Sequence[HostedDid], late: list[HostedDid], *, last: bool) -> list[HostedDid]:
        """Compare repos with their host; return those without a usable answer. The rest of a late one: `late`."""
        failed = list[HostedDid]()
        turn = self._turns.setdefault(
            repos[0].pds, _Turn(min(PAGE_COST, len(repos)), HOST_SHARE * self.settings.interval)
        )
        for start in (0, *range(1, len(repos), AT_ONCE)):  # after a pause, one request must succeed first
            if self._is_late(turn):
                late += repos[start:]
                break
            batch, began = repos[start : start + AT_ONCE] if start else repos[:1], monotonic()
            errors = await asyncio.gather(*[self._compare(repo, last=last) for repo in batch])
            failed += [repo for repo, error in zip(batch, errors, strict=True) if error is not None]
            self.compared += errors.count(None)
            self.stage.moved()
            throttled = [error for error in errors if error and error.reason is FetchFailure.THROTTLED]
            pause = max((error.retry_after or 0.0 for error in throttled), default=0.0)
            turn.add(errors.count(None), monotonic() - began + pause)
            if pause and not self._is_late(turn, pause):
                self.stage.idle()
                await asyncio.sleep(pause)
        return failed

    def _is_late(self, turn: _Turn, pause: float = 0.0) -> bool:
        """Return True if a host has used its share, and would after this pause (seconds) not end in time."""
        seconds_left = self._ends_at - monotonic() - pause
        is_slow = turn.compared < self.settings.min_rate * turn.seconds
        would_end = turn.left * turn.seconds <= turn.compared * seconds_left
        return turn.seconds > turn.share and (seconds_left <= 0 or (is_slow and not would_end))

    async def _compare(self, hosted: HostedDid, *, last: bool) -> UnavailableError | None:
        """Compare a repo with its host; return the error if there is no usable answer."""
        did, pds = hosted
        try:
            repo = (await self.db.repos.load([did])).get(did)
            if repo is None or not repo.tracked:
                return None
            if pds is None or last:  # the first attempt may have shown that the account has moved
                pds = (await self.identities.lookup(did)).pds
            await self._ask(repo, pds, last=last)
        except UnavailableError as error:
            log.debug("repo-checks.failed", did=did, error=str(error))
            return error
        return None

    async def _ask(self, repo: Repo, pds: str | None, *, last: bool) -> None:
        """Ask the host, and change the row by its answer.

        The answer that the host does not have the repo means that the account is deleted only in the last attempt:
        the first one may be an error that soon ends.

        Raises:
            UnavailableError: The host does not answer, or its answer is not usable.
        """
        if pds is None:
            raise UnavailableError(FetchFailure.IDENTITY_MISSING, "no host is known")
        absent: UnavailableError | None = None
        try:
            answer = await fetch_host_status(self.outbound, pds, repo.did)
        except UnavailableError as error:
            if error.reason is not FetchFailure.REPO_NOT_FOUND:
                raise
            answer, absent = RepoStatus(False, DELETED), error
        plan, rev = partial(self._plan, answer=answer), answer.rev or ""
        if plan(repo) is not repo:
            if not await self._statuses.is_host(pds, repo.did):
                raise UnavailableError(FetchFailure.REPO_NOT_FOUND, f"{pds} is not known to host the account")
            if absent is not None and not last:
                raise absent
            await self._statuses.change(repo, plan)
        elif repo.active and not self._is_possible(rev):
            raise UnavailableError(FetchFailure.BAD_ANSWER, f"the rev is {rev!r}")
        elif repo.active and (repo.head is None or rev > repo.head.rev):
            await self._desynchronize({repo.did: rev})

    async def _give_up(self, failed: Sequence[HostedDid]) -> None:
        """Desynchronize the synchronized repos among these, of which no usable answer came.

        An export that is being fetched may be older than this pass, so the host of its repo is asked once more.
        """
        unknown = 0
        for did, _ in failed:
            if await self._statuses.mark_unknown(did):
                unknown += 1
            elif (repo := (await self.db.repos.load([did])).get(did)) and repo.sync_status is SyncStatus.IN_PROGRESS:
                self.ask(did)
            self.stage.moved()
        self.compared += len(failed)
        if unknown:
            log.warning("repo-checks.status-unknown", accounts=unknown)

    async def _for_each(self, items: Iterable[T], work: Callable[[T], Awaitable[None]]) -> None:
        """Do the work for each item, for at most `concurrency` of them at the same time."""
        left = iter(items)

        async def take() -> None:
            for item in left:
                await work(item)

        async with asyncio.TaskGroup() as group:
            for _ in range(self.settings.concurrency):
                group.create_task(take(), name="repo checks")

    def _plan(self, repo: Repo, answer: RepoStatus) -> Repo:
        if answer.active:
            return plan_active(repo, time())
        return plan_hidden(repo, answer.status, time(), self.scope.policy.deletion_grace)

    def _is_possible(self, rev: str | None) -> bool:
        return rev is not None and rev > "" and not is_future(rev, time(), self.scope.policy.limits)

    async def _desynchronize(self, revs: Mapping[str, str]) -> None:
        if revs:
            behind = await self.db.crawls.desynchronize_behind(revs, time())
            self.metrics.desynchronized[Desync.BEHIND].inc(behind)
