from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexer.atproto.crypto import PublicKey
from indexer.atproto.limits import Limits
from indexer.demo.local_repo import Write
from indexer.errors import UpstreamError
from indexer.reasons import Desync, Rejection
from indexer.sync.batch import (
    DEAD_LETTER_BYTES,
    MAX_BATCH_BYTES,
    MAX_BATCH_CHANGES,
    BatchPlan,
    PreparedCommits,
    ReceivedMessage,
    commits_within,
    plan_batch,
    plan_refusal,
)
from indexer.sync.changes import DeadLetter, NeedsKey, RecordChange, RepoWrite
from indexer.sync.events import CommitEvent, MalformedEvent, UnknownEvent
from indexer.sync.policy import UNAVAILABLE, KeyState, Policy
from indexer.sync.repo import PARKED, TRANSITIONS, Outcome, Repo, SyncStatus
from indexer.sync.scope import Scope
from indexer.sync.stream import Origin
from indexer.sync.verify import VerifiedCommit
from tests.profiles import scaled
from tests.sync.hidden_deletion import high_path
from tests.sync.signing_account import CONTEXT, NOW, POST, RELAY, STORE_ALL, SigningAccount, received_message

NAMES = ("alice", "bob", "carol")
STEPS = st.lists(
    st.tuples(
        st.sampled_from(NAMES),
        st.sampled_from(["post", "edit", "empty", "lost", "sync", "deactivate", "activate", "repeat"]),
    ),
    max_size=25,
)


def messages(steps: Sequence[tuple[str, str]]) -> tuple[list[ReceivedMessage], dict[str, SigningAccount]]:
    """Return the messages that a relay sends for these steps, numbered from 1, and the accounts."""
    accounts = {name: SigningAccount(name) for name in NAMES}
    sent: list[ReceivedMessage] = [received_message("commit", account.first_commit()) for account in accounts.values()]
    for number, (name, step) in enumerate(steps):
        account = accounts[name]
        match step:
            case "post":
                sent.append(received_message("commit", account.commit_post(f"p{number}")))
            case "edit" if account.repo.records:
                path = max(account.repo.records)
                sent.append(received_message("commit", account.commit(Write.update(path, {"edit": number}))))
            case "empty":
                sent.append(received_message("commit", account.commit()))
            case "lost":
                account.commit_post(f"lost{number}")
            case "sync":
                sent.append(received_message("sync", account.sync_event()))
            case "activate" | "deactivate":
                sent.append(received_message("account", account.account_event(active=step == "activate")))
            case "repeat":
                sent.append(sent[number % len(sent)])
    return [message._replace(seq=seq) for seq, message in enumerate(sent, start=1)], accounts


def run(
    batches: Sequence[Sequence[ReceivedMessage]], accounts: dict[str, SigningAccount]
) -> tuple[dict[str, Repo], list[RecordChange], list[Outcome]]:
    """Plan batches one after the other, each on the rows that the previous ones leave."""
    key_states = {account.did: account.key_state for account in accounts.values()}
    rows: dict[str, Repo] = {}
    changes: list[RecordChange] = []
    outcomes: list[Outcome] = []
    for batch in batches:
        plan = plan_batch(batch, rows, lambda did: key_states[did]._replace(final=True), CONTEXT)
        assert not plan.waiting
        for write in plan.writes:
            before, after = rows.get(write.repo.did, Repo(write.repo.did)), write.repo.sync_status
            assert write.before.version == before.version
            if len(batch) == 1 and after is not before.sync_status:
                assert (plan.settled[0].outcome, after) in TRANSITIONS[before.sync_status].values()
            rows[write.repo.did] = write.repo
            changes += write.changes
        outcomes += [settled.outcome for settled in plan.settled]
    return rows, changes, outcomes


@settings(max_examples=scaled(60))
@given(STEPS, st.data())
def test_rows_do_not_depend_on_how_messages_are_divided_into_batches(
    steps: list[tuple[str, str]], data: st.DataObject
) -> None:
    sent, accounts = messages(steps)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(sent)), max_size=5)))
    batches = [sent[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(sent)], strict=True)]
    rows, changes, outcomes = run(batches, accounts)
    alone_rows, alone_changes, alone_outcomes = run([[message] for message in sent], accounts)
    assert rows == alone_rows
    assert sorted(map(repr, changes)) == sorted(map(repr, alone_changes))
    assert outcomes == alone_outcomes
    assert len(outcomes) == len(sent), "each message has one outcome"


