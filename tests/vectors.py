"""Where the published test vectors lie: beside the repository, or where INDEXER_VECTORS says. Read in place."""

import os
from pathlib import Path

import pytest

ROOT = Path(os.environ.get("INDEXER_VECTORS", Path(__file__).parents[2] / "shared" / "vectors"))


def vectors(name: str) -> Path:
    """The file or folder `name` of the vectors; skips the test with a notice where they are absent."""
    path = ROOT / name
    if not path.exists():
        pytest.skip(f"no test vectors at {path}: set INDEXER_VECTORS to run this test")
    return path
