"""The native core accepts nothing with another result than the reference, and decides all ordinary commits."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexer.atproto import cbor
from indexer.atproto.car import split_car
from indexer.atproto.cid import RAW, cid_of
from indexer.atproto.crypto import Curve, PublicKey
from indexer.atproto.limits import DEFAULT_LIMITS
from indexer.atproto.syntax import CollectionFilter
from indexer.core.core import NativeCore
from indexer.demo import dag_cbor
from indexer.demo.local_repo import Write, car, car_header, car_section
from indexer.errors import UpstreamError
from indexer.reasons import Desync, Rejection
from indexer.sync.batch import MAX_BATCH_BYTES, commits_to_verify, commits_within, plan_batch
from indexer.sync.changes import RecordChange, RecordConverter
from indexer.sync.events import CommitEvent, RepoOp
from indexer.sync.policy import KeyState, Policy
from indexer.sync.repo import Repo
from indexer.sync.scope import Scope
from indexer.sync.verify import VerifiedCommit, verify_commit
from tests.native_module import module_core, native_core, native_module, native_reader, shared_core, verified
from tests.profiles import scaled
from tests.sync import published_frames, test_plan_batch
from tests.sync.signing_account import CONTEXT, POST, STORE_ALL, SigningAccount, decoded_event

native_module()  # without it, the module is skipped

CURVES: tuple[Curve, ...] = ("k256", "p256")
_P256_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
_K256_ORDER = 0xFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFEBAAEDCE6AF48A03BBFD25E8CD0364141
ORDERS = {"k256": _K256_ORDER, "p256": _P256_ORDER}

ACTIONS = st.tuples(st.sampled_from(["create", "update", "delete"]), st.integers(0, 30))
COMMITS = st.lists(st.lists(ACTIONS, min_size=1, max_size=6), min_size=1, max_size=6)
"""For each commit the actions on records, each with a number that selects the record."""


def reference(event: CommitEvent, key: PublicKey) -> VerifiedCommit | tuple[Rejection, str]:
    try:
        return verify_commit(event, key, DEFAULT_LIMITS)
    except UpstreamError as error:
        return error.reason, error.detail


def record_changes(commit: VerifiedCommit, policy: Policy) -> list[RecordChange | None]:
    converter = RecordConverter(policy, commit.did, commit.head.rev, commit.size)
    return [converter.convert(change) for change in commit.changes]


def without_converted(commit: VerifiedCommit) -> VerifiedCommit:
    return commit._replace(changes=tuple([change._replace(converted=None) for change in commit.changes]))


def accepted(core: NativeCore, event: CommitEvent, key: PublicKey, policy: Policy = STORE_ALL) -> bool:
    """Return True if the native core decides the commit, after comparing its result with that of the reference."""
    (commit,) = verified(core, [(event, key)], policy)
    if commit is None:
        return False
    expected = reference(event, key)
    assert isinstance(expected, VerifiedCommit), (event, expected)
    assert without_converted(commit) == expected
    assert record_changes(commit, policy) == record_changes(expected, policy)
    return True


def commits_of(account: SigningAccount, steps: Sequence[Sequence[tuple[str, int]]]) -> Iterator[CommitEvent]:
    """Yield a commit for each list of actions, each on another record."""
    for number, actions in enumerate(steps):
        writes: dict[str, Write] = {}
        for action, record in actions:
            path, value = f"{POST}/r{record}", {"$type": POST, "number": number, "record": record}
            exists = path in account.repo.records
            if action == "create" and not exists:
                writes[path] = Write.create(path, value)
            elif action == "update" and exists:
                writes[path] = Write.update(path, value)
            elif action == "delete" and exists:
                writes[path] = Write.delete(path)
        yield decoded_event("commit", account.commit(*writes.values()))


@settings(max_examples=scaled(100))
@given(COMMITS, st.sampled_from(CURVES))
def test_all_ordinary_commits_are_decided_with_the_results_of_the_reference(
    steps: list[list[tuple[str, int]]], curve: Curve
) -> None:
    account = SigningAccount(curve=curve)
    events = [decoded_event("commit", account.first_commit()), *commits_of(account, steps)]
    for event in events:
        assert accepted(shared_core(), event, account.key.public)
    results = verified(shared_core(), [(event, account.key.public) for event in events], STORE_ALL)
    for event, commit in zip(events, results, strict=True):
        assert commit is not None
        assert all(change.converted for change in commit.changes if change.new)
        assert without_converted(commit) == reference(event, account.key.public)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_batch_returns_a_result_for_each_commit_in_order(threads: int) -> None:
    core = native_core(threads)
    assert verified(core, [], STORE_ALL) == []
    account, other = SigningAccount(), SigningAccount("bob")
    events = [decoded_event("commit", account.commit_post(f"p{number}")) for number in range(100)]
    keys = [other.key.public if number % 7 == 0 else account.key.public for number in range(100)]
    results = verified(core, list(zip(events, keys, strict=True)), STORE_ALL)
    assert [commit and commit.head.rev for commit in results] == [
        None if number % 7 == 0 else event.rev for number, event in enumerate(events)
    ]


@pytest.mark.parametrize("curve", CURVES)
def test_every_flipped_bit_and_every_cut_of_a_slice_is_left_to_the_reference(curve: Curve) -> None:
    account = SigningAccount(curve=curve)
    account.commit_post("first")
    event = decoded_event("commit", account.commit_post("second"))
    assert accepted(shared_core(), event, account.key.public)
    for index in range(len(event.blocks)):
        for bit in range(8):
            changed = bytearray(event.blocks)
            changed[index] ^= 1 << bit
            assert not accepted(shared_core(), event._replace(blocks=bytes(changed)), account.key.public)
        assert not accepted(shared_core(), event._replace(blocks=event.blocks[:index]), account.key.public)


def other_bytes(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


FIELDS: dict[str, Callable[[CommitEvent], CommitEvent]] = {
    "did": lambda event: event._replace(did="did:plc:aaaaaaaaaaaaaaaaaaaaaaaa"),
    "rev": lambda event: event._replace(rev="3zzzzzzzzzzzz"),
    "commit": lambda event: event._replace(commit=other_bytes(event.commit)),
    "prevData": lambda event: event._replace(prev_data=other_bytes(event.prev_data or b"?")),
    "no prevData": lambda event: event._replace(prev_data=None),
    "prevData of another size": lambda event: event._replace(prev_data=b"\x01\x71\x12\x00"),
    "no ops": lambda event: event._replace(ops=()),
    "ops twice": lambda event: event._replace(ops=event.ops * 2),
    "path": lambda event: event._replace(ops=(event.ops[0]._replace(path="a.b.c/d"),)),
    "action": lambda event: event._replace(ops=(event.ops[0]._replace(action="update"),)),
    "unknown action": lambda event: event._replace(ops=(event.ops[0]._replace(action="merge"),)),
    "cid": lambda event: event._replace(ops=(event.ops[0]._replace(cid=other_bytes(event.ops[0].cid or b"?")),)),
    "no cid": lambda event: event._replace(ops=(event.ops[0]._replace(cid=None),)),
    "cid of another size": lambda event: event._replace(ops=(event.ops[0]._replace(cid=b"\x01\x71\x12\x00"),)),
    "prev": lambda event: event._replace(ops=(event.ops[0]._replace(prev=cid_of(b"")),)),
    "another operation": lambda event: event._replace(
        ops=(*event.ops, RepoOp("create", f"{POST}/other", event.ops[0].cid, None))
    ),
    "no blocks": lambda event: event._replace(blocks=b""),
}


@pytest.mark.parametrize("name", FIELDS)
def test_a_changed_field_is_left_to_the_reference(name: str) -> None:
    account = SigningAccount()
    account.commit_post("a")
    event = decoded_event("commit", account.commit_post("b"))
    assert not accepted(shared_core(), FIELDS[name](event), account.key.public)


def test_a_missing_block_is_left_to_the_reference_if_it_is_needed() -> None:
    account = SigningAccount()
    account.commit(*[Write.create(f"{POST}/r{number}", {"number": number}) for number in range(60)])
    event = decoded_event("commit", account.commit(Write.create(f"{POST}/r17a", {}), Write.delete(f"{POST}/r40")))
    (root,), blocks = split_car(event.blocks, DEFAULT_LIMITS, max_bytes=len(event.blocks))
    needed = 0
    for missing in blocks:
        rest = b"".join(car_section(cid, block) for cid, block in blocks.items() if cid != missing)
        result = accepted(shared_core(), event._replace(blocks=car_header(root) + rest), account.key.public)
        expected = reference(event._replace(blocks=car_header(root) + rest), account.key.public)
        needed += not result
        assert result == (isinstance(expected, VerifiedCommit) and expected.flaw is None)
    assert needed >= 4


@pytest.mark.parametrize("curve", CURVES)
def test_only_the_low_s_signature_of_the_right_key_is_accepted(curve: Curve) -> None:
    account, other = SigningAccount(curve=curve), SigningAccount("bob", curve)
    event = decoded_event("commit", account.commit_post("a"))
    commit = account.repo.head.block
    start = commit.index(b"\x63sig\x58\x40") + 6
    r, s = commit[start : start + 32], int.from_bytes(commit[start + 32 : start + 64])
    order = ORDERS[curve]
    signatures = {
        "valid": r + s.to_bytes(32),
        "high-S": r + (order - s).to_bytes(32),
        "s of zero": r + bytes(32),
        "s of the order": r + order.to_bytes(32),
        "s too large": r + b"\xff" * 32,
        "r of zero": bytes(32) + s.to_bytes(32),
        "r of the order": order.to_bytes(32) + s.to_bytes(32),
        "r too large": b"\xff" * 32 + s.to_bytes(32),
        "swapped": s.to_bytes(32) + r,
        "another": other.key.sign(b""),
    }
    decided = {}
    for name, signature in signatures.items():
        signed = commit[:start] + signature + commit[start + 64 :]
        _, blocks = split_car(event.blocks, DEFAULT_LIMITS, max_bytes=len(event.blocks))
        rest = {cid: block for cid, block in blocks.items() if cid != event.commit}
        changed = event._replace(commit=cid_of(signed), blocks=car({cid_of(signed): signed} | rest))
        decided[name] = accepted(shared_core(), changed, account.key.public)
    assert [name for name, result in decided.items() if result] == ["valid"]
    assert not accepted(shared_core(), event, other.key.public)
    wrong_curve = SigningAccount(curve="p256" if curve == "k256" else "k256")
    assert not accepted(shared_core(), event, wrong_curve.key.public)


def test_signed_commits_of_unusual_forms_agree_with_the_reference() -> None:
    account = SigningAccount()
    event = decoded_event("commit", account.commit_post("a"))
    _, blocks = split_car(event.blocks, DEFAULT_LIMITS, max_bytes=len(event.blocks))
    usual = {"did": account.did, "rev": account.repo.head.rev, "data": account.repo.head.data, "prev": None}
    forms: dict[str, list[Any]] = {
        "prev": [None, cid_of(b"before"), ..., b"before", RAW + b"csigX@" + bytes(26)],
        "version": [3, 2, ...],
        "other": [..., 1],
        "did": [account.did, "did:plc:", "did:plc:aaaaaaaaaaaaaaaaaaaaaaaa", 1],
        "rev": [event.rev, "3zzzzzzzzzzzz", "3zzzzzzzzzzz1"],
        "data": [account.repo.head.data, b"data", None],
    }
    for name, values in forms.items():
        for value in values:
            fields: dict[str, Any] = usual | {"version": 3} | {name: value}
            unsigned = dag_cbor.encode({name: value for name, value in fields.items() if value is not ...})
            at = unsigned.index(b"\x64data")  # the entry `sig` is before it
            signature = b"\x63sig\x58\x40" + account.key.sign(unsigned)
            block = bytes([unsigned[0] + 1]) + unsigned[1:at] + signature + unsigned[at:]
            changed = event._replace(commit=cid_of(block), blocks=car({cid_of(block): block} | blocks))
            decided = value == values[0] or value == cid_of(b"before")
            assert accepted(shared_core(), changed, account.key.public) is decided, fields


def test_a_hidden_deletion_and_several_operations_on_one_path_are_left_to_the_reference() -> None:
    account = SigningAccount()
    path = f"{POST}/a"
    event = decoded_event("commit", account.commit(Write.create(path, {"n": 1}), Write.update(path, {"n": 2})))
    assert len(event.ops) == 2
    assert not accepted(shared_core(), event, account.key.public)
    account.commit(*[Write.create(f"{POST}/r{number}", {"number": number}) for number in range(100)])
    event = decoded_event("commit", account.commit_with_hidden_deletion(f"{POST}/r5a", f"{POST}/r50"))
    expected = reference(event, account.key.public)
    assert isinstance(expected, VerifiedCommit)
    assert expected.flaw is Desync.UNDECIDABLE
    assert not accepted(shared_core(), event, account.key.public)


@settings(max_examples=scaled(50))
@given(test_plan_batch.STEPS)
def test_a_batch_is_planned_alike_with_and_without_the_core(steps: list[tuple[str, str]]) -> None:
    """Its commits are verified ahead, in parts."""
    batch, accounts = test_plan_batch.messages(steps)
    keys = {account.did: account.key_state for account in accounts.values()}
    current = {account.did: account.row() for account in accounts.values()}
    stale = {did: state._replace(stale=True) for did, state in keys.items()}
    cases: list[tuple[dict[str, Repo], dict[str, KeyState]]] = [({}, keys), (current, keys), ({}, stale)]
    for rows, known in cases:
        commits = commits_within(batch, MAX_BATCH_BYTES)
        all_rows = {did: Repo(did) for did in keys} | rows
        chosen = commits_to_verify(commits, all_rows.__getitem__, known.get, CONTEXT)
        running = shared_core().begin_verification(chosen, CONTEXT.policy)
        prepared = running.next_results(2)
        assert len(prepared) <= 2
        prepared |= running.next_results()
        assert len(running.next_results(2)) == 0
        assert all(id(event) in prepared for event, _ in chosen)
        assert plan_batch(batch, rows, known.get, CONTEXT, prepared) == plan_batch(batch, rows, known.get, CONTEXT)


def test_published_commits_are_decided() -> None:
    """The frames of the public relay, and the same frames with a bit of each byte of the slice changed."""
    decided = 0
    for _, event in published_frames.commits():
        key = published_frames.keys()[event.did]
        decided += accepted(shared_core(), event, key)
        for index in range(0, len(event.blocks), 97):
            changed = bytearray(event.blocks)
            changed[index] ^= 1 << index % 8
            assert not accepted(shared_core(), event._replace(blocks=bytes(changed)), key)
    assert decided == len(published_frames.commits()) > 60


@pytest.mark.parametrize("store_values", [True, False])
def test_only_selected_records_are_converted(store_values: bool) -> None:
    account = SigningAccount()
    paths = [f"{POST}/a", "app.bsky.graph.follow/b", "com.example.thing/c", "com.examples.thing/d"]
    event = decoded_event("commit", account.commit(*[Write.create(path, {"path": path}) for path in paths]))
    for patterns in (["*"], [POST], ["app.bsky.*"], ["com.example.*", "app.bsky.graph.follow"]):
        policy = Policy(Scope(collections=CollectionFilter(patterns)), DEFAULT_LIMITS, store_values=store_values)
        assert accepted(shared_core(), event, account.key.public, policy)
        (commit,) = verified(shared_core(), [(event, account.key.public)], policy)
        assert commit is not None
        selected = [store_values and policy.scope.collections.matches(path.partition("/")[0]) for path in paths]
        assert [change.converted is not None for change in commit.changes] == selected


@pytest.mark.parametrize(
    "records",
    [
        [dag_cbor.encode({"$type": POST, "text": "x" * 2_000})] * 3,
        [cbor.encode({"list": [[]] * number}) for number in (1_000, 16_000, 17_000, 30_000)],
        [cbor.encode({"list": [b""] * number}) for number in (1_000, 20_000)],
        [cbor.encode([{}] * 70_000)],
        [b"", b"\xff", b"\x00", b"\xa0", b"\x80", b"\x60", b"\xf6", b"\xfb" + bytes(8)],
        [dag_cbor.encode({"$type": name}) for name in (POST, "x", "", 1, None, cid_of(b""), ["a"])],
        [dag_cbor.encode({"text": "\0"}), dag_cbor.encode({"$link": "x"}), dag_cbor.encode("$bytes")],
    ],
)
def test_budgets_and_problems_of_records_equal_those_of_the_reference(records: list[bytes]) -> None:
    account = SigningAccount()
    writes = [Write.create(f"{POST}/r{number}", record) for number, record in enumerate(records)]
    event = decoded_event("commit", account.commit(*writes))
    assert accepted(shared_core(), event, account.key.public)


def test_a_block_that_many_paths_name_is_converted_once() -> None:
    account = SigningAccount()
    block = dag_cbor.encode({"text": "x" * 50_000})
    event = decoded_event("commit", account.commit(*[Write.create(f"a.b.c{n}/r", block) for n in range(100)]))
    assert accepted(shared_core(), event, account.key.public)
    (commit,) = verified(shared_core(), [(event, account.key.public)], STORE_ALL)
    assert commit is not None
    assert sum(change.converted is not None for change in commit.changes) == 1
    assert len({id(change.block) for change in commit.changes}) == 1
    problems = {change and change.problem for change in record_changes(commit, STORE_ALL)}
    assert "omitted" in problems


# Panics, each a bug: an exception of its caller, whichever thread it happens in

SIZE_OF_NO_MEMORY = 1 << 63
"""A page of this size is more than the core can allocate."""


def is_panic(error: BaseException) -> bool:
    """Return True for the exception that PyO3 makes of a panic. It has no public name."""
    return type(error).__name__ == "PanicException"


@pytest.fixture(params=[1, 4], ids=["one thread", "four threads"])
def core(request: pytest.FixtureRequest) -> Any:
    return module_core(request.param)


def test_core_goes_on_after_panics_in_many_threads_at_once(core: Any) -> None:
    """Callers in other threads neither wait forever nor get the panic."""

    def call(number: int) -> BaseException | list[Any] | None:
        try:
            begun = core.panic(50) if number % 2 else core.begin([], [], DEFAULT_LIMITS)
            return begun.next_results(1)  # type: ignore[no-any-return]
        except BaseException as error:  # noqa: BLE001 - a panic is no Exception
            return error

    with ThreadPoolExecutor(8) as threads:
        results = list(threads.map(call, range(200)))
    assert all(isinstance(result, BaseException) and is_panic(result) for result in results[1::2])
    assert results[::2] == [[]] * 100


def test_panic_while_an_export_is_read_ends_each_further_call(tmp_path: Path) -> None:
    account = SigningAccount()
    account.commit(*[Write.create(f"{POST}/r{number}", {"number": number}) for number in range(9)])
    reader = native_reader(tmp_path, DEFAULT_LIMITS, buffer_bytes=1, page_bytes=SIZE_OF_NO_MEMORY)
    reader.write(b"".join(account.repo.export()))
    with pytest.raises(BaseException, match="capacity overflow") as raised:
        reader.block(account.repo.head.cid)
    assert is_panic(raised.value)
    calls: list[Callable[[], object]] = [reader.finish, lambda: reader.write(b"x"), lambda: reader.size]
    for call in calls:
        with pytest.raises(RuntimeError, match="an earlier call has panicked"):
            call()
    reader.close()
