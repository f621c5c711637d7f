"""What happens on the network any day: the database ends equal to it."""

from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from indexer.localnet.load import Scenario
from tests.daemon.stage import LIKE, POST, ChosenNetwork, post, staged
from tests.serving import serving, settings_for, until
from tests.test_crash import assert_nothing_doubled

pytestmark = pytest.mark.slow

STEPS = 400
SYNCHRONIZED = {"result": "synchronized"}


@pytest.mark.slow
async def test_a_plain_life(database: str, tmp_path: Path) -> None:
    async with staged(database, tmp_path) as stage:
        scenario = Scenario(stage.network, seed=3)
        for step in range(STEPS):
            scenario.perform(step, STEPS)
        assert len(scenario.report.happenings) == 4
        comparison = await stage.equal()
        assert comparison.repos == scenario.report.accounts - 2
        assert comparison.records > STEPS / 2
        assert stage.total("events_received") == stage.total("events") >= len(stage.network.relay.log)
        assert stage.metric("desynchronized", reason="chain-break") > 0, "the lost commit"
        rotated = {happening.did for happening in scenario.report.happenings if happening.what == "rotate key"}
        assert {did for did, _ in await stage.rejected()} <= rotated, "by a key that was gone when they were read"
        assert stage.running.ready() is None
        await assert_nothing_doubled(database)


async def test_a_lost_commit_breaks_the_chain_and_is_fetched(database: str, tmp_path: Path) -> None:
    async with staged(database, tmp_path) as stage:
        account = stage.account("ada.test")
        await stage.equal()
        assert stage.exports == 0, "first commits carry their whole trees"
        stage.lose_commit(account)
        await stage.equal()
        assert stage.metric("desynchronized", reason="chain-break") == 1
        assert stage.metric("events", kind="commit", outcome="desynchronized") == 1
        await stage.counted(0, "resync", result="synchronized")
        assert stage.metric("resync", result="synchronized") == 1
        assert stage.metric("record_changes", action="create", live="false") == 2
        assert stage.exports == 1
        account.create(POST, post("and on it goes"))
        await stage.equal()
        assert stage.exports == 1
        await assert_nothing_doubled(database)


async def test_a_repo_is_desynchronized_once(database: str, tmp_path: Path) -> None:
    async with staged(database, tmp_path, roles="live") as stage:
        account = stage.account("ada.test")
        stage.lose_commit(account)
        for number in range(3):
            account.create(POST, post(number))
        await stage.read()
        assert stage.metric("events", kind="commit", outcome="desynchronized") == 1
        assert stage.metric("events", kind="commit", outcome="ignored") == 3
        assert stage.metric("desynchronized", reason="chain-break") == 1


async def test_hands_that_only_fetch(database: str, tmp_path: Path) -> None:
    """Any number of them beside the one that follows the stream: each repo is fetched once, by one of them."""
    async with AsyncExitStack() as stack:
        stage = await stack.enter_async_context(staged(database, tmp_path / "live", roles="live"))
        accounts = [stage.account(f"a{number}.test") for number in range(12)]
        await stage.equal()
        for account in accounts:
            stage.lose_commit(account)
        await stage.read()
        assert stage.exports == 0
        relay, plc = stage.network.relay_url, stage.network.plc_url
        hands = [
            await stack.enter_async_context(
                serving(settings_for(relay, plc, tmp_path / f"hand {number}", roles="resync"), database)
            )
            for number in range(3)
        ]
        for number, account in enumerate(accounts):
            account.create(POST, post(number))
        await stage.equal()
        assert stage.exports == len(accounts)

        def done() -> float:
            counts = [hand.metrics.registry.get_sample_value("indexer_resync_total", SYNCHRONIZED) for hand in hands]
            return sum(filter(None, counts))

        await until(lambda: done() >= len(accounts), done)
        assert done() == len(accounts)
        await assert_nothing_doubled(database)


async def test_an_account_leaves_and_comes_back(database: str, tmp_path: Path) -> None:
    async with staged(database, tmp_path) as stage:
        account, other = stage.account("ada.test"), stage.account("bob.test")
        await stage.equal()
        before = await stage.stored(account)
        account.deactivate()
        await stage.equal()
        assert set(await stage.running.store.visible_repos()) == {other.did}
        assert await stage.running.store.visible_records(account.did) == {}
        assert await stage.stored(account) == before, "hidden, not erased"
        account.activate()
        await stage.equal()
        await stage.counted(0, "resync", result="unchanged")
        assert stage.metric("resync", result="unchanged") == 1
        assert stage.exports == 0, "the head was compared, and nothing had to be fetched"


