"""Fixtures for the tests of the database."""

import pytest

from indexer.db import Database
from tests.lexicons.samples import DEFS_DOCUMENT, REVIEW_DOCUMENT, sourced


@pytest.fixture
async def reviews(db: Database) -> Database:
    """Return a database with the typed view of reviews."""
    await db.lexicons.add(sourced(REVIEW_DOCUMENT, DEFS_DOCUMENT))
    return db
