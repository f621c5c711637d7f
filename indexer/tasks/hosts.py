"""Read the repo list of each host: add accounts that no relay shows, and follow those that no relay passes on.

A relay may withhold or omit accounts, and their commits. So the hosts that relays list (`listHosts`) are asked
themselves (`listRepos`), every `HostSettings.interval`. A list is not signed, and any host can list any DID: an account
is added only if its identity names the host, and revs are compared only of accounts that the host really has
(docs/protocol.md#lists-of-hosts).

Hosts with accounts that no relay passes on are *followed*: their lists are read again a minute later for each page.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import monotonic, time

import structlog
from aiolimiter import AsyncLimiter

from indexer.atproto.syntax import is_nsid, tid_micros
from indexer.concurrency.stage_progress import StageProgress, Work
from indexer.db import Database, DatabaseError
from indexer.db.crawls import CrawlProgress
from indexer.db.host_lists import HostCounts, HostedRepo, HostList
from indexer.db.periodic import DatabaseAttempt, run_periodically
from indexer.db.scope import CurrentScope
from indexer.errors import UnavailableError
from indexer.net.http.host_limits import registered_domain
from indexer.net.http.http_client import OutboundClient, host_of
from indexer.net.identity.identity_cache import IdentityCache
from indexer.net.new_accounts import NewAccounts
from indexer.net.pds.xrpc import ListedAccount, ListPage, MethodNotOfferedError, list_hosts
from indexer.reasons import Desync, FetchFailure
from indexer.sync.identity import MAX_HOSTS
from indexer.sync.policy import is_future
from indexer.sync.repo import StreamPoint, SyncStatus, hides
from indexer.sync.scope import Track
from indexer.sync.shard import Shard
from indexer.tasks.reconcile import UNLISTED, HostingStatusChecks, ListReport
from indexer.tasks.repo_list_pages import list_pages, repo_list_pages
from indexer.telemetry.conditions import ACCOUNTS_WITHHELD, Conditions
from indexer.telemetry.metrics import Metrics

MAX_HOSTS_OF_DOMAIN = 1_000
"""Hosts of one registered domain that the list of a relay may have."""
MAX_HOST_PAGES = 100
"""Pages of the list of a relay."""
MAX_PAGES = 2_000
"""Pages of the list of a host."""
MIN_PER_PAGE = 10
"""Accounts per page that a list of more than `MAX_SMALL_PAGES` pages must have."""
MAX_SMALL_PAGES = 100
MAX_UNPROVEN = 10_000
"""Accounts of a list, if they are most of it, whose identities do not name the host."""
MAX_BEHIND = 10_000
"""Accounts that seem to be behind, and wait for their second comparison. Then the rest of the list is read later."""
MAX_STATUSES = 100
"""Accounts about whose hosting status one visit asks the host."""
FOLLOWED, FOLLOWED_PER_DOMAIN = 100, 10
"""Maximum number of hosts that are followed, and of those of one registered domain. Hosts with the most accounts that
no relay passes on come first."""
ADDED_TOGETHER = 50
LOOKUP_SHARE = 0.25
"""Share of `INDEXER_PLC_RATE` for lookups of listed accounts."""
REFUSED_PER_HOUR = 100.0
"""Accounts that hosts of one registered domain may list without having them, in an hour. Then no more are looked up."""
RETRY_SECONDS = 300.0
"""Pause before the list of hosts of a relay is read again that could not be read."""
ATTEMPTS = 2
"""Attempts to fetch a page of a host."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class HostSettings:
    """Times in seconds, and sizes.

    Attributes:
        shard: The process reads the lists of relays and hosts whose names are in its buckets.
        interval: Between two readings of a list; 0: only a command reads them.
        first_wait: From the start of the process to the first reading of a list of hosts.
        poll: Between two looks for lists that are due.
        follow: Between two readings of the list of a followed host, for each page of it.
        settle: How long the stream may take to deliver events that a list already includes.
        visit: The longest time that a list is read at a stretch. Then other hosts have their turn.
        concurrency: Lists that are read at the same time.
        per_domain: The same for hosts of one registered domain.
    """

    shard: Shard = Shard()  # noqa: RUF009 - immutable
    interval: float = 86_400.0
    first_wait: float = 600.0
    poll: float = 5.0
    follow: float = 60.0
    settle: float = 30.0
    visit: float = 600.0
    concurrency: int = 16
    per_domain: int = 4


