"""Copies of messages from several streams, alone and with the batch writer."""

from collections import Counter
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.live.copies import Copies
from indexer.live.inbox import Inbox
from indexer.reasons import Rejection
from indexer.sync.batch import ReceivedMessage, SettledMessage
from indexer.sync.events import CommitEvent, MalformedEvent
from indexer.sync.repo import Outcome
from indexer.sync.stream import Origin
from tests.live.test_batch_writer import CHANGES, Disturbance
from tests.live.writer_scenario import SEEDS, MakeScenario, new_post
from tests.sync.signing_account import SigningAccount, received_message

ONE, TWO = Origin("wss://one.test"), Origin("wss://two.test")
HOST = Origin("https://pds.test", host="pds.test")
RELAYS = [ONE.relay, TWO.relay]


def two_streams(max_recent: int = 100) -> Copies:
    return Copies(Inbox(10**9, streams=2), max_recent)


def commit(origin: Origin, seq: int, **fields: Any) -> ReceivedMessage:
    event = CommitEvent(seq, "did:plc:a", b"cid", "rev", "since", b"data", (), b"blocks", "time")._replace(**fields)
    return ReceivedMessage(origin, seq, b"frame", event)


def test_a_copy_is_done_with_its_first_message_and_a_later_one_at_once() -> None:
    copies, first, copy = two_streams(), commit(ONE, 1), commit(TWO, 8, time="another time")
    assert copies.without_copies([first, copy]) == [first]
    assert copies.hold_back([first, copy]) == ([first], [])
    assert copies.hold_back([first]) == ([first], []), "it was put back"
    settled = [SettledMessage(first, Outcome.DESYNCHRONIZED)]
    assert copies.of(settled) == [copy]
    assert copies.settle(settled) == ([copy], [])
    assert copies.settle(settled) == ([], []), "once"
    late = commit(TWO, 9)
    assert copies.without_copies([first, late]) == []
    assert copies.hold_back([late]) == ([], [late])


def test_copies_of_a_rejected_message_are_planned_on_their_own() -> None:
    copies, first, copy = two_streams(), commit(ONE, 1), commit(TWO, 1)
    copies.hold_back([first, copy])
    settled = [SettledMessage(first, Outcome.REJECTED)]
    assert copies.of(settled) == []
    assert copies.settle(settled) == ([], [copy])
    assert copies.hold_back([copy]) == ([copy], [])


def test_message_that_was_ignored_on_the_stream_of_a_host_may_count_on_that_of_a_relay() -> None:
    """Hosts add no accounts, and their reports about accounts are not those of relays."""
    copies, first, copy = two_streams(), commit(HOST, 1), commit(ONE, 1)
    assert copies.hold_back([first, copy]) == ([first], [])
    ignored = [SettledMessage(first, Outcome.IGNORED)]
    assert copies.of(ignored) == []
    assert copies.settle(ignored) == ([], [copy])
    assert copies.hold_back([copy]) == ([copy], [])
    assert copies.settle([SettledMessage(copy, Outcome.IGNORED)]) == ([], [])
    assert copies.hold_back([commit(TWO, 2)]) == ([], [commit(TWO, 2)])
    event = SigningAccount().account_event(active=True)
    reports = [received_message("account", event)._replace(origin=origin) for origin in (HOST, ONE)]
    assert copies.hold_back(reports) == (reports, [])


@pytest.mark.parametrize("field", ["did", "commit", "rev", "since", "prev_data", "ops", "blocks"])
def test_a_message_with_another_field_is_no_copy(field: str) -> None:
    copies, forged, real = two_streams(), commit(TWO, 1, **{field: "another"}), commit(ONE, 1)
    assert copies.hold_back([forged, real]) == ([forged, real], [])
    assert copies.without_copies([real, forged]) == [real, forged]


def test_other_messages_are_copies_if_their_times_are_equal_too() -> None:
    alice = SigningAccount()
    for kind, payload in (
        ("sync", alice.sync_event()),
        ("identity", alice.identity_event()),
        ("account", alice.account_event(active=False, status="deactivated")),
    ):
        copies = two_streams()
        first, copy, later = [
            received_message(kind, payload | change)._replace(origin=origin)
            for origin, change in ((ONE, {}), (TWO, {"seq": 77}), (TWO, {"time": "2026-09-21T00:00:01Z"}))
        ]
        assert copies.hold_back([first, copy, later]) == ([first, later], [])


def test_messages_without_a_number_and_those_that_cannot_be_decoded_have_no_copies() -> None:
    leap, malformed = commit(ONE, 1)._replace(seq=None), MalformedEvent(Rejection.FIELD_INVALID, "", "", 1, None)
    messages = [leap, leap, *(ReceivedMessage(origin, 1, b"", malformed) for origin in (ONE, TWO))]
    copies = two_streams()
    assert copies.hold_back(messages) == (messages, [])


def test_with_one_stream_nothing_is_compared() -> None:
    copies = Copies(Inbox(10**9))
    twice = [commit(ONE, 1), commit(ONE, 2)]
    assert copies.hold_back(twice) == (twice, [])
    assert copies.settle([SettledMessage(one, Outcome.APPLIED) for one in twice]) == ([], [])


@dataclass
class Sent:
    """A message of the random test: its stream and what it says."""

    stream: int
    content: int


