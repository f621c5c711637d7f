"""The oracle agrees with the servers of the world, shares no code with them, and the checks notice what is wrong."""

import ast
import os
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import asyncpg
import pytest

from indexer.atproto.cid import cid_of as served_cid_of
from indexer.atproto.cid import cid_text
from indexer.store import Store
from indexer.sync.plans import Batch, RepoWrite
from tests.simulation import expected_dead_letters, world_oracle
from tests.simulation.draw_faults import MOMENTS
from tests.simulation.draw_schedule import draw_schedule
from tests.simulation.expected_dead_letters import Row, dead_letters_of
from tests.simulation.fault_injection import injected_kinds
from tests.simulation.fault_schedule import (
    ChangedScope,
    Damage,
    DamagedCommit,
    DatabaseProblem,
    DirectoryProblem,
    Episode,
    ExportProblem,
    Fault,
    ForgedMessage,
    Forgery,
    HostingStatus,
    HostProblem,
    LostCommit,
    LostWindow,
    RestartedSequence,
    Schedule,
    UnreachableDirectory,
)
from tests.simulation.simulated_world import World
from tests.simulation.world_checks import Checks, Snapshot, updates_without_effect
from tests.simulation.world_oracle import Truth, truth_of
from tests.store.repo_rows import insert, put, synchronized

SEEDS = range(1, 101)


@cache
def schedules() -> tuple[Schedule, ...]:
    """Return the schedules of all seeds."""
    return tuple(map(draw_schedule, SEEDS))


def served_world(schedule: Schedule) -> World:
    """Return a world whose accounts have done everything, without a server, a daemon or a fault."""
    world = World(schedule, "postgresql://nobody", Path())
    for number, server in enumerate([*world.hosts, *world.relays], 1):
        server.port = number
    for action in schedule.actions:
        world.perform(action)
    return world


@pytest.mark.parametrize("seed", SEEDS[:10])
def test_oracle_agrees_with_the_world(seed: int) -> None:
    schedule = draw_schedule(seed)
    world, truth = served_world(schedule), truth_of(schedule)
    for did, account in world.accounts.items():
        true = truth.repos[did]
        served = {path: cid_text(served_cid_of(block)) for path, block in account.records.items()}
        assert {path: world_oracle.cid_of(value) for path, value in true.records.items()} == served
        assert (true.rev, true.status) == (account.rev, account.status)


@pytest.mark.parametrize("module", [world_oracle, expected_dead_letters])
def test_oracle_imports_only_the_schedule(module: ModuleType) -> None:
    source = Path(module.__file__ or "").read_text()
    imported = {
        name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
    }
    own = {name for name in imported if name and name.partition(".")[0] in ("indexer", "tests")}
    assert own == {"tests.simulation.fault_schedule"}


_PRINT = "from tests.simulation.draw_schedule import draw_schedule; print(*map(draw_schedule, range(1, 6)), sep='\\n')"