@dataclass(slots=True)
class _Visit:
    """The reading of one list at a stretch.

    Attributes:
        reading: The list, as it was saved last, with what is counted since then.
        work: The activity of the stage.
        ends_at: When other hosts have their turn (monotonic seconds).
        behind: The listed revs of accounts that seem to be behind, by DID.
        statuses: Accounts about whose hosting status the host may still be asked.
    """

    reading: HostList
    work: Work
    ends_at: float
    behind: dict[str, str] = field(default_factory=dict)
    statuses: int = MAX_STATUSES


@dataclass(eq=False)
class HostCrawl:
    """Reads the lists of hosts of the relays, and the repo lists of these hosts.

    Attributes:
        relays: The base URLs of the relays by the URLs of their streams.
        open_source: Returns the base URL of a relay to ask about accounts; None if none is known to answer.
        stream_point: Returns the last stored message of a source's stream, as for `HostingStatusChecks`.
        new_accounts: Accounts that are added in an hour for one registered domain; 0: no limit.
        lookup_rate: Accounts that are looked up in a second.
        stage: Its progress. Each look for lists, each request and each account is work.
        totals: What `HostLists.summary` returned last.
    """

    db: Database
    outbound: OutboundClient
    identities: IdentityCache
    metrics: Metrics
    conditions: Conditions
    scope: CurrentScope
    relays: Mapping[str, str]
    open_source: Callable[[], str | None]
    stream_point: Callable[[str], StreamPoint | None]
    settings: HostSettings
    new_accounts: float
    lookup_rate: float

    def __post_init__(self) -> None:
        self.stage = StageProgress("host lists")
        self.totals: dict[str, int] = {}
        self.added = 0
        self._looks, self._relay_requests = self.stage.add(), self.stage.add()
        self._visiting: dict[str, str] = {}
        self._not_before = dict.fromkeys(self.relays, monotonic() + self.settings.first_wait)
        self._added, self._refused = NewAccounts(self.new_accounts), NewAccounts(REFUSED_PER_HOUR)
        self._lookups = AsyncLimiter(1, 1 / self.lookup_rate)
        self._statuses = self.stage.add()
        parts = self.db, self.outbound, self.metrics, self.scope, self._statuses, self.identities
        self._at_relay = HostingStatusChecks(*parts, self.stream_point)
        self._at_host = HostingStatusChecks(*parts, sources_are_hosts=True)

    async def run(self) -> None:
        """Read lists when they are due. Only an exception that is a bug ends it."""
        settings = self.settings
        async with asyncio.TaskGroup() as group:
            relays = run_periodically(self._read_relays, settings.poll, self.stage.add())
            group.create_task(relays, name="lists of hosts")
            while True:
                with DatabaseAttempt(self._looks):
                    await self._visit_due(group, time() - settings.interval, follow=True)
                    self.totals = await self.db.host_lists.summary(settings.shard.buckets)
                await asyncio.sleep(settings.poll)

    async def read_all(self, on_look: Callable[[int, int], None]) -> CrawlProgress:
        """Read the lists of all relays, and then of all hosts, once; return the numbers of hosts and of failures.

        An interrupted call is continued by the next one. `on_look` is called again and again with the number of lists
        that were read, and of all lists.

        Raises:
            UnavailableError: No relay lists its hosts, or the database is unavailable.
        """
        failure: UnavailableError | None = None
        progress = await self.db.crawls.progress("hosts", "")
        if progress is None or progress.finished_at is not None:
            progress = CrawlProgress("hosts", "", began_at=time())
            await self.db.crawls.save(progress)
        for relay in self.relays:
            try:
                await self.read_hosts(relay)
            except DatabaseError:
                raise
            except UnavailableError as error:
                failure = error
                log.warning("hosts.relay-failed", relay=relay, error=str(error))
        summary = await self.db.host_lists.summary(self.settings.shard.buckets)
        if failure is not None and not summary["hosts"]:
            raise failure
        async with asyncio.TaskGroup() as group:
            while left := await self._visit_due(group, progress.began_at, follow=False):
                on_look(max(0, summary["hosts"] - left), summary["hosts"])
                await asyncio.sleep(self.settings.poll)
        summary = await self.db.host_lists.summary(self.settings.shard.buckets)
        done = progress.after_page(None, summary["hosts"], summary["failing"], time())
        await self.db.crawls.save(done)
        return done

    async def most_lacking(self) -> list[str]:
        """Return the followed hosts of this process: those with the most accounts that no relay passes on first."""
        settings, domains = self.settings, Counter[str]()
        hosts = []
        for host in await self.db.host_lists.most_lacking(settings.shard.buckets):
            domains[domain := registered_domain(host)] += 1
            if domains[domain] <= FOLLOWED_PER_DOMAIN:
                hosts.append(host)
        return hosts[: -(-FOLLOWED // settings.shard.count)]

    async def _read_relays(self) -> None:
        """Read the lists of hosts that are due. One that could not be read is due again a few minutes later."""
        settings = self.settings
        for relay, source in self.relays.items():
            if not settings.shard.owns(relay) or monotonic() < self._not_before[relay]:
                continue
            last, now = await self.db.crawls.progress("hosts", source), time()
            if last is not None and last.finished_at is not None and 0 <= now - last.finished_at < settings.interval:
                continue
            try:
                progress = await self.read_hosts(relay)
                log.info("hosts.listed", relay=relay, listed=progress.listed, hosts=progress.found)
            except DatabaseError:
                raise
            except UnavailableError as error:
                pause = settings.interval if isinstance(error, MethodNotOfferedError) else RETRY_SECONDS
                log.warning("hosts.relay-failed", relay=relay, error=str(error), retry_seconds=pause)
                self._not_before[relay] = monotonic() + pause

    async def read_hosts(self, relay: str) -> CrawlProgress:
        """Read the list of hosts of a relay, or the rest of it if that was interrupted; return the final progress.

        Raises:
            UnavailableError: The relay or the database is unavailable. The progress so far is saved.
        """
        source, domains = self.relays[relay], Counter[str]()
        progress = await self.db.crawls.progress("hosts", source)
        if progress is None or progress.finished_at is not None:
            progress = CrawlProgress("hosts", source, began_at=round(time(), 3))
        pages = list_pages(partial(list_hosts, self.outbound, source), source, progress.cursor, self._relay_requests)
        number = 0
        async for page in pages:
            number += 1
            domains.update(registered_domain(host.host) for host in page.entries)
            hosts = [one for one in page.entries if domains[registered_domain(one.host)] <= MAX_HOSTS_OF_DOMAIN]
            hosts = hosts[: MAX_HOSTS - progress.found]
            rows = [(one.host, one.url, one.accounts, one.status) for one in hosts]
            await self.db.host_lists.save_hosts(relay, rows, time())
            is_full = progress.found + len(hosts) >= MAX_HOSTS or number >= MAX_HOST_PAGES
            progress = progress.after_page(None if is_full else page.cursor, len(page.entries), len(hosts), time())
            await self.db.crawls.save(progress)
            if is_full:
                break
        await self.db.host_lists.remove_unlisted(relay, progress.began_at)
        return progress

    async def _visit_due(self, group: asyncio.TaskGroup, since: float, *, follow: bool) -> int:
        """Start to read lists that are due; return how many are due or being read."""
        settings = self.settings
        followed = await self.most_lacking() if follow else []
        before = set(self._visiting)  # a reading may end during the query, whose result has its list as due
        due = await self.db.host_lists.due(
            settings.shard.buckets, since, time(), followed, settings.follow if follow else 0.0
        )
        domains = Counter(self._visiting.values())
        for host in due:
            if len(self._visiting) >= settings.concurrency:
                break
            domain = registered_domain(host)
            if host not in before | self._visiting.keys() and domains[domain] < settings.per_domain:
                domains[domain] += 1
                self._visiting[host] = domain
                group.create_task(self._visit(host), name=f"repo list of {host}")
        return len({*due, *self._visiting})

    async def _visit(self, host: str) -> None:
        try:
            with self.stage.task() as work, DatabaseAttempt(work):
                await self.read_list(host, work)
        finally:
            del self._visiting[host]

    async def read_list(self, host: str, work: Work) -> None:
        """Read the repo list of a host, from the page where its reading stopped, and save what it counts."""
        reading = await self.db.host_lists.load(host)
        if reading is None:
            return
        visit = _Visit(reading, work, monotonic() + self.settings.visit)
        try:
            complete = await self._read_pages(visit)
            visit.reading.counts.behind += await self._compare_again(visit)
            if complete:
                await self._read_signals(visit)
                await self._complete(visit.reading)
            else:
                await self.db.host_lists.save_page(visit.reading, visit.reading.cursor, time())
        except DatabaseError:
            raise
        except UnavailableError as error:
            log.debug("host-list.failed", host=host, error=str(error))
            self.metrics.host_lists["failed"].inc()
            await self.db.host_lists.save_failure(host, str(error), time())

    async def _read_pages(self, visit: _Visit) -> bool:
        """Read pages until the list or the time is over; return True if the list was read to its end."""
        url, cursor, work = visit.reading.url, visit.reading.cursor, visit.work
        work.idle()  # each request is work, and a pause before a retry is not
        async for page in repo_list_pages(self.outbound, url, "", cursor, work, ATTEMPTS):
            work.moved()
            if not await self._take(page, visit):
                return False
            _check_size(visit.reading.counts)
            if page.cursor is not None:
                visit.reading = await self.db.host_lists.save_page(visit.reading, page.cursor, time())
                if monotonic() > visit.ends_at or len(visit.behind) > MAX_BEHIND:
                    return False
            work.idle()
        return True

    async def _take(self, page: ListPage[ListedAccount], visit: _Visit) -> bool:
        """Compare a page with the database, and add unknown accounts; return False if the time was over before."""
        host, counts, now = visit.reading.host, visit.reading.counts, time()
        listed = {account.did: account for account in page.entries}
        active = {did: account for did, account in listed.items() if account.active or not hides(account.status)}
        stored = await self.db.host_lists.hosted(list(listed))
        unknown = [did for did in active if did not in stored or stored[did].out_of_scope]
        if unknown and self.scope.scope.track is Track.ALL:
            if not await self._add(unknown, visit):
                return False
            stored = await self.db.host_lists.hosted(list(listed))
            unknown = []
        names = {repo.pds: host_of(repo.pds or "") for repo in stored.values()}
        ours = {did: repo for did, repo in stored.items() if repo.tracked and names[repo.pds] == host}
        here = {did: repo for did, repo in ours.items() if did in active}
        behind = {did: rev for did, repo in here.items() if (rev := self._newer_rev(repo, active[did], now))}
        # Withheld repos that are synchronized get the messages of the host's stream, and are compared again, too.
        withheld = {did: r for did, r in behind.items() if here[did].withheld and not here[did].is_synchronized}
        if withheld:
            await self.db.crawls.desynchronize_behind(withheld, now)
        if await self._is_caught_up():
            visit.behind |= {did: rev for did, rev in behind.items() if did not in withheld}
        await self._follow_statuses(ours, listed, visit)
        _count(counts, here.values(), next(iter(self.relays), ""))
        counts.pages += 1
        counts.accounts += len(active)
        counts.inactive += len(listed) - len(active)
        counts.unproven += len(active) - len(here) - len(unknown)
        return True

    def _newer_rev(self, repo: HostedRepo, account: ListedAccount, now: float) -> str | None:
        """Return the listed rev if the repo is behind it; None if it is not, or if that means nothing."""
        rev = account.rev
        if rev is None or not repo.active or rev <= (repo.rev or "") or is_future(rev, now, self.scope.policy.limits):
            return None
        return rev if repo.withheld or repo.sync_status != SyncStatus.DESYNCHRONIZED else None

    async def _is_caught_up(self) -> bool:
        """Return False while any process lags: then a repo only seems to be behind, as commits are still to come."""
        return time() - await self.db.gaps.caught_up_at(self.relays) <= self.settings.settle

    async def _compare_again(self, visit: _Visit) -> int:
        """Desynchronize the repos that the stream has not brought to their listed revs meanwhile; return how many."""
        if not visit.behind:
            return 0
        visit.work.idle()
        await asyncio.sleep(self.settings.settle)
        visit.work.moved()
        if not await self._is_caught_up():
            return 0
        behind = await self.db.crawls.desynchronize_behind(visit.behind, time())
        self.metrics.desynchronized[Desync.BEHIND].inc(behind)
        return behind

    async def _follow_statuses(
        self, ours: Mapping[str, HostedRepo], listed: Mapping[str, ListedAccount], visit: _Visit
    ) -> None:
        """Ask the host about accounts that it lists with another hosting status than the stored one.

        A relay may hide an account that is active on its host. So only a deactivation ends because of a list.
        """
        for did, repo in ours.items():
            account = listed[did]
            is_hidden = not account.active and hides(account.status)
            differs = repo.active if is_hidden else not repo.active and repo.hosting_status == "deactivated"
            if differs and visit.statuses:
                visit.statuses -= 1
                report = ListReport(account.active, account.status)
                await self._follow(self._at_host, visit.reading.url, did, report)
                visit.work.moved()

    async def _follow(self, checks: HostingStatusChecks, source: str, did: str, listed: ListReport) -> None:
        """Follow the hosting status of an account. If the source does not tell it, the next reconciliation asks."""
        try:
            await checks.follow(source, did, listed)
        except DatabaseError:
            raise
        except UnavailableError as error:
            log.debug("host-list.status-failed", did=did, error=str(error))
        finally:
            self._statuses.idle()

    async def _add(self, dids: Sequence[str], visit: _Visit) -> bool:
        """Track accounts whose identities name the host; return False if the time was over before."""
        for start in range(0, len(dids), ADDED_TOGETHER):
            if monotonic() > visit.ends_at:
                return False
            proven = [did for did in dids[start : start + ADDED_TOGETHER] if await self._is_hosted(did, visit)]
            if proven:
                await self._track(proven)
        return True

    async def _track(self, dids: Sequence[str]) -> None:
        """Track accounts, and ask a relay about each: it may hide or withhold them.

        If the scope changes meanwhile, the next reading adds what it wants.
        """
        added = await self.db.host_lists.add(dids, self.scope.scope) or 0
        self.added += added
        self.metrics.desynchronized[Desync.NEW].inc(added)
        for did in dids if added else ():
            if (relay := self.open_source()) is not None:
                await self._follow(self._at_relay, relay, did, UNLISTED)

    async def _is_hosted(self, did: str, visit: _Visit) -> bool:
        """Return True if the identity of an unknown account names the host, and its domain may add an account now.

        Hosts that list accounts without having them use up an allowance of their registered domain.
        """
        host, now = visit.reading.host, time()
        if self._refused.is_limited(host, now) or self._added.is_limited(host, now):
            return False
        visit.work.idle()
        await self._lookups.acquire()
        visit.work.moved()
        try:
            identity = await self.identities.lookup(did)
        except DatabaseError:
            raise
        except UnavailableError as error:
            log.debug("host-list.identity-failed", did=did, error=str(error))
            self._refused.add(host, now)
            return False
        is_hosted = identity.host == host
        (self._added if is_hosted else self._refused).add(host, now)
        return is_hosted

    async def _read_signals(self, visit: _Visit) -> None:
        """Add accounts with records of signal collections, if the host offers such lists."""
        scope = self.scope.scope
        for collection in filter(is_nsid, scope.signals.patterns if scope.signals else ()):
            visit.work.idle()
            pages = repo_list_pages(self.outbound, visit.reading.url, collection, None, visit.work, ATTEMPTS)
            number = 0
            try:
                async for page in pages:
                    number += 1
                    visit.work.moved()
                    dids = [account.did for account in page.entries]
                    stored = await self.db.host_lists.hosted(dids)
                    unknown = [did for did in dids if did not in stored or stored[did].out_of_scope]
                    if not await self._add(unknown, visit) or number >= MAX_PAGES:
                        return
                    visit.work.idle()
            except MethodNotOfferedError:
                return

    async def _complete(self, reading: HostList) -> None:
        """Save what the complete list counts, and report more accounts that no relay passes on."""
        lacking = await self.db.host_lists.save_complete(reading, time())
        self.metrics.host_lists["complete"].inc()
        host, counts = reading.host, reading.counts
        if lacking > reading.lacking:
            message = (
                f"{host}: relays do not pass on {lacking} of {counts.repos} accounts ({reading.lacking} before), and "
                f"withhold {counts.total_withheld} of them; its list is read again and again"
            )
            self.conditions.report(ACCOUNTS_WITHHELD, host, message=message, value=lacking)
        elif not lacking:
            self.conditions.end(ACCOUNTS_WITHHELD, host)


def _count(counts: HostCounts, repos: Iterable[HostedRepo], relay: str) -> None:
    """Count the listed repos of a page. `relay` counts as the one that withholds a repo if none is stored."""
    for repo in repos:
        counts.repos += 1
        counts.synchronized += repo.is_synchronized
        if repo.rev:
            counts.last_commit = max(counts.last_commit or 0.0, tid_micros(repo.rev) / 1e6)
        if repo.withheld:
            statuses = counts.withheld.setdefault(repo.hosting_relay or relay, {})
            statuses[repo.hosting_status or ""] = statuses.get(repo.hosting_status or "", 0) + 1


def _check_size(counts: HostCounts) -> None:
    """Raise UnavailableError if the list is longer than that of any honest host."""
    if counts.unproven > MAX_UNPROVEN and 2 * counts.unproven > counts.accounts:
        raise UnavailableError(FetchFailure.BAD_ANSWER, "the identities of most listed accounts do not name the host")
    listed = counts.accounts + counts.inactive
    if counts.pages >= MAX_PAGES or (counts.pages > MAX_SMALL_PAGES and listed < MIN_PER_PAGE * counts.pages):
        raise UnavailableError(FetchFailure.BAD_ANSWER, f"{counts.pages} pages with only {listed} accounts")
