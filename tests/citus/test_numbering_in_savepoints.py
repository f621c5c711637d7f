"""An operator queues a change within a savepoint, so that its row has another transaction ID than its transaction."""

import asyncpg
import pytest

from indexer.store import Store
from tests.store.repo_rows import did, insert, synchronized
from tests.waiting import until

pytestmark = pytest.mark.slow

REQUEST = """
    begin;
    savepoint before;
    set constraints all immediate;
    select atproto.request_takedown('{did}', {on});
    release before;
    commit
"""
NUMBER_AS_IF_PREPARED = """
    select (select count(*) from pg_dist_transaction) as parts, array(
        select n.commit_order from indexer.number_changes(
            array(select commit_order from indexer.unnumbered_batch order by commit_order desc limit 1),
            array(select groupid from pg_dist_node),
            array(select groupid from pg_dist_transaction), array(select gid from pg_dist_transaction)
        ) n
    ) as numbered
"""
"""Number the last batch, as if all its parts were prepared and not complete. Citus removes their rows soon after."""


async def test_a_batch_of_a_savepoint_waits_for_its_transaction(store: Store, sql: asyncpg.Connection) -> None:
    await insert(store, synchronized("one"))
    on = False
    answer: asyncpg.Record | None = None

    async def parts_are_known() -> bool:
        nonlocal on, answer
        on = not on
        await sql.execute(REQUEST.format(did=did("one"), on=on))
        answer = await sql.fetchrow(NUMBER_AS_IF_PREPARED)
        return answer is not None and answer["parts"] > 0

    await until(parts_are_known)
    assert answer is not None
    assert answer["numbered"] == []
