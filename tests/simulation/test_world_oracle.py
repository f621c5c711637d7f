"""The oracle agrees with the servers of the world, shares no code with them, and the checks notice what is wrong."""

import ast
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from indexer.atproto.cid import cid_of as served_cid_of
from indexer.atproto.cid import cid_text
from tests.simulation import world_oracle
from tests.simulation.draw_schedule import draw_schedule
from tests.simulation.fault_injection import injected_kinds
from tests.simulation.fault_schedule import Schedule
from tests.simulation.simulated_world import World
from tests.simulation.world_checks import Checks, Snapshot
from tests.simulation.world_oracle import Truth, truth_of

SEEDS = range(1, 101)


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


def test_oracle_imports_only_the_schedule() -> None:
    source = Path(world_oracle.__file__).read_text()
    imported = {
        name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
    }
    own = {name for name in imported if name and name.partition(".")[0] in ("indexer", "tests")}
    assert own == {"tests.simulation.fault_schedule"}


def test_seed_gives_the_same_schedule_each_time() -> None:
    assert draw_schedule(7) == draw_schedule(7) != draw_schedule(8)


def test_all_faults_are_drawn() -> None:
    drawn = {type(fault) for seed in SEEDS for fault in draw_schedule(seed).faults}
    assert drawn == injected_kinds()


def truth_as_snapshot(truth: Truth) -> dict[str, Any]:
    """Return the fields of a snapshot in which everything is as the oracle says."""
    repos = {
        did: {
            "did": did,
            "sync_status": "synchronized",
            "sync_reason": None,
            "rev": true.rev,
            "active": true.status is None,
            "hosting_status": true.status,
        }
        for did, true in truth.repos.items()
    }
    records = {did: truth.cids(true.records) for did, true in truth.repos.items()}
    return {"repos": repos, "records": records, "cursors": {}, "open_gaps": 0}


@pytest.fixture
def checks() -> Checks:
    schedule = draw_schedule(3)
    return Checks(served_world(schedule), truth_of(schedule))


@pytest.fixture
def fields(checks: Checks) -> dict[str, Any]:
    return truth_as_snapshot(checks.truth)


@pytest.fixture
def did(checks: Checks) -> str:
    """Return an active account that has records."""
    return next(did for did, true in checks.truth.repos.items() if true.status is None and true.records)


def test_true_snapshot_has_no_difference(checks: Checks, fields: Mapping[str, Any]) -> None:
    snapshot = Snapshot(**fields)
    assert checks.differences(snapshot) == []
    checks.check_snapshot(snapshot)
    assert checks.violations == []


def test_missing_record_is_noticed(checks: Checks, fields: Mapping[str, Any], did: str) -> None:
    fields["records"][did].popitem()
    assert len(checks.differences(Snapshot(**fields))) == 1
    checks.check_snapshot(Snapshot(**fields))
    assert len(checks.violations) == 1


@pytest.mark.parametrize(
    "wrong",
    [{"sync_status": "desynchronized", "sync_reason": "behind"}, {"active": False, "hosting_status": "takendown"}],
)
def test_wrong_state_is_noticed(
    checks: Checks, fields: Mapping[str, Any], did: str, wrong: Mapping[str, object]
) -> None:
    fields["repos"][did].update(wrong)
    assert len(checks.differences(Snapshot(**fields))) == 1


def test_rev_that_does_not_exist_is_noticed(checks: Checks, fields: Mapping[str, Any], did: str) -> None:
    fields["repos"][did]["rev"] = world_oracle.tid_of(1)
    checks.check_snapshot(Snapshot(**fields))
    assert len(checks.violations) == 1


def test_stale_repo_is_noticed_unless_a_gap_is_open(checks: Checks, fields: Mapping[str, Any], did: str) -> None:
    first = next(iter(checks.truth.repos[did].revs))
    fields["repos"][did]["rev"] = first
    fields["records"][did] = {}
    relay = checks.world.relays[0]
    fields["cursors"][relay.websocket_url] = relay.seq
    checks.check_snapshot(Snapshot(**{**fields, "open_gaps": 1}))
    assert checks.violations == []
    checks.check_snapshot(Snapshot(**fields))
    [violation] = checks.violations
    assert "was sent" in violation


def test_account_that_does_not_exist_is_noticed(checks: Checks, fields: Mapping[str, Any]) -> None:
    stranger = "did:plc:zzzzzzzzzzzzzzzzzzzzzzzz"
    fields["repos"][stranger] = {"sync_status": "desynchronized"}
    assert checks.differences(Snapshot(**fields)) == [f"{stranger} does not exist"]


async def test_fault_that_does_not_happen_is_noticed(checks: Checks) -> None:
    checks.snapshots = 1
    with pytest.raises(AssertionError, match="these faults did not happen"):
        await checks.check_end()