@pytest.mark.slow
def test_seed_gives_the_same_schedule_in_each_process() -> None:
    """The processes hash strings differently, so that the order of their sets differs."""
    printed = {
        subprocess.run(
            [sys.executable, "-c", _PRINT],
            env=os.environ | {"PYTHONHASHSEED": str(number)},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for number in (1, 2)
    }
    assert printed == {"".join(f"{draw_schedule(seed)}\n" for seed in range(1, 6))}
    assert draw_schedule(7) != draw_schedule(8)


def test_all_faults_are_drawn() -> None:
    drawn = {type(fault) for schedule in schedules() for fault in schedule.faults}
    assert drawn == injected_kinds()


KINDS: dict[str, set[object]] = {
    "AccountChange.kind": {"rotate", "migrate", "activate", *get_args(HostingStatus)},
    "BrokenHost.kind": set(get_args(HostProblem)),
    "DamagedCommit.damage": set(get_args(Damage)),
    "DelayedMessages.relays": {(0,), (1,), (0, 1)},
    "FaultyExport.kind": set(get_args(ExportProblem)),
    "Forgery.kind": set(get_args(ForgedMessage)),
    "KilledAtPoint.late": {False, True},
    "LostWindow.announced": {False, True},
    "RepeatedMessages.renumbered": {False, True},
    "RestartedSequence.announced": {False, True},
    "UndecodableMessages.late": {False, True},
    "UnreachableDatabase.kind": set(get_args(DatabaseProblem)),
    "UnreachableDirectory.kind": set(get_args(DirectoryProblem)),
}
"""The values of a field of a fault that are different faults."""


@pytest.mark.parametrize("name", KINDS)
def test_each_kind_of_a_fault_is_drawn(name: str) -> None:
    kind, field = name.split(".")
    faults = [fault for schedule in schedules() for fault in schedule.faults if type(fault).__name__ == kind]
    assert {getattr(fault, field) for fault in faults} == KINDS[name]


def test_daemon_is_killed_at_all_moments() -> None:
    moments = [getattr(fault, "moment", None) for schedule in schedules() for fault in schedule.faults]
    assert set(moments) == {None, *MOMENTS}


def test_each_change_of_the_scope_selects_other_collections() -> None:
    changes = 0
    for schedule in schedules():
        scopes = [fault.collections for fault in schedule.faults if isinstance(fault, ChangedScope)]
        changes += len(scopes)
        assert all(before != after for before, after in pairwise([schedule.collections, *scopes]))
    assert changes > 0


def test_somebody_is_undisturbed_although_messages_are_lost() -> None:
    worlds = 0
    for schedule in schedules():
        kinds = {type(fault) for fault in schedule.faults}
        if kinds & {LostWindow, RestartedSequence} and not kinds & {ChangedScope, UnreachableDirectory}:
            worlds += 1
            assert schedule.bystanders[0] in truth_of(schedule).undisturbed
    assert worlds > 0


def test_repo_that_joined_later_need_not_break_although_a_commit_is_lost() -> None:
    """Its first fetch may happen after the commit that the relays lose, as in a world whose database is away then."""
    schedule = draw_schedule(287)
    first = {action.did for action in schedule.first}
    lost = [fault.did for episode in schedule.episodes for fault in episode.faults if isinstance(fault, LostCommit)]
    truth, [later, *_] = truth_of(schedule), [did for did in lost if did not in first]
    assert truth.repos[later].certain == frozenset()
    assert any(truth.repos[did].certain for did in first)


def test_lost_commit_need_not_break_a_chain_if_the_scope_changes_later() -> None:
    """The messages may be read after the change, as in this world, where the daemon is killed before."""
    schedule = draw_schedule(1005)
    [lost, *_] = [fault.did for fault in schedule.episodes[0].faults if isinstance(fault, LostCommit)]
    assert truth_of(schedule).repos[lost].certain == {"chain-break", "drain-break", "scope-widened"}


def test_dead_letter_of_a_damaged_commit_is_not_demanded_if_the_scope_changes_later() -> None:
    demanded: dict[bool, set[bool]] = {False: set(), True: set()}
    for schedule in schedules():
        episodes, least = list(enumerate(schedule.episodes)), dead_letters_of(schedule).least
        last_change = max((number for number, each in episodes if has(each, ChangedScope)), default=-1)
        for number, episode in episodes:
            for fault in episode.faults:
                if isinstance(fault, DamagedCommit) and fault.damage == "bit flipped":
                    demanded[last_change >= number].add((fault.did, "block-hash-mismatch") in least)
    assert demanded[True] == {False}
    assert True in demanded[False]


def has(episode: Episode, kind: type[Fault]) -> bool:
    return any(isinstance(fault, kind) for fault in episode.faults)


def truth_as_snapshot(truth: Truth) -> dict[str, Any]:
    """Return the fields of a snapshot in which everything is as the oracle says."""
    repos = {
        did: {
            "did": did,
            "sync_status": true.final.status,
            "sync_reason": true.final.reason,
            "rev": true.stored_rev,
            "active": true.status is None,
            "hosting_status": true.status,
            "failure": next(iter(true.final.errors)),
            "parked": true.final.parked,
        }
        for did, true in truth.repos.items()
    }
    records = {did: truth.cids(true.stored_records) for did, true in truth.repos.items()}
    return {"repos": repos, "records": records, "open_gaps": 0}


@pytest.fixture
def checks() -> Checks:
    schedule = draw_schedule(3)
    return Checks(served_world(schedule), truth_of(schedule))


@pytest.fixture
def fields(checks: Checks) -> dict[str, Any]:
    return truth_as_snapshot(checks.truth)


@pytest.fixture
def did(checks: Checks) -> str:
    """Return an active account that has records and is synchronized at the end."""
    repos = checks.truth.repos.items()
    return next(did for did, true in repos if true.status is None and true.records and true.final.reason is None)


@pytest.fixture
def stuck(checks: Checks) -> str:
    """Return an account that cannot be fetched at the end."""
    return next(did for did, true in checks.truth.repos.items() if true.final.reason is not None)


def test_true_snapshot_has_no_difference(checks: Checks, fields: Mapping[str, Any]) -> None:
    snapshot = Snapshot(**fields)
    assert checks.differences(snapshot, checks.truth) == []
    checks.check_snapshot(snapshot)
    assert checks.violations == []


def test_missing_record_is_noticed(checks: Checks, fields: Mapping[str, Any], did: str) -> None:
    fields["records"][did].popitem()
    assert len(checks.differences(Snapshot(**fields), checks.truth)) == 1
    checks.check_snapshot(Snapshot(**fields))
    assert len(checks.violations) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"sync_status": "desynchronized", "sync_reason": "behind"},
        {"active": False, "hosting_status": "takendown"},
        {"failure": "unreachable"},
    ],
)
def test_wrong_state_is_noticed(
    checks: Checks, fields: Mapping[str, Any], did: str, wrong: Mapping[str, object]
) -> None:
    fields["repos"][did].update(wrong)
    assert len(checks.differences(Snapshot(**fields), checks.truth)) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"sync_status": "synchronized", "sync_reason": None},
        {"sync_reason": "behind"},
        {"failure": "?"},
        {"parked": None},
    ],
)
def test_wrong_end_of_a_repo_that_cannot_be_fetched_is_noticed(
    checks: Checks, fields: Mapping[str, Any], stuck: str, wrong: Mapping[str, object]
) -> None:
    fields["repos"][stuck].update(wrong)
    assert len(checks.differences(Snapshot(**fields), checks.truth)) == 1