def plan_of(
    batch: Sequence[ReceivedMessage], key_state: KeyState | None, rows: dict[str, Repo] | None = None
) -> BatchPlan:
    return plan_batch(batch, rows or {}, lambda _: key_state, CONTEXT)


def test_later_messages_of_an_account_wait_with_the_first_one() -> None:
    alice, bob = SigningAccount("alice"), SigningAccount("bob")
    batch = [
        received_message("commit", payload)
        for payload in (alice.first_commit(), alice.commit_post("a"), bob.first_commit(), alice.commit_post("b"))
    ]
    plan = plan_batch(batch, {}, lambda did: bob.key_state if did == bob.did else None, CONTEXT)
    assert plan.waiting == [batch[0], batch[1], batch[3]]
    assert plan.needed_keys == {alice.did: NeedsKey(alice.did, refresh=False)}
    assert [item.received for item in plan.settled] == [batch[2]]
    assert [write.repo.did for write in plan.writes] == [bob.did]


def test_messages_before_a_waiting_one_are_settled() -> None:
    alice, mallory = SigningAccount("alice"), SigningAccount("mallory")
    batch = [received_message("commit", alice.first_commit())]
    alice.key, good = mallory.key, alice.key_state
    batch.append(received_message("commit", alice.commit_post("signed by a new key")))
    plan = plan_of(batch, good)
    assert [item.outcome for item in plan.settled] == [Outcome.APPLIED]
    assert plan.needed_keys == {alice.did: NeedsKey(alice.did, refresh=True)}
    assert plan.waiting == [batch[1]]


def test_the_old_key_is_not_used_after_an_identity_event() -> None:
    alice = SigningAccount("alice")
    batch = [
        received_message("commit", alice.first_commit()),
        received_message("identity", alice.identity_event()),
        received_message("commit", alice.commit_post("a")),
    ]
    plan = plan_of(batch, alice.key_state)
    assert plan.stale_identities == {alice.did}
    assert plan.waiting == [batch[2]]
    assert plan.needed_keys == {alice.did: NeedsKey(alice.did, refresh=False)}


def news_of(plan: BatchPlan) -> list[tuple[Outcome, bool]]:
    return [(item.outcome, item.is_new) for item in plan.settled]


@pytest.mark.parametrize(
    ("status", "outcome", "repeated"),
    [
        (SyncStatus.SYNCHRONIZED, Outcome.APPLIED, Outcome.REPLAYED),
        (SyncStatus.DESYNCHRONIZED, Outcome.IGNORED, Outcome.IGNORED),
        (SyncStatus.IN_PROGRESS, Outcome.BUFFERED, Outcome.BUFFERED),
    ],
)
def test_authentic_commit_is_new_once(status: SyncStatus, outcome: Outcome, repeated: Outcome) -> None:
    alice = SigningAccount()
    row = alice.row(status)
    commits = [received_message("commit", alice.commit_post(rkey)) for rkey in "abc"]
    plan = plan_of([commits[0], commits[0], commits[2], commits[1]], alice.key_state, {alice.did: row})
    assert news_of(plan)[:2] == [(outcome, True), (repeated, False)]
    assert [item.is_new for item in plan.settled][2:] == [True, False], "a later rev is known"


def test_sync_is_new_if_its_rev_is() -> None:
    alice = SigningAccount()
    row, old = alice.row(), received_message("sync", alice.sync_event())
    alice.commit_post("lost")
    sync = received_message("sync", alice.sync_event())
    plan = plan_of([old, sync, sync], alice.key_state, {alice.did: row})
    assert news_of(plan) == [(Outcome.IGNORED, False), (Outcome.DESYNCHRONIZED, True), (Outcome.IGNORED, False)]


def test_second_state_with_the_stored_rev_is_not_new() -> None:
    alice = SigningAccount()
    sync = received_message("sync", alice.sync_event())
    row = alice.row()
    other = row._replace(head=alice.head._replace(data=b"another tree"))
    assert news_of(plan_of([sync], alice.key_state, {alice.did: other})) == [(Outcome.DESYNCHRONIZED, False)]


