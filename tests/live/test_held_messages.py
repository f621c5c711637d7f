"""Commits that come before their predecessors, which another stream brings."""

from random import Random

import pytest

from indexer.live.held_messages import MAX_HELD_SHARE, HeldMessages
from indexer.live.inbox import Inbox, message_bytes
from indexer.sync.batch import ReceivedMessage
from indexer.sync.repo import SyncStatus
from tests.live.test_batch_writer import Disturbance
from tests.live.test_copies import RELAYS
from tests.live.writer_scenario import SEEDS, MakeScenario, new_post
from tests.sync.signing_account import SigningAccount, received_message
from tests.waiting import until


async def test_early_commits_are_held_until_another_stream_brings_their_predecessors(
    make_scenario: MakeScenario,
) -> None:
    scenario, ada, ben = await make_scenario(relays=RELAYS), SigningAccount("ada"), SigningAccount("ben")
    await scenario.add(ada, ben)
    before = await scenario.row(ada)
    posts = [new_post(ada, number) for number in range(4)]
    async with scenario.writer():
        await scenario.put(posts[2], posts[3], new_post(ben, 1))
        await until(lambda: scenario.inbox.unsettled == 2)
        assert await scenario.row(ada) == before, "the row does not change meanwhile"
        assert scenario.position.watermark.position == 0, "nor does the cursor"
        await scenario.put(posts[1], stream=1)
        await until(lambda: not len(scenario.inbox))
        assert scenario.inbox.unsettled == 3, "this one is early, too"
        await scenario.put(posts[0], posts[1], posts[2], stream=1)
        await scenario.settled()
    assert scenario.outcomes() == {"applied": 5, "replayed": 2}
    assert (await scenario.row(ada)).head == ada.head
    changes = await scenario.sql.fetch(
        "select rkey from atproto.changes where did = $1 and rkey <> '' order by seq", ada.did
    )
    assert [rkey for (rkey,) in changes] == [f"post000{number}" for number in range(4)]


async def test_early_commit_desynchronizes_its_repo_when_no_stream_brings_its_predecessor(
    make_scenario: MakeScenario,
) -> None:
    scenario, ada = await make_scenario(relays=RELAYS, hold=0.05), SigningAccount("ada")
    await scenario.add(ada)
    _, early, later = (new_post(ada, number) for number in range(3))
    identity = received_message("identity", ada.identity_event())
    async with scenario.writer():
        await scenario.put(early, identity, later)
        await scenario.settled()
    row = await scenario.row(ada)
    assert (row.sync_status, row.sync_reason) == (SyncStatus.DESYNCHRONIZED, "chain-break")
    assert scenario.outcomes() == {"desynchronized": 1, "applied": 1, "ignored": 1}


async def test_commit_is_held_also_before_the_other_stream_is_connected(make_scenario: MakeScenario) -> None:
    scenario, ada = await make_scenario(relays=RELAYS), SigningAccount("ada")
    scenario.positions[1].is_known = lambda: False
    await scenario.add(ada)
    missing, early = (new_post(ada, number) for number in range(2))
    async with scenario.writer():
        await scenario.put(early)
        await until(lambda: not len(scenario.inbox))
        await scenario.put(missing, stream=1)
        await scenario.settled()
    assert scenario.outcomes() == {"applied": 2}


async def test_nothing_is_held_with_a_single_stream(make_scenario: MakeScenario) -> None:
    scenario, ada = await make_scenario(), SigningAccount("ada")
    await scenario.add(ada)
    _, early = (new_post(ada, number) for number in range(2))
    async with scenario.writer():
        await scenario.put(early)
        await scenario.settled()
    assert scenario.outcomes() == {"desynchronized": 1}


async def test_held_messages_occupy_a_bounded_share_of_the_inbox() -> None:
    ada, ben = SigningAccount("ada"), SigningAccount("ben")
    one, *many = [new_post(account, number) for account, number in ((ben, 0), (ada, 0), (ada, 1), (ada, 2))]
    size = sum(map(message_bytes, [one, *many[:2]]))
    inbox = Inbox(int(2 * size / MAX_HELD_SHARE), streams=2)
    held = HeldMessages(inbox)
    held.hold(ben.did, revision(one), [one])
    held.hold(ada.did, revision(many[0]), many[:1])
    assert held.hold_back(many[1:2]) == []
    assert (len(inbox), held.overdue) == (0, set())
    assert held.hold_back(many[2:]) == []
    assert (inbox.peek(10), held.overdue) == (many, {ada.did}), "those of the account with the most bytes"
    held.discard_overdue([ada.did])
    assert held.overdue == set()


def revision(message: ReceivedMessage) -> str:
    rev: str = message.event.rev  # type: ignore[union-attr]
    return rev


@pytest.mark.parametrize("seed", SEEDS)
async def test_two_streams_that_omit_messages_are_as_good_as_one_that_omits_none(
    make_scenario: MakeScenario, seed: int
) -> None:
    """Each stream omits commits that the other one has. Writes fail at random."""
    scenario, random = await make_scenario(batch_size=7, relays=RELAYS), Random(seed)
    accounts = [SigningAccount(name) for name in ("ada", "ben")]
    await scenario.add(*accounts)
    posts = [new_post(random.choice(accounts), number) for number in range(40)]
    Disturbance(scenario, accounts, seed)
    omits = [random.choice([0, 1, None, None]) for _ in posts]
    parts = [[post for post, omitted in zip(posts, omits, strict=True) if omitted != stream] for stream in (0, 1)]
    async with scenario.writer():
        while any(parts):
            stream = random.choice([number for number in (0, 1) if parts[number]])
            count = random.randint(1, 9)
            await scenario.put(*parts[stream][:count], stream=stream)
            del parts[stream][:count]
        await scenario.settled()
    for account in accounts:
        row = await scenario.row(account)
        assert (row.head, row.sync_status) == (account.head, SyncStatus.SYNCHRONIZED)
    assert scenario.outcomes().keys() <= {"applied", "replayed"}
