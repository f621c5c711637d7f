"""The stages that a daemon has only on a distributed database are stalled in turn, as all others."""

from pathlib import Path

import pytest

from tests.daemon.test_stalls import STALLS_ON_A_CLUSTER, assert_stalls_are_visible


@pytest.mark.proof("cluster")
async def test_stalled_stage_of_a_cluster_fails_the_health_check_by_name_until_its_cause_is_gone(
    database: str, tmp_path: Path
) -> None:
    await assert_stalls_are_visible(database, tmp_path, STALLS_ON_A_CLUSTER)