def test_commit_that_was_heard_before_its_key_was_known_is_not_new() -> None:
    alice = SigningAccount()
    row, commit = alice.row(), received_message("commit", alice.commit_post("a"))
    unchecked = plan_of([commit], UNAVAILABLE, {alice.did: row})
    [write] = unchecked.writes
    checked = plan_of([commit], alice.key_state, {alice.did: write.repo})
    assert news_of(unchecked) == [(Outcome.DESYNCHRONIZED, False)]
    assert news_of(checked) == [(Outcome.IGNORED, False)]


def test_what_is_forged_or_not_signed_is_not_new() -> None:
    alice = SigningAccount()
    batch = [
        received_message("commit", alice.commit_post("a")),
        received_message("account", alice.account_event(active=True)),
        received_message("identity", alice.identity_event()),
    ]
    plan = plan_of(batch, SigningAccount("mallory").key_state._replace(final=True), {alice.did: alice.row()})
    assert [item.is_new for item in plan.settled] == [False, False, False]


def test_rejected_messages_become_dead_letters_and_change_nothing() -> None:
    alice = SigningAccount("alice")
    long = MalformedEvent(Rejection.FIELD_INVALID, "rev", "#commit", 7, alice.did)
    third_epoch = Origin(RELAY, 3)
    forged = received_message("commit", alice.first_commit())._replace(origin=third_epoch)
    batch = [
        ReceivedMessage(third_epoch, 7, b"x" * 200_000, long),
        forged,
        ReceivedMessage(third_epoch, 9, b"", UnknownEvent("#new", 9)),
    ]
    mallory = SigningAccount("mallory").key_state._replace(final=True)
    plan = plan_batch(batch, {}, lambda _: mallory, CONTEXT)
    assert [item.outcome for item in plan.settled] == [Outcome.REJECTED, Outcome.REJECTED, Outcome.IGNORED]
    assert [item.why for item in plan.settled] == [Rejection.FIELD_INVALID, Rejection.SIGNATURE_INVALID, None]
    assert [dead_letter.reason for dead_letter in plan.dead_letters] == [
        Rejection.FIELD_INVALID,
        Rejection.SIGNATURE_INVALID,
    ]
    frame = b"x" * DEAD_LETTER_BYTES
    assert plan.dead_letters[0] == DeadLetter(
        RELAY, 7, alice.did, "#commit", Rejection.FIELD_INVALID, "rev", frame, epoch=3
    )
    assert plan.dead_letters[1].frame == forged.frame
    assert plan.writes == ()


def test_buffered_frames_are_written_unless_the_resync_ends_in_the_same_batch() -> None:
    alice = SigningAccount("alice")
    row = Repo(alice.did, version=3, sync_status=SyncStatus.IN_PROGRESS, lease=1)
    commits = [received_message("commit", alice.commit_post(rkey)) for rkey in "ab"]
    batch = [*commits, received_message("identity", alice.identity_event())]
    (write,) = plan_of(batch, alice.key_state, {alice.did: row}).writes
    assert [(event.seq, event.frame) for event in write.buffered] == [(sent.seq, sent.frame) for sent in commits]
    assert write.repo.buffered_events == 2
    assert write.repo.buffered_bytes == sum(len(message.frame) for message in commits)
    assert (write.before.version, write.live, write.advances) == (3, True, False)
    batch += [received_message("account", alice.account_event(active=active)) for active in (False, True)]
    (write,) = plan_of(batch, alice.key_state, {alice.did: row}).writes
    assert (write.repo.sync_reason, write.buffered) == (Desync.REACTIVATED, ())


