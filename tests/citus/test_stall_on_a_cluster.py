"""The stages that a daemon has only on a distributed database are stalled in turn, as all others."""

from pathlib import Path

import pytest

from tests.daemon.test_stalls import STALLS_ON_A_CLUSTER, assert_stall_is_visible


@pytest.mark.proof("cluster")
@pytest.mark.parametrize("stage", STALLS_ON_A_CLUSTER)
async def test_stalled_stage_of_a_cluster_fails_the_health_check_by_name_until_its_cause_is_gone(
    database: str, tmp_path: Path, stage: str
) -> None:
    await assert_stall_is_visible(database, tmp_path, stage)