@pytest.mark.parametrize(
    ("wrong", "differences"), [({}, 0), ({"failure": "unreachable"}, 1), ({"parked": False}, 1), ({"rev": "stored"}, 1)]
)
def test_status_may_be_unknown_only_of_a_refused_repo_that_was_never_fetched(
    wrong: Mapping[str, object], differences: int
) -> None:
    """In this world, an account joins, and its takedown is lost before its first fetch."""
    schedule = draw_schedule(357)
    checks = Checks(served_world(schedule), truth_of(schedule))
    first = {action.did for action in schedule.first}
    [taken_down] = [did for did, true in checks.truth.repos.items() if true.status and did not in first]
    fields = truth_as_snapshot(checks.truth)
    refused: dict[str, object] = {
        "active": True,
        "hosting_status": None,
        "rev": None,
        "parked": True,
        "failure": "repo-takendown",
    }
    fields["repos"][taken_down].update({**refused, **wrong})
    assert len(checks.differences(Snapshot(**fields), checks.truth)) == differences


def test_deleted_account_that_is_not_erased_is_noticed(checks: Checks, fields: dict[str, Any]) -> None:
    [(deleted, true)] = [(did, true) for did, true in checks.truth.repos.items() if true.status == "deleted"]
    fields["repos"][deleted]["rev"] = true.rev
    fields["records"][deleted] = checks.truth.cids(true.records)
    assert checks.differences(Snapshot(**fields), checks.truth) == [f"{deleted} is deleted, and not erased"]
    checks.check_snapshot(Snapshot(**fields))
    assert checks.violations == []


def test_wrong_record_of_a_hidden_repo_is_noticed() -> None:
    schedule, hidden = next(
        (each, did) for each in schedules() for did, true in truth_of(each).repos.items() if true.status == "suspended"
    )
    checks = Checks(served_world(schedule), truth_of(schedule))
    fields = truth_as_snapshot(checks.truth)
    fields["repos"][hidden].update(sync_status="desynchronized", sync_reason="reactivated")
    checks.check_snapshot(Snapshot(**fields))
    assert checks.violations == []
    fields["records"][hidden].popitem()
    checks.check_snapshot(Snapshot(**fields))
    assert len(checks.violations) == 1


