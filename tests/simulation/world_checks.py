"""Compare the database, while the daemon runs and afterwards, with the truth about the world."""

import json
from collections import Counter
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

import asyncpg

from tests.database_checks import assert_log_gives_records
from tests.simulation.expected_dead_letters import dead_letters_of
from tests.simulation.simulated_world import World
from tests.simulation.world_oracle import TrueRepo, Truth

_REPOS = """
    select did, sync_status, sync_reason, rev, hosting_status, active, last_failure as failure,
        coalesce(next_attempt_at = 'infinity', false) as parked
    from indexer.repo
"""
_RECORDS = "select did, collection || '/' || rkey, atproto.cid_text(cid) from indexer.record"
_COMMITS = """
    with checked as (delete from simulation.moment returning number, gaps, cursors, revs)
    select gaps, cursors, revs from checked order by number
"""
# A repo that changes while it is compared with the lists of repos that have records of an added collection is fetched.
_CHANGED_BEFORE_WIDENED = """
    select distinct on (did) did, exists (
        select from simulation.state before
        where before.did = widened.did and before.number < widened.number
            and before.scope > (select min(scope) from simulation.state)
    )
    from simulation.state widened where reason = 'scope-widened' order by did, number
"""
_VALUES = "select did, collection || '/' || rkey, value from atproto.records"
_REJECTED = "select relay, seq, did, reason from atproto.rejected order by id"
_REPEATED = """
    select did, collection, rkey, rev from (
        select *, lag(cid) over (partition by did, collection, rkey order by seq) as cid_before
        from atproto.changes where rkey is not null
    ) change where action = 'update' and cid = cid_before
"""
"""Logged updates that change nothing. No commit of a world has one, so each is a change that was logged twice."""
_OPEN_GAPS = "select count(*) from atproto.gaps where closed_at is null"


@dataclass(frozen=True)
class Snapshot:
    """The content of the database at one moment."""

    repos: Mapping[str, asyncpg.Record]
    records: Mapping[str, Mapping[str, str]]
    open_gaps: int

    @classmethod
    async def take(cls, sql: asyncpg.Connection) -> "Snapshot":
        async with sql.transaction(isolation="repeatable_read", readonly=True):
            repos = {row["did"]: row for row in await sql.fetch(_REPOS)}
            records: dict[str, dict[str, str]] = {did: {} for did in repos}
            for did, path, cid in await sql.fetch(_RECORDS):
                records[did][path] = cid
            return cls(repos, records, await sql.fetchval(_OPEN_GAPS))


