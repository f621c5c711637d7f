"""The size of batches on a cluster."""

from pathlib import Path

import pytest

from indexer import cluster
from indexer.live.batch_writer import BATCH_SIZE
from tests.batch_sizes import first_batch_size


@pytest.mark.proof("cluster")
async def test_batches_are_larger_than_on_one_server(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await first_batch_size(database, tmp_path, monkeypatch) == cluster.BATCH_SIZE > BATCH_SIZE
