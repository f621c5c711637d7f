"""Fixtures for the tests of the store."""

import pytest

from indexer.db import Store
from tests.lexicons.samples import DEFS_DOCUMENT, REVIEW_DOCUMENT, sourced


@pytest.fixture
async def reviews(store: Store) -> Store:
    """Return a store with the typed view of reviews."""
    await store.add_lexicons(sourced(REVIEW_DOCUMENT, DEFS_DOCUMENT))
    return store