def test_rev_that_does_not_exist_is_noticed(checks: Checks, fields: Mapping[str, Any], did: str) -> None:
    fields["repos"][did]["rev"] = world_oracle.tid_of(1)
    checks.check_snapshot(Snapshot(**fields))
    assert len(checks.violations) == 1


def test_stale_repo_is_noticed_unless_a_gap_is_open(checks: Checks, did: str) -> None:
    first, relay = next(iter(checks.truth.repos[did].revs)), checks.world.relays[0]
    checks.check_commit(1, {relay.websocket_url: relay.seq}, {did: first})
    assert checks.violations == []
    checks.check_commit(0, {relay.websocket_url: relay.seq}, {did: first})
    [violation] = checks.violations
    assert "was sent" in violation


def test_repo_that_missed_the_end_of_a_former_sequence_is_noticed(checks: Checks, did: str) -> None:
    first, relay = next(iter(checks.truth.repos[did].revs)), checks.world.relays[0]
    relay.restart_sequence()
    checks.check_commit(0, {relay.websocket_url: relay.seq}, {did: first})
    assert len(checks.violations) == 1


def test_account_that_does_not_exist_is_noticed(checks: Checks, fields: Mapping[str, Any]) -> None:
    stranger = "did:plc:zzzzzzzzzzzzzzzzzzzzzzzz"
    fields["repos"][stranger] = {"sync_status": "desynchronized"}
    assert checks.differences(Snapshot(**fields), checks.truth) == [f"{stranger} does not exist"]


async def test_fault_that_does_not_happen_is_noticed(checks: Checks) -> None:
    checks.snapshots = checks.commits = 1
    with pytest.raises(AssertionError, match="these faults did not happen"):
        await checks.check_end()


async def test_change_that_is_logged_twice_is_noticed(store: Store, sql: asyncpg.Connection) -> None:
    repo = synchronized(1)
    await insert(store, repo, changes=(put("app.test/a", "1"), put("app.test/b", "1")))
    for version, (path, text) in enumerate([("app.test/a", "2"), ("app.test/b", "1")], 2):
        after = repo._replace(version=version)
        await store.write(Batch((RepoWrite(version - 1, after, (put(path, text, "update"),)),)))
    assert [row["rkey"] for row in await updates_without_effect(sql)] == ["b"]


def schedule_with(*kinds: type) -> Schedule:
    """Return the first schedule with these faults."""
    return next(
        schedule
        for schedule in map(draw_schedule, SEEDS)
        if all(any(isinstance(fault, kind) for fault in schedule.faults) for kind in kinds)
    )


def rows_of(schedule: Schedule) -> list[Row]:
    """Return the dead letters that the schedule demands."""
    demanded = dead_letters_of(schedule).least.items()
    return [("relay", number, *cause) for cause, count in demanded for number in range(count)]


def test_demanded_dead_letters_are_no_contradiction() -> None:
    schedule = schedule_with(Forgery, DamagedCommit)
    assert len(rows_of(schedule)) > 1
    assert dead_letters_of(schedule).contradictions(rows_of(schedule)) == []


def test_missing_dead_letter_is_noticed() -> None:
    schedule = schedule_with(Forgery)
    assert len(dead_letters_of(schedule).contradictions(rows_of(schedule)[1:])) == 1


def test_dead_letter_of_an_honest_message_is_noticed() -> None:
    schedule = schedule_with(Forgery)
    rows = [*rows_of(schedule), ("relay", 1, schedule.bystanders[0], "ops-mismatch")]
    assert len(dead_letters_of(schedule).contradictions(rows)) == 1


def test_too_many_dead_letters_of_one_relay_are_noticed() -> None:
    schedule = schedule_with(Forgery)
    [(relay, _, did, reason), *_] = rows_of(schedule)
    rows = [*rows_of(schedule), *((relay, number, did, reason) for number in range(100, 110))]
    assert len(dead_letters_of(schedule).contradictions(rows)) == 1