def test_write_marks_lenient_commits_and_says_that_nothing_but_the_head_changes() -> None:
    alice = SigningAccount("alice")
    alice.commit(*(Write.create(f"{POST}/{number:03}", {"n": number}) for number in range(200)))
    row = alice.row()
    batch = [
        received_message("commit", alice.commit_with_hidden_deletion(high_path(f"{POST}/{start}-"), f"{POST}/{victim}"))
        for start, victim in (("100", "110"), ("050", "120"))
    ]
    context = replace(CONTEXT, policy=replace(STORE_ALL, lenient=True))
    (write,) = plan_batch(batch, {alice.did: row}, lambda _: alice.key_state, context).writes
    assert (write.repo.unproven_since, write.advances) == (CONTEXT.now, False)
    row, message = alice.row(), received_message("commit", alice.commit_post("a"))
    (write,) = plan_of([message], alice.key_state, {alice.did: row}).writes
    assert (write.before.version, write.live, write.advances) == (row.version, True, True)


def test_row_of_a_new_repo_says_that_the_stream_added_it_for_this_scope() -> None:
    alice = SigningAccount("alice")
    context = replace(CONTEXT, policy=replace(STORE_ALL, scope=Scope(7)))
    batch = [received_message("account", alice.account_event(active=True))]
    (write,) = plan_batch(batch, {}, lambda _: None, context).writes
    assert (write.before.version, write.repo.from_stream, write.repo.wanted_in) == (0, True, 7)


class RejectingAll(PreparedCommits):
    def verify(self, event: CommitEvent, key: PublicKey, limits: Limits) -> VerifiedCommit:  # noqa: ARG002
        raise UpstreamError(Rejection.COMMIT_MALFORMED, "in a test")


def test_commits_are_verified_with_the_prepared_results() -> None:
    alice = SigningAccount("alice")
    batch = [received_message("commit", alice.first_commit())]
    plan = plan_batch(batch, {}, lambda _: alice.key_state, CONTEXT, RejectingAll())
    assert [(letter.reason, letter.detail) for letter in plan.dead_letters] == [
        (Rejection.COMMIT_MALFORMED, "in a test")
    ]


def test_messages_up_to_the_maximum_of_bytes_are_planned() -> None:
    batch = [
        ReceivedMessage(CONTEXT.origin, seq, b"x" * size, UnknownEvent("#new", seq))
        for seq, size in enumerate([MAX_BATCH_BYTES - 1, 1, 1, 1], start=1)
    ]
    plan = plan_of(batch, None)
    assert [settled.received for settled in plan.settled] == batch[:3]
    assert plan.postponed == batch[3:]


def test_commits_to_verify_ahead_are_those_of_the_first_frames() -> None:
    alice = SigningAccount("alice")
    sent = [received_message("commit", alice.commit_post(f"p{number}")) for number in range(4)]
    sent.insert(1, received_message("identity", alice.identity_event()))
    size = sum(len(message.frame) for message in sent[:3])
    assert commits_within(sent, size) == [sent[0], sent[2], sent[3]]
    assert commits_within(sent, size - 1) == [sent[0], sent[2]]
    assert commits_within(sent, 0) == [sent[0]]


def test_message_whose_effects_cannot_be_stored_causes_a_resync_and_a_dead_letter() -> None:
    alice = SigningAccount("alice")
    row, message = alice.row(), received_message("commit", alice.commit_post("a"))
    plan = plan_refusal(message, row, "too large", CONTEXT)
    [letter] = plan.dead_letters
    assert (letter.reason, letter.kind, letter.detail, letter.did, letter.frame) == (
        Rejection.STORE_FAILED,
        "commit",
        "too large",
        alice.did,
        message.frame,
    )
    [write] = plan.writes
    assert (write.before.version, write.repo.sync_status, write.repo.sync_reason, write.changes) == (
        row.version,
        SyncStatus.DESYNCHRONIZED,
        Desync.STORE_FAILED,
        (),
    )
    parked = alice.row(SyncStatus.DESYNCHRONIZED, next_attempt_at=PARKED)
    [write] = plan_refusal(message, parked, "too large", CONTEXT).writes
    assert (write.repo.sync_reason, write.repo.next_attempt_at) == (Desync.CHAIN_BREAK, NOW)
    assert plan_refusal(message, None, "too large", CONTEXT).writes == ()


def test_an_unavailable_key_settles_all_messages() -> None:
    alice = SigningAccount("alice")
    batch = [received_message("commit", payload) for payload in (alice.first_commit(), alice.commit_post("a"))]
    outcomes = [(item.outcome, item.why) for item in plan_of(batch, UNAVAILABLE).settled]
    assert outcomes == [(Outcome.DESYNCHRONIZED, Desync.IDENTITY), (Outcome.IGNORED, Desync.IDENTITY)]


