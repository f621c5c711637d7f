"""The targets of the fuzzer: their first inputs reach every outcome, and wrong code and costly inputs are found."""

import hmac
import json
import mmap
import resource
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import inf
from random import Random
from typing import Any, NoReturn

import orjson
import pytest

from indexer.atproto.car import split_car
from indexer.atproto.cid import cid_of
from indexer.atproto.commit import decode_commit, encode_unsigned
from indexer.atproto.crypto import PrivateKey, PublicKey
from indexer.atproto.limits import DEFAULT_LIMITS
from indexer.atproto.mst import Node, Verdict
from indexer.atproto.syntax import AtUri
from indexer.errors import UnavailableError
from indexer.identity import did_resolver, dns_records
from indexer.pds import pds_client, repo_list
from indexer.pds.repo_list import ListedAccount, RepoStatus
from indexer.reasons import FetchFailure
from indexer.relay.seek import Entry
from indexer.service.feed import tap_routes
from indexer.service.feed.answers import answer
from indexer.service.feed.delivery_window import DeliveryWindow
from indexer.setting_types import Address
from indexer.store import DatabaseError
from indexer.sync.events import CommitEvent
from indexer.sync.frames import MAX_SEQ, decode_frame
from indexer.sync.plan_resync import Completion
from indexer.sync.plans import Batch, RecordChange, RepoWrite
from indexer.sync.record_change import RecordConverter
from indexer.sync.verify import VerifiedChange, verify_commit, verify_export_commit, verify_record
from tests.fuzz import (
    block_targets,
    buffer_target,
    database_targets,
    feed_targets,
    host_targets,
    inversion_target,
    key_targets,
    message_target,
    operator_targets,
    record_targets,
    stream_targets,
    syntax_targets,
)
from tests.fuzz.commit_parts import NODE_START, signed
from tests.fuzz.comparison import DifferenceError
from tests.fuzz.database_targets import FuzzDatabase
from tests.fuzz.input_cost import MEMORY_INTERVAL, PROCESS_MEMORY, CostError, CostLimit, CostMeter
from tests.fuzz.json_mutation import mutate_json
from tests.fuzz.seed_files import (
    published_blocks,
    published_commits,
    published_exports,
    published_frames,
    published_lines,
)
from tests.fuzz.seeds import accounts
from tests.fuzz.targets import TARGETS, Target
from tests.native_module import native_module
from tests.store.repo_rows import synchronized
from tests.vectors import vectors

SEEDS = 100
SLOW_TARGETS = ("records", "lexicons", "buffers", "handles", "tap-requests")


def marks_of(name: str) -> list[pytest.MarkDecorator]:
    """Return the mark of a slow target."""
    return [pytest.mark.slow] if name in SLOW_TARGETS else []


@contextmanager
def target_of(name: str) -> Iterator[Target]:
    if TARGETS[name].native:
        native_module()
    target = TARGETS[name].make()
    try:
        yield target
    finally:
        target.close()


def run_seeds(target: Target) -> None:
    for data in target.seeds(Random(1), SEEDS):
        target.compare(data)