@given(
    sent=st.lists(st.builds(Sent, st.integers(0, 2), st.integers(0, 5)), max_size=25),
    max_recent=st.integers(1, 6),
    random=st.randoms(use_true_random=False),
)
def test_every_message_ends_once_and_a_copy_never_before_its_first_message(
    sent: list[Sent], max_recent: int, random: Random
) -> None:
    """Messages are planned, put back, rejected and settled in any order, and few of them are remembered."""
    copies = two_streams(max_recent)
    waiting = [
        commit(Origin(f"wss://{one.stream}.test"), seq, blocks=bytes([one.content])) for seq, one in enumerate(sent)
    ]
    in_work: list[ReceivedMessage] = []
    ended = Counter[int]()
    durable = set[bytes]()  # the contents of accepted messages

    def end(messages: list[ReceivedMessage]) -> None:
        for message in messages:
            assert message.event.blocks in durable  # type: ignore[union-attr]
            ended[message.seq or 0] += 1

    while waiting or in_work:
        taken = [waiting.pop(0) for _ in range(min(len(waiting), random.randint(1, 4)))]
        first, done = copies.hold_back(taken)
        end(done)
        in_work += first
        random.shuffle(in_work)
        settled = []
        for message in [in_work.pop() for _ in range(random.randint(0, len(in_work)))]:
            match random.choice(["put back", "rejected", "applied", "applied"]):
                case "put back":
                    waiting.insert(0, message)
                case "rejected":
                    settled.append(SettledMessage(message, Outcome.REJECTED))
                    ended[message.seq or 0] += 1
                case _:
                    settled.append(SettledMessage(message, Outcome.APPLIED))
                    durable.add(message.event.blocks)  # type: ignore[union-attr]
                    end([message])
        planned = copies.of(settled)
        done, again = copies.settle(settled)
        assert planned == done
        end(done)
        waiting += again
    assert ended == Counter(range(len(sent)))


@pytest.mark.parametrize("seed", SEEDS)
async def test_both_streams_bring_everything_and_each_commit_is_applied_once(
    make_scenario: MakeScenario, seed: int
) -> None:
    """Writes fail at random. The cursor of a stream never passes a message whose effects are not stored."""
    scenario, random = await make_scenario(batch_size=7, relays=RELAYS), Random(seed)
    accounts = [SigningAccount(name) for name in ("ada", "ben")]
    await scenario.add(*accounts)
    disturbance = Disturbance(scenario, accounts, seed)
    posts = [new_post(random.choice(accounts), number) for number in range(40)]
    behind = [0, 0]
    async with scenario.writer():
        while min(behind) < len(posts):
            stream = random.randrange(2)
            part = posts[behind[stream] : behind[stream] + random.randint(1, 9)]
            behind[stream] += len(part)
            await scenario.put(*part, stream=stream)
        await scenario.settled()
    assert disturbance.counts.total() > 0
    for account in accounts:
        assert (await scenario.row(account)).head == account.head
        changes = [rkey for _, rkey in await scenario.sql.fetch(CHANGES, account.did)]
        assert len(changes) == len(set(changes)) == len([post for post in posts if post.did == account.did])
    assert scenario.outcomes().total() == 2 * len(posts)
    assert scenario.outcomes()["applied"] <= len(posts), "an applied one counts as replayed if the answer was lost"


async def test_a_copy_and_its_first_message_are_done_in_one_transaction(make_scenario: MakeScenario) -> None:
    scenario, ada = await make_scenario(relays=RELAYS), SigningAccount("ada")
    await scenario.add(ada)
    post = new_post(ada, 0)
    for stream in (0, 1):
        await scenario.put(post, stream=stream)
    async with scenario.writer():
        await scenario.settled()
    [batch] = scenario.db.batches
    assert [(cursor.relay, cursor.seq) for cursor in batch.cursors] == [(relay, 1) for relay in RELAYS]


async def test_cursor_of_a_stream_is_saved_when_it_has_moved_also_by_copies_alone(make_scenario: MakeScenario) -> None:
    scenario, ada = await make_scenario(relays=RELAYS), SigningAccount("ada")
    await scenario.add(ada)
    posts = [new_post(ada, number) for number in range(3)]
    cursors = "select relay, seq from indexer.cursor order by relay"
    async with scenario.writer():
        await scenario.put(posts[0])
        await scenario.settled()
        assert list(map(tuple, await scenario.sql.fetch(cursors))) == [(RELAYS[0], 1)]
        await scenario.put(posts[0], stream=1)
        await scenario.settled()
        assert len(scenario.db.batches) == 1, "copies alone cause no transaction"
        await scenario.put(posts[1])
        await scenario.settled()
        assert list(map(tuple, await scenario.sql.fetch(cursors))) == [(RELAYS[0], 2), (RELAYS[1], 1)]
    duplicates = scenario.metrics.registry.get_sample_value("indexer_duplicate_events_total", {"relay": RELAYS[1]})
    assert duplicates == 1


async def test_messages_are_compared_when_they_are_settled_and_their_copies_after_them(
    make_scenario: MakeScenario,
) -> None:
    scenario, alice = await make_scenario(relays=RELAYS), SigningAccount()
    await scenario.add(alice)
    post = new_post(alice, 1)
    async with scenario.writer():
        await scenario.put(post)
        await scenario.put(post, stream=1)
        await scenario.settled()
        await scenario.put(post, stream=1)
        await scenario.settled()
    one, two = RELAYS
    assert scenario.compared == [(one, "commit", True), (two, "commit", None), (two, "commit", None)]