def plan_too_many(commits: Sequence[Sequence[Write]], policy: Policy = STORE_ALL) -> tuple[RepoWrite, int]:
    """Plan too many commits for a batch; return the write of the planned ones, and the bytes of their messages."""
    alice = SigningAccount()
    row = alice.row()
    sent = [received_message("commit", alice.commit(*writes)) for writes in commits]
    plan = plan_batch(sent, {alice.did: row}, {alice.did: alice.key_state}.get, replace(CONTEXT, policy=policy))
    planned = [settled.received for settled in plan.settled]
    assert [*planned, *plan.postponed] == sent
    assert plan.postponed
    [write] = plan.writes
    return write, sum(len(message.frame) for message in planned)


def test_batch_takes_no_more_messages_than_its_bytes_allow() -> None:
    block = b"\x7a" + (300_000).to_bytes(4) + b"\x01" * 300_000
    write, received = plan_too_many([[Write.create(f"a.b.c/{m}{n}", block) for n in range(4)] for m in range(10)])
    sizes = [change.size for change in write.changes]
    assert MAX_BATCH_BYTES < sum(sizes) + received < MAX_BATCH_BYTES + 2 * sum(sizes[:4])


def test_batch_takes_no_more_messages_than_its_changes_allow() -> None:
    write, _ = plan_too_many([[Write.create(f"a.b.c/{m}-{n}", {}) for n in range(200)] for m in range(30)])
    assert MAX_BATCH_CHANGES < len(write.changes) <= MAX_BATCH_CHANGES + 200


@settings(max_examples=scaled(50))
@given(STEPS, st.sets(st.sampled_from(NAMES)))
def test_plan_without_accounts_is_the_plan_of_the_other_messages(steps: list[tuple[str, str]], names: set[str]) -> None:
    batch, accounts = messages(steps)
    batch.append(received_message("identity", accounts["alice"].identity_event()))
    batch.append(received_message("commit", accounts["bob"].commit_post("bad") | {"blocks": b"no CAR"}))
    keys = {account.did: account.key_state for name, account in accounts.items() if name != "carol"}
    dids = {accounts[name].did for name in names}
    rest = [message for message in batch if message.did not in dids]
    assert plan_batch(batch, {}, keys.get, CONTEXT).without(dids) == plan_batch(rest, {}, keys.get, CONTEXT)


def test_unchanged_accounts_are_those_without_a_write() -> None:
    alice, bob, carol = (SigningAccount(name) for name in NAMES)
    rows = {account.did: account.row() for account in (alice, bob, carol)}
    replayed = received_message("commit", bob.first_commit())
    batch = [replayed, received_message("commit", carol.commit_post("x"))]
    plan = plan_batch(batch, rows, {carol.did: carol.key_state}.get, CONTEXT)
    assert plan.unchanged == {bob.did}
    assert [write.repo.did for write in plan.writes] == [carol.did]


def test_early_commits_wait_and_those_with_lower_revs_pass_them() -> None:
    alice, bob = SigningAccount("alice"), SigningAccount("bob")
    rows = {account.did: account.row() for account in (alice, bob)}
    first, second, third, fourth = [received_message("commit", alice.commit_post(rkey)) for rkey in "abcd"]
    identity = received_message("identity", alice.identity_event())
    other = received_message("commit", bob.commit_post("a"))
    keys = {account.did: account.key_state for account in (alice, bob)}
    context = replace(CONTEXT, other_streams=True)
    plan = plan_batch([third, identity, fourth, second, other], rows, keys.get, context)
    assert (plan.waiting, plan.early) == ([second, third, identity, fourth], {alice.did: second.event.rev})  # type: ignore[union-attr]
    assert [item.received for item in plan.settled] == [other]
    assert plan.unchanged == {alice.did}
    assert plan.without({alice.did}).early == {}
    plan = plan_batch([third, identity, first], rows, keys.get, context)
    assert (plan.waiting, [item.received for item in plan.settled]) == ([third, identity], [first])
    assert plan.unchanged == set()
