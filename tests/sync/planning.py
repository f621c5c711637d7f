"""Plan one event, for the tests of planning."""

from typing import Any

from indexer.sync.plan_event import plan_event
from indexer.sync.plans import Plan
from indexer.sync.policy import KeyState, PlanContext
from indexer.sync.repo_state import Repo, SyncStatus
from indexer.sync.scope import Scope, Track
from tests.sync.signing_account import CONTEXT, decoded_event

LISTED = Scope(track=Track.LISTED)
IN_PROGRESS, SYNCHRONIZED, DESYNCHRONIZED = SyncStatus.IN_PROGRESS, SyncStatus.SYNCHRONIZED, SyncStatus.DESYNCHRONIZED


def plan(
    repo: Repo, kind: str, payload: dict[str, Any], key_state: KeyState | None, context: PlanContext = CONTEXT
) -> Plan:
    planned = plan_event(repo, decoded_event(kind, payload), 1_000, key_state, context)
    assert isinstance(planned, Plan), planned
    return planned