def flip_a_bit(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes(byte ^ 1 for byte in data[middle : middle + 1]) + data[middle + 1 :]


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_first_and_mutated_inputs_reach_every_outcome_without_a_finding(name: str) -> None:
    random = Random(2)
    with target_of(name) as target:
        seeds = target.seeds(random, SEEDS)
        mutated = [target.mutate(data, random, flip_a_bit) for data in seeds]
        assert sum(one != other for one, other in zip(seeds, mutated, strict=True)) > SEEDS / 3
        for data in seeds + mutated:
            target.compare(data)
        assert target.counts.executions == 2 * SEEDS
        assert target.counts.unused == []


Wrong = Callable[[Any], Any]
"""Returns the wrong result instead of a right one."""


class ForgetfulCompletion(Completion):
    """Drops the last of the buffered events."""

    def add(self, buffered: Any) -> None:
        super().add(list(buffered)[:-1])


class WrongConverter(RecordConverter):
    """Converts each record to the same value."""

    def convert(self, change: VerifiedChange) -> RecordChange | None:
        converted = super().convert(change)
        return converted and converted._replace(value='{"wrong":true}')


def without_keys(node: Node) -> Node:
    node.keys.clear()
    return node


class UnwrittenUri(AtUri):
    """Is written as nothing."""

    def __str__(self) -> str:
        return ""


class DeafWindow(DeliveryWindow):
    """Ignores acknowledgements."""

    def acknowledge(self, _: int) -> bool:
        return False


class OtherAddress(Address):
    """Is written as another address."""

    def __str__(self) -> str:
        return "other.test:1"


class OtherText:
    """Decodes each piece of a body to the same text."""

    def feed(self, _: bytes) -> Iterator[bytes]:
        yield b"text"

    def close(self) -> None:
        """Accept any end."""


async def too_late(search: Awaitable[Entry]) -> Entry:
    return replace(await search, cursor=MAX_SEQ + 1)


def absent_if_incomplete(*given: Any) -> bytes | None:
    try:
        return verify_record(*given)
    except UnavailableError:
        return None


def refuse_proof(*_: object) -> NoReturn:
    raise UnavailableError(FetchFailure.BAD_ANSWER)


class LenientJson:
    """Reads JSON that is not an object as one with empty lists."""

    JSONDecodeError = orjson.JSONDecodeError

    @staticmethod
    def loads(data: bytes) -> Any:
        document = orjson.loads(data)
        return document if isinstance(document, dict) else {"dids": [], "collections": []}


STRANGER = PrivateKey.from_seed("k256", b"a key that no account has").public
RESULTS: dict[str, tuple[Any, str, Wrong]] = {
    "messages": (message_target, "plan_batch", lambda plan: replace(plan, settled=plan.settled * 2)),
    "cars": (block_targets, "split_car", lambda found: (found[0], {})),
    "nodes": (block_targets, "decode_node", without_keys),
    "commits": (block_targets, "decode_commit", lambda commit: commit._replace(unsigned=b"")),
    "inversions": (inversion_target, "invert", lambda found: found._replace(verdict=Verdict.OK)),
    "did-documents": (did_resolver, "parse_did_document", lambda found: replace(found, pds="https://user@pds.test")),
    "handles": (dns_records, "is_did", lambda _: False),
    "identifiers": (syntax_targets, "split_path", lambda found: found[::-1]),
    "patterns": (syntax_targets, "covers", lambda _: True),
    "keys": (key_targets, "parse_did_key", lambda _: STRANGER),
    "dag-cbor": (record_targets, "decode_canonical", lambda _: None),
    "cids": (record_targets, "is_link", lambda _: True),
    "links": (record_targets, "links_of", lambda links: links[:-1]),
    "record-proofs": (record_targets, "verify_record", lambda _: b"another record"),
    "repo-lists": (repo_list, "is_did", lambda _: True),
    "repo-states": (pds_client, "parse_cid", lambda _: bytes(36)),
    "pauses": (host_targets, "retry_after_seconds", lambda pause: pause and pause + 3_600),
    "bodies": (host_targets, "make_decoder", lambda _: OtherText()),
    "addresses": (host_targets, "is_public", lambda _: True),
    "did-webs": (did_resolver, "is_handle", lambda _: True),
    "subscriber-queries": (feed_targets, "parse_query", lambda found: replace(found, cursor=(found.cursor or 0) + 1)),
    "subscriber-messages": (feed_targets, "parse_message", lambda found: replace(found, max_bytes=found.max_bytes + 1)),
    "credentials": (hmac, "compare_digest", lambda _: True),
    "tap-requests": (tap_routes, "problem", lambda _: answer({})),
    "stream-seeks": (stream_targets, "seek", too_late),
    "event-times": (stream_targets, "event_seconds", lambda _: inf),
    "settings-files": (
        operator_targets,
        "load_settings",
        lambda settings: settings.model_copy(update={"http_bind": OtherAddress("a.test", 1)}),
    ),
    "log-texts": (operator_targets, "without_secrets", lambda text: text + operator_targets.SECRET),
    "lexicons": (database_targets, "parse_lexicon", lambda lexicon: replace(lexicon, record={"type": "object"})),
}
"""A function of the product that a target uses, and what its result becomes."""
REPLACEMENTS: dict[str, tuple[str, Any, str, Any]] = {
    "AT-URI without text": ("at-uris", syntax_targets, "AtUri", UnwrittenUri),
    "any signature is valid": ("signatures", PublicKey, "verify", lambda *_: True),
    "no acknowledgement has an effect": ("acknowledgements", feed_targets, "DeliveryWindow", DeafWindow),
    "several changes of a repo in flight": (
        "acknowledgements",
        feed_targets,
        "DeliveryWindow",
        lambda progress, **_: DeliveryWindow(progress),
    ),
    "a buffered event is lost": ("buffers", buffer_target, "Completion", ForgetfulCompletion),
    "all records are the same": ("records", database_targets, "RecordConverter", WrongConverter),
    "incomplete proof shows no record": ("record-proofs", record_targets, "verify_record", absent_if_incomplete),
    "complete proof is refused": ("record-proofs", record_targets, "verify_record", refuse_proof),
    "all accounts of a list are active": (
        "repo-lists",
        repo_list,
        "ListedAccount",
        lambda did, rev, _: ListedAccount(did, rev),
    ),
    "all repos are active": (
        "repo-states",
        repo_list,
        "RepoStatus",
        lambda _, status, rev: RepoStatus(True, status, rev),
    ),
    "no client is admitted": ("credentials", hmac, "compare_digest", lambda *_: False),
    "malformed body is an empty list": ("tap-requests", tap_routes, "orjson", LenientJson),
}
"""Wrong code in the place of a class, a function or a module of the product that a target uses."""
COMPARED = {name for name, row in TARGETS.items() if row.native}
"""The targets that compare two cores: tests/fuzz/test_fuzz.py has wrong cores."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks_of(name)) for name in RESULTS])
def test_wrong_function_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, function, distort = RESULTS[name]
    right = getattr(module, function)
    monkeypatch.setattr(module, function, lambda *given, **options: distort(right(*given, **options)))
    with target_of(name) as target, pytest.raises(DifferenceError):
        run_seeds(target)


@pytest.mark.parametrize(
    "bug", [pytest.param(bug, marks=marks_of(name)) for bug, (name, _, _, _) in REPLACEMENTS.items()]
)
def test_wrong_replacement_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, owner, attribute, wrong = REPLACEMENTS[bug]
    monkeypatch.setattr(owner, attribute, wrong)
    with target_of(name) as target, pytest.raises(DifferenceError):
        run_seeds(target)


def test_every_target_has_a_case_of_wrong_code() -> None:
    assert RESULTS.keys() | {name for name, _, _, _ in REPLACEMENTS.values()} | COMPARED == TARGETS.keys()


LIMIT = CostLimit(steps=200_000, steps_per_byte=100, memory=100_000, memory_per_byte=10)


def test_input_with_disproportionate_time_is_found() -> None:
    meter = CostMeter(lambda data: (sum(range(3_000 * len(data))), None)[1], LIMIT)
    meter.run(b"x" * 10)
    with pytest.raises(CostError, match=r"time: .* for an input of 1,000 bytes; the limit is 300,000"):
        meter.run(b"x" * 1_000)


def test_input_with_disproportionate_memory_is_found() -> None:
    meter = CostMeter(lambda data: (bytes(1_000 * len(data)), None)[1], LIMIT)
    meter.check_memory(b"x" * 10)
    with pytest.raises(CostError, match=r"memory: .* for an input of 1,000 bytes; the limit is 110,000"):
        meter.check_memory(b"x" * 1_000)


def test_input_with_disproportionate_memory_of_other_code_than_python_is_found() -> None:
    growth = 2 * PROCESS_MEMORY

    def allocate(data: bytes) -> None:
        """Exceed the peak of the whole process so far by memory that Python does not count."""
        if data:
            size = growth + (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10)
            with mmap.mmap(-1, size) as memory:
                memory[:: mmap.PAGESIZE] = b"x" * len(memory[:: mmap.PAGESIZE])

    meter = CostMeter(allocate, CostLimit(steps=10**9))
    meter.run(b"")
    with pytest.raises(CostError, match=r"process memory: .* for an input of 1 bytes; the limit is 33,554,432"):
        meter.run(b"x")


@pytest.mark.slow
def test_statement_of_an_input_that_takes_too_long_is_found() -> None:
    database = FuzzDatabase(statement_seconds=0.2)
    try:
        database.run(
            database.connection.execute(
                "create function slow() returns trigger language plpgsql as "
                "$$ begin perform pg_sleep(60); return new; end $$;"
                "create trigger slow before insert on indexer.repo for each row execute function slow()"
            )
        )
        write = Batch((RepoWrite(0, synchronized("records"), ()),))
        with pytest.raises(DatabaseError, match="timeout"):
            database.run(database.store.write(write))
    finally:
        database.close()


def test_memory_of_some_inputs_is_measured() -> None:
    runs: list[list[int]] = []
    meter = CostMeter(lambda data: runs.append([len(data)] * 100), CostLimit())
    for _ in range(2 * MEMORY_INTERVAL):
        meter.run(b"")
    assert len(runs) == 2 * MEMORY_INTERVAL + 2
    assert meter.largest["memory"] > 0


def test_mutated_json_is_json_most_of_the_time() -> None:
    random, document = Random(3), json.dumps({"a": [1, {"b": "text"}], "c": None}).encode()
    mutated = [mutate_json(document, random, lambda data: data + b"\xff") for _ in range(200)]
    valid = [data for data in mutated if not data.endswith(b"\xff")]
    assert len(set(valid)) > 100
    assert [json.loads(data) for data in valid]


def test_published_messages_nodes_and_commits_are_among_the_first_inputs() -> None:
    vectors("jetstream-frames")
    for name, published in (
        ("messages", published_frames()),
        ("nodes", published_blocks(NODE_START)),
        ("commits", published_blocks(block_targets.COMMIT_START)),
    ):
        with target_of(name) as target:
            assert set(target.seeds(Random(1), SEEDS)) & set(published), name


def test_published_commits_and_exports_are_signed_by_accounts_of_the_fuzzer() -> None:
    vectors("jetstream-frames")
    owners = accounts()
    commits, exports = list(published_commits(owners)), list(published_exports(owners))
    assert len(commits) > 50
    assert len(exports) > 5
    for number, frame in enumerate(commits):
        owner, event = owners[number % len(owners)], decode_frame(frame, DEFAULT_LIMITS)
        assert isinstance(event, CommitEvent)
        assert verify_commit(event, owner.key.public, DEFAULT_LIMITS).flaw is None
    for number, data in enumerate(exports):
        owner, (roots, blocks) = owners[number % len(owners)], split_car(data, DEFAULT_LIMITS, max_bytes=len(data))
        assert verify_export_commit(roots[0], blocks.get, owner.key.public, owner.did)


def test_signature_with_the_bytes_of_a_link_stays_a_byte_string(monkeypatch: pytest.MonkeyPatch) -> None:
    sig = b"\x01\x71\x12\x20" + bytes(60)
    owner = accounts()[0]
    monkeypatch.setattr(type(owner.key), "sign", lambda _key, _data: sig)
    block = signed(encode_unsigned(owner.did, owner.head.rev, owner.head.data), owner.key)
    assert decode_commit(block, cid_of(block)).sig == sig


def test_published_files_are_among_the_first_inputs_of_other_targets() -> None:
    vectors("jetstream-frames")
    owners = accounts()
    dids = set(published_lines("atproto-interop-tests/syntax/did_syntax_*.txt"))
    with target_of("handles") as target:
        assert {data[1:] for data in target.seeds(Random(1), SEEDS)} & dids
    for name, published in (
        ("inversions", set(published_commits(owners))),
        ("buffers", {buffer_target.join([frame]) for frame in published_commits(owners)}),
        ("exports", set(published_exports(owners))),
    ):
        with target_of(name) as target:
            assert set(target.seeds(Random(1), SEEDS)) & published, name
