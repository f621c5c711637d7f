# ruff: noqa: S608 - the name of the view is a constant
"""Typed views of records that a daemon indexes."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.running_daemon import LIKE, running_daemon
from tests.lexicons.samples import AUTHOR, LIKE_DOCUMENT, copy_of, properties_of, sourced

pytestmark = pytest.mark.slow

VIEW = f'lexicon."{LIKE}"'


def like(number: int, **changes: Any) -> dict[str, Any]:
    subject = {"uri": f"at://{AUTHOR}/app.bsky.feed.post/{number}", "cid": "bafy"}
    return {"$type": LIKE, "subject": subject, "createdAt": f"2024-01-01T00:00:{number:02}Z"} | changes


async def test_typed_view_follows_the_records_of_a_running_daemon(tmp_path: Path, database: str) -> None:
    """The view, its index, and a new column are added while the daemon writes."""
    async with running_daemon(database, tmp_path) as running:
        ada, bob = (running.network.create_account(f"{name}.test") for name in ("ada", "bob"))
        paths = [ada.create(LIKE, like(number)) for number in range(20)]
        await running.db.lexicons.add(sourced(LIKE_DOCUMENT))
        bob.create(LIKE, like(7, createdAt="yesterday", note=5))
        assert await running.db.lexicon_indexes.build(LIKE, ["subject_uri", "created_at"])
        ada.update(paths[7], like(7, createdAt="2025-01-01T00:00:00Z", note="x" * 10_000))
        ada.delete(paths[8])
        changed = copy_of(LIKE_DOCUMENT)
        properties_of(changed)["note"] = {"type": "string"}
        await running.db.lexicons.add(sourced(changed))
        await running.wait_until_equal()
        likes = f"select did, created_at, note, lexicon_problem from {VIEW} where subject_uri = $1 order by 2"
        rows = [tuple(row) for row in await running.execute(likes, like(7)["subject"]["uri"])]
        assert rows == [
            (ada.did, datetime(2025, 1, 1, tzinfo=UTC), "x" * 10_000, None),
            (bob.did, None, None, "createdAt: not a datetime; note: expected string, found number"),
        ]
        assert await running.execute(likes, like(8)["subject"]["uri"]) == []
        [[count]] = await running.execute(f"select count(*) from {VIEW}")
        assert count == 20
        ada.deactivate()
        await running.wait_until_equal()
        [[did]] = await running.execute(f"select did from {VIEW}")
        assert did == bob.did