@dataclass
class Checks:
    """The checks of one run.

    Attributes:
        truth: The truth at the end.
        violations: What was wrong while the daemon ran.
        snapshots: How many snapshots were checked.
        commits: How many transactions were checked.
        fetched_before: How often each repo was fetched before the first episode.
    """

    world: World
    truth: Truth
    violations: list[str] = field(default_factory=list)
    snapshots: int = 0
    commits: int = 0
    fetched_before: Counter[str] = field(default_factory=Counter)

    def check_snapshot(self, snapshot: Snapshot) -> None:
        """Check what must hold at every moment: each repo has the records of the world at its rev."""
        self.snapshots += 1
        for did, repo in snapshot.repos.items():
            revs = self.truth.repos.get(did, TrueRepo()).revs
            if repo["rev"] not in (None, *revs):
                self.violations.append(f"{did} has the rev {repo['rev']}, which does not exist")
                continue
            expected = self.truth.cids(revs.get(repo["rev"], {}), constant=True)
            stored = {path: cid for path, cid in snapshot.records[did].items() if self.truth.always_selects(path)}
            if stored != expected:
                state = f"{repo['sync_status']} at {repo['rev']}"
                self.violations.append(f"{did} is {state} with {stored}, not {expected}")

    async def check_commits(self, sql: asyncpg.Connection) -> None:
        """Check what must hold whenever a transaction commits: no synchronized repo is stale unless a gap is open."""
        for gaps, cursors, revs in await sql.fetch(_COMMITS):
            self.commits += 1
            self.check_commit(gaps, json.loads(cursors or "{}"), json.loads(revs or "{}"))

    def check_commit(self, open_gaps: int, cursors: Mapping[str, int], revs: Mapping[str, str]) -> None:
        """Check one state: the number of open gaps, the cursors by relay, the revs of synchronized active repos."""
        sent = {} if open_gaps else self._latest_sent(cursors)
        for did, rev in revs.items():
            if rev < sent.get(did, ""):
                self.violations.append(f"{did} is synchronized at {rev}, but {sent[did]} was sent")

    def _latest_sent(self, cursors: Mapping[str, int]) -> dict[str, str]:
        """Return the latest rev of each account in the messages that the cursors have passed.

        A cursor in a later sequence has passed all messages of the earlier ones, read or not. A message that is signed
        with a former key proves nothing if the daemon reads it after the key has changed.
        """
        latest: dict[str, str] = {}
        for relay in self.world.relays:
            if (seq := cursors.get(relay.websocket_url)) is None:
                continue
            present = relay.sequence_of(seq)
            passed = [sent for sent in relay.sequences[present] if sent.seq <= seq]
            for sent in [*(sent for earlier in relay.sequences[:present] for sent in earlier), *passed]:
                if sent.kind in ("#commit", "#sync") and sent.did and sent.payload:
                    latest[sent.did] = max(latest.get(sent.did, ""), sent.payload["rev"])
        return {did: rev for did, rev in latest.items() if rev >= self.world.key_revs.get(did, "")}

    def differences(self, snapshot: Snapshot, truth: Truth) -> list[str]:
        """Return the differences from the truth about the world so far."""
        found = [f"{did} is unknown" for did in truth.repos.keys() - snapshot.repos.keys()]
        found += [f"{did} does not exist" for did in snapshot.repos.keys() - truth.repos.keys()]
        if snapshot.open_gaps:
            found.append(f"{snapshot.open_gaps} gaps are open")
        for did in truth.repos.keys() & snapshot.repos.keys():
            row, true = snapshot.repos[did], truth.repos[did]
            state = row["active"], row["hosting_status"]
            is_refused = true.refusal is not None and row["rev"] is None and row["parked"]
            if is_refused and row["failure"] == true.refusal:
                continue
            if state != (true.status is None, true.status):
                found.append(f"{did} has the hosting status {state}, not {true.status}")
            if true.status == "deleted" and (row["rev"] is not None or snapshot.records[did]):
                found.append(f"{did} is deleted, and not erased")
            if true.status is not None:  # it may have missed commits, which nobody can fetch
                continue
            final = true.final
            # The next attempt to fetch a desynchronized repo may be under way at any time.
            status = "desynchronized" if row["sync_status"] == "in-progress" else row["sync_status"]
            reached = status, row["sync_reason"], row["parked"], row["rev"]
            wanted = final.status, final.reason, final.parked, true.stored_rev
            if reached != wanted or row["failure"] not in final.errors:
                found.append(f"{did} at {true.rev} is {dict(row)}, not {final} at {true.stored_rev}")
            if snapshot.records[did] != truth.cids(true.stored_records):
                found.append(f"{did} has {snapshot.records[did]}, not {truth.cids(true.stored_records)}")
        return found

    async def check_end(self) -> None:
        """Check what must hold when the world has ended and everything is stored."""
        assert not self.violations, [*self.violations, await self.world.sql.fetch(_REJECTED)]
        assert self.snapshots, "the database was never sampled"
        assert self.commits, "no transaction was checked"
        missing = list(Counter(self.world.schedule.faults) - self.world.fired)
        assert not missing, f"these faults did not happen: {missing}"
        assert self.world.daemon.ended == 0, "the daemon ended by itself"
        rejected = map(tuple, await self.world.sql.fetch(_REJECTED))
        contradictions = dead_letters_of(self.world.schedule).contradictions(rejected)
        assert not contradictions, contradictions
        await self._check_values()
        await assert_log_gives_records(self.world.sql)
        assert await self.world.sql.fetch(_REPEATED) == []
        assert await self.world.sql.fetchval("select count(*) from indexer.buffered_event") == 0
        excused = await self._changed_before_widened()
        await self._check_reasons(excused)
        gaps = await self.world.gap_reasons()
        assert gaps <= self.truth.gaps, f"gaps with the reasons {gaps}; only {set(self.truth.gaps)} are possible"
        fetched = self.world.fetched()
        fetched.subtract(self.fetched_before)
        needless = {did: fetched[did] for did in self.truth.undisturbed - excused if fetched[did]}
        assert not needless, f"these repos were fetched without a reason: {needless}"

    async def _check_values(self) -> None:
        """Check the values of all visible records."""
        rows = await self.world.sql.fetch(_VALUES)
        stored: dict[str, Any] = {f"{did}/{path}": json.loads(value) for did, path, value in rows}
        expected = {
            f"{did}/{path}": dict(value)
            for did, repo in self.truth.repos.items()
            if repo.status is None
            for path, value in repo.stored_records.items()
            if self.truth.scopes[-1].selects(path)
        }
        wrong = {path for path in stored.keys() | expected.keys() if stored.get(path) != expected.get(path)}
        assert not wrong, f"the values of these records are wrong: {wrong}"

    async def _changed_before_widened(self) -> set[str]:
        """Return repos that the daemon may fetch after a change of the scope, whatever records they have."""
        return {did for did, changed in await self.world.sql.fetch(_CHANGED_BEFORE_WIDENED) if changed}

    async def _check_reasons(self, excused: AbstractSet[str]) -> None:
        """Check that each repo was desynchronized for the reasons that the schedule gives, and for no others."""
        rows = await self.world.sql.fetch("select distinct did, reason from simulation.state where reason is not null")
        given: dict[str, set[str]] = {did: set() for did in self.truth.repos}
        for did, reason in rows:
            given[did].add(reason)
        for did, repo in self.truth.repos.items():
            wrong = given[did] - repo.reasons - ({"scope-widened"} if did in excused else set())
            assert not wrong, f"{did}: {wrong} in {given[did]}"
            # A fetch after a change of the scope may happen after a commit is lost, and so contain it.
            demanded = frozenset() if did in excused else repo.certain
            assert not demanded or given[did] & demanded, f"{did}: {given[did]} has none of {demanded}"
