"""The lexicons of Bluesky's package @atproto/api, which setup.sh installs."""

import json
from pathlib import Path
from typing import Any

import pytest

DIRECTORY = Path(__file__).with_name("node_modules") / "lexicons"


def published_directory() -> Path:
    """Return the directory of the lexicons; skip the test if they are not installed."""
    if not DIRECTORY.is_dir():
        pytest.skip("the published lexicons are not installed: run tests/lexicons/setup.sh, which needs npm")
    return DIRECTORY


def published_documents() -> dict[str, Any]:
    """Return the documents by NSID; skip the test if they are not installed."""
    documents = [json.loads(path.read_text()) for path in sorted(published_directory().glob("*.json"))]
    return {document["id"]: document for document in documents}
