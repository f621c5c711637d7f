"""The published test vectors: in shared/vectors beside the repository, or in the directory INDEXER_VECTORS."""

import os
from pathlib import Path

import pytest

ROOT = Path(os.environ.get("INDEXER_VECTORS", Path(__file__).parents[2] / "shared" / "vectors"))


def vectors(name: str = "") -> Path:
    """Return the file or directory `name` of the vectors; skip the test, or the module that calls this, without it."""
    path = ROOT / name
    if not path.exists():
        pytest.skip(f"no test vectors at {ROOT}: set INDEXER_VECTORS to run these tests", allow_module_level=True)
    return path