async def test_an_account_comes_back_changed(database: str, tmp_path: Path) -> None:
    async with staged(database, tmp_path) as stage:
        account = stage.account("ada.test")
        account.deactivate()
        await stage.equal()
        account.create(POST, post("ignored"))  # a host that goes on
        await stage.read()
        assert stage.metric("events", kind="commit", outcome="ignored") == 1
        account.activate()
        await stage.equal()
        assert len(await stage.running.store.visible_records(account.did)) == 6


async def test_a_deleted_account_is_hidden(database: str, tmp_path: Path) -> None:
    async with staged(database, tmp_path) as stage:
        account, other = stage.account("ada.test"), stage.account("bob.test")
        await stage.equal()
        account.delete_account()
        await stage.equal()
        assert set(await stage.running.store.visible_repos()) == {other.did}
        assert await stage.running.store.visible_records(account.did) == {}
        assert (await stage.repo(account))["hosting_status"] == "deleted"


async def test_a_takedown_hides_and_its_end_shows_again(database: str, tmp_path: Path) -> None:
    """What the account does meanwhile is read all the same."""
    async with staged(database, tmp_path) as stage:
        account, other = stage.account("ada.test"), stage.account("bob.test")
        await stage.equal()
        [(known,)] = await stage.execute("select atproto.request_takedown($1, true)", account.did)
        assert known
        assert set(await stage.running.store.visible_repos()) == {other.did}
        assert await stage.running.store.visible_records(account.did) == {}
        account.create(POST, post("while taken down"))
        await stage.read()
        assert set(await stage.running.store.visible_repos()) == {other.did}
        await stage.execute("select atproto.request_takedown($1, false)", account.did)
        await stage.equal()
        assert len(await stage.running.store.visible_records(account.did)) == 6
        assert stage.exports == 0


async def test_only_the_chosen_collections(database: str, tmp_path: Path) -> None:
    """Live and by resync; commits of other collections still carry the chain on."""
    async with (
        ChosenNetwork(collections=[POST]) as network,
        staged(database, tmp_path, network, collections=POST) as stage,
    ):
        account = stage.account("ada.test")
        account.create(LIKE, {"$type": LIKE})
        account.create(POST, post("behind the like"))
        await stage.equal()
        assert stage.total("desynchronized") == 0
        stage.lose_commit(account)
        account.create(LIKE, {"$type": LIKE})
        await stage.equal()
        assert stage.exports == 1
        assert {row["collection"] for row in await stage.stored(account)} == {POST}
        assert len(account.records) == len(await stage.stored(account)) + 2


async def test_other_collections_than_before(database: str, tmp_path: Path) -> None:
    """What was stored of those that are not chosen any more goes with a resync, what lacks of the new ones comes."""
    async with ChosenNetwork(collections=[POST]) as network:
        async with staged(database, tmp_path / "before", network, collections=POST) as stage:
            account = stage.account("ada.test")
            account.create(LIKE, {"$type": LIKE}, rkey="like")
            await stage.equal()
        network.collections = {LIKE}
        with capture_logs() as lines:
            async with staged(database, tmp_path / "after", network, collections=LIKE) as stage:
                await stage.read()
        assert [(line["before"], line["now"]) for line in lines if line["event"] == "collections.changed"] == [
            (POST, LIKE)
        ]
        async with staged(database, tmp_path / "later", network, collections=LIKE) as stage:
            account.delete(f"{POST}/000")
            await stage.read()
            assert {row["collection"] for row in await stage.stored(account)} == {POST}
            assert await stage.running.store.mark_resync(all=True) == 1
            await stage.equal()
            assert {row["collection"] for row in await stage.stored(account)} == {LIKE}
        await assert_nothing_doubled(database)


async def test_only_the_listed_accounts(database: str, tmp_path: Path) -> None:
    async with (
        ChosenNetwork(dids=[]) as network,
        staged(database, tmp_path, network, track="listed") as stage,
    ):
        listed, other = stage.account("ada.test"), stage.account("bob.test")
        assert (await stage.equal()).repos == 0
        assert stage.metric("events", kind="commit", outcome="ignored") == len(network.relay.log) - 6
        assert await stage.execute("select from indexer.repo") == []
        assert network.plc.requests.total() == 0, "nobody asks for the key of an account that nobody wants"

        network.dids = {listed.did}
        assert await stage.running.store.add([listed.did]) == 1
        assert (await stage.equal()).records == 5
        listed.create(POST, post("live from now on"))
        other.create(POST, post("still unwanted"))
        assert (await stage.equal()).records == 6
        assert stage.metric("events", kind="commit", outcome="applied") == 1
        assert stage.exports == 1
        await until(lambda: not stage.running.pool.running)
        assert [row["did"] for row in await stage.execute("select did from indexer.repo")] == [listed.did]
