"""Compare the database, while the daemon runs and afterwards, with the truth about the world."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import asyncpg

from tests.database_checks import assert_log_gives_records
from tests.simulation.simulated_world import World
from tests.simulation.world_oracle import TrueRepo, Truth

_REPOS = """
    select did, sync_status, sync_reason, rev, hosting_status, active, last_error from indexer.repo
"""
_RECORDS = "select did, collection || '/' || rkey, atproto.cid_text(cid) from indexer.record"
_VALUES = "select did, collection || '/' || rkey, value from atproto.records"
_REJECTED = "select seq, did, kind, reason from atproto.rejected order by id"
_CURSORS = "select relay, seq from indexer.cursor"
_OPEN_GAPS = "select count(*) from atproto.gaps where closed_at is null"


@dataclass(frozen=True)
class Snapshot:
    """The content of the database at one moment."""

    repos: Mapping[str, asyncpg.Record]
    records: Mapping[str, Mapping[str, str]]
    cursors: Mapping[str, int]
    open_gaps: int

    @classmethod
    async def take(cls, sql: asyncpg.Connection) -> "Snapshot":
        async with sql.transaction(isolation="repeatable_read", readonly=True):
            repos = {row["did"]: row for row in await sql.fetch(_REPOS)}
            records: dict[str, dict[str, str]] = {did: {} for did in repos}
            for did, path, cid in await sql.fetch(_RECORDS):
                records[did][path] = cid
            cursors = {relay: seq for relay, seq in await sql.fetch(_CURSORS)}  # noqa: C416 - rows are no pairs for mypy
            return cls(repos, records, cursors, await sql.fetchval(_OPEN_GAPS))


@dataclass
class Checks:
    """The checks of one run."""

    world: World
    truth: Truth
    violations: list[str] = field(default_factory=list)
    snapshots: int = 0
    fetched_before: Counter[str] = field(default_factory=Counter)

    def check_snapshot(self, snapshot: Snapshot) -> None:
        """Check what must hold at every moment: synchronized repos equal the world at their rev, and none is stale."""
        self.snapshots += 1
        sent = {} if snapshot.open_gaps else self._latest_sent(snapshot)
        for did, repo in snapshot.repos.items():
            if repo["sync_status"] != "synchronized":
                continue
            true = self.truth.repos.get(did, TrueRepo())
            if repo["rev"] not in true.revs:
                self.violations.append(f"{did} has the rev {repo['rev']}, which does not exist")
                continue
            if repo["active"] and repo["rev"] < sent.get(did, ""):
                self.violations.append(f"{did} is synchronized at {repo['rev']}, but {sent[did]} was sent")
            expected = self.truth.cids(true.revs[repo["rev"]], constant=True)
            stored = {path: cid for path, cid in snapshot.records[did].items() if self.truth.always_selects(path)}
            if stored != expected:
                self.violations.append(f"{did} is synchronized at {repo['rev']} with {stored}, not {expected}")

    def _latest_sent(self, snapshot: Snapshot) -> dict[str, str]:
        """Return the latest rev of each account in the messages that the cursors have passed.

        A message that is signed with a former key proves nothing if the daemon reads it after the key has changed.
        """
        latest: dict[str, str] = {}
        for relay in self.world.relays:
            seq = snapshot.cursors.get(relay.websocket_url, 0)
            for sent in relay.sequences[relay.sequence_of(seq)]:
                if sent.seq > seq:
                    break
                if sent.kind in ("#commit", "#sync") and sent.did and sent.payload:
                    latest[sent.did] = max(latest.get(sent.did, ""), sent.payload["rev"])
        return {did: rev for did, rev in latest.items() if rev >= self.world.key_revs.get(did, "")}

    def differences(self, snapshot: Snapshot) -> list[str]:
        """Return the differences from the truth at the end of the world."""
        found = [f"{did} is unknown" for did in self.truth.repos.keys() - snapshot.repos.keys()]
        found += [f"{did} does not exist" for did in snapshot.repos.keys() - self.truth.repos.keys()]
        if snapshot.open_gaps:
            found.append(f"{snapshot.open_gaps} gaps are open")
        for did in self.truth.repos.keys() & snapshot.repos.keys():
            row, true = snapshot.repos[did], self.truth.repos[did]
            state = row["active"], row["hosting_status"]
            if state != (true.status is None, true.status):
                found.append(f"{did} has the hosting status {state}, not {true.status}")
            if true.status is not None:
                continue
            if (row["sync_status"], row["sync_reason"], row["rev"]) != ("synchronized", None, true.rev):
                found.append(f"{did} at {true.rev} is {dict(row)}")
            if snapshot.records[did] != self.truth.cids(true.records):
                found.append(f"{did} has {snapshot.records[did]}, not {self.truth.cids(true.records)}")
        return found

    async def check_end(self) -> None:
        """Check what must hold when the world has ended and everything is stored."""
        assert not self.violations, [*self.violations, await self.world.sql.fetch(_REJECTED)]
        assert self.snapshots, "the database was never sampled"
        missing = list(Counter(self.world.schedule.faults) - self.world.fired)
        assert not missing, f"these faults did not happen: {missing}"
        await self._check_values()
        await assert_log_gives_records(self.world.sql)
        assert await self.world.sql.fetchval("select count(*) from indexer.buffered_event") == 0
        await self._check_reasons()
        gaps = set(await self.world.gaps())
        assert gaps <= self.truth.gaps, f"gaps with the reasons {gaps}; only {set(self.truth.gaps)} are possible"
        fetched = self.world.fetched()
        fetched.subtract(self.fetched_before)
        needless = {did: fetched[did] for did in self.truth.undisturbed if fetched[did]}
        assert not needless, f"these repos were fetched without a reason: {needless}"

    async def _check_values(self) -> None:
        """Check the values of all visible records."""
        rows = await self.world.sql.fetch(_VALUES)
        stored: dict[str, Any] = {f"{did}/{path}": json.loads(value) for did, path, value in rows}
        expected = {
            f"{did}/{path}": dict(value)
            for did, repo in self.truth.repos.items()
            if repo.status is None
            for path, value in repo.records.items()
            if self.truth.scopes[-1].selects(path)
        }
        wrong = {path for path in stored.keys() | expected.keys() if stored.get(path) != expected.get(path)}
        assert not wrong, f"the values of these records are wrong: {wrong}"

    async def _check_reasons(self) -> None:
        """Check that each repo was desynchronized for the reasons that the schedule gives, and for no others."""
        rows = await self.world.sql.fetch("select distinct did, reason from simulation.state where reason is not null")
        given: dict[str, set[str]] = {did: set() for did in self.truth.repos}
        for did, reason in rows:
            given[did].add(reason)
        for did, repo in self.truth.repos.items():
            assert given[did] <= repo.reasons, f"{did}: {given[did] - repo.reasons} in {given[did]}"
            assert not repo.certain or given[did] & repo.certain, f"{did}: {given[did]} has none of {repo.certain}"
