"""The comparison of a snapshot with stored records, compared with a comparison of dictionaries on random repos."""

import json
from random import Random
from typing import Any

import asyncpg
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from indexer.atproto.car import split_car
from indexer.atproto.cid import cid_of
from indexer.atproto.crypto import PrivateKey
from indexer.atproto.limits import DEFAULT_LIMITS
from indexer.atproto.syntax import CollectionFilter
from indexer.cli.audit import BEING_DELETED, RepoComparison, equal_json
from indexer.db.exports import RecordRow
from indexer.demo.local_repo import LocalRepo
from indexer.sync.changes import RecordConverter
from indexer.sync.export import Snapshot, verify_snapshot
from indexer.sync.policy import Policy
from indexer.sync.scope import Scope
from indexer.sync.verify import VerifiedChange

DID = "did:plc:" + "b" * 24
KEY = PrivateKey.from_seed("k256", b"audit")
REV = "3jzfcijpj2z2b"
REMOVED = frozenset(f"com.example-x.a/{rkey}".encode() for rkey in "12:_")
NO_VALUE = (None, None, None)
COLLECTIONS = ("com.example.a", "com.example.a.b", "com.example.ab", "com.example-x.a", "nowhere")
PATHS = st.sampled_from([f"{collection}/{rkey}" for collection in COLLECTIONS for rkey in "12:_~"])
BLOCKS = [
    b"\xa1\x65$type\x6dcom.example.a",
    b"\xa2\x61a\x01\x62bb\xf5",
    b"\xa1\x61a\xfb\x3f\xf8\x00\x00\x00\x00\x00\x00",
    b"\xa1\x61a\x61\x00",
    b"\x01",
    b"\xf6",
    b"\xff",
]
WITHOUT = Scope(collections=CollectionFilter(["*"], ["com.example.a"]), removed={DID: REMOVED})
RECORDS = st.dictionaries(PATHS, st.sampled_from(BLOCKS))
POLICIES = st.builds(
    Policy,
    st.sampled_from(
        [
            Scope(),
            *(Scope(collections=CollectionFilter([pattern])) for pattern in ("com.example.a", "com.example.a.*")),
            WITHOUT,
        ]
    ),
    st.just(DEFAULT_LIMITS),
    st.booleans(),
)
ROW_CHANGES = st.dictionaries(
    PATHS, st.sampled_from(["delete", "add", "cid", "value", "problem", "original", "missing", "no value"])
)


def snapshot_of(records: dict[str, bytes], missing_blocks: set[bytes]) -> Snapshot:
    """Return the verified snapshot of an export that lacks some blocks of records."""
    repo = LocalRepo(DID, KEY, REV)
    repo.import_records(records, KEY, REV)
    _, blocks = split_car(b"".join(repo.export()), DEFAULT_LIMITS, max_bytes=10**7)
    present = {cid: block for cid, block in blocks.items() if block not in missing_blocks}
    return verify_snapshot(repo.did, repo.head.cid, present.get, KEY.public, DEFAULT_LIMITS, 0)


def stored_record(path: str, block: bytes, policy: Policy) -> RecordRow | None:
    """Return the row that a resync writes, with the value formatted differently, as Postgres does."""
    converter = RecordConverter(policy, DID, REV, len(block))
    change = converter.convert(VerifiedChange(path.encode(), None, cid_of(block), block))
    if change is None:
        return None
    value = change.value and json.dumps(json.loads(change.value), indent=1)
    return RecordRow(path.encode(), cid_of(block), value, change.problem, change.original, "export")


def changed_row(path: str, record: RecordRow | None, change: str) -> RecordRow | None:
    """Return the row after a change; None if there is none."""
    if record is None:
        return RecordRow(path.encode(), cid_of(BLOCKS[0]), None, None, None, "export") if change == "add" else None
    columns: dict[str, dict[str, Any]] = {
        "add": {},
        "cid": {"cid": cid_of(b"another")},
        "value": {"value": '{"another": 1}'},
        "problem": {"problem": "another"},
        "original": {"original": b"another"},
        "missing": {"value": None, "problem": "missing", "original": None},
        "no value": {"value": None, "problem": None, "original": None},
    }
    return None if change == "delete" else record._replace(**columns[change])


def expected_differences(
    records: dict[str, bytes], missing_blocks: set[bytes], stored: dict[str, RecordRow], policy: Policy
) -> tuple[dict[str, str], int, int]:
    """Return the difference at each path, the values that cannot be compared, and the records not deleted yet."""
    all_values = Policy(policy.scope, policy.limits)
    expected = {path: row for path, block in records.items() if (row := stored_record(path, block, all_values))}
    differences, not_compared, unselected = {}, 0, 0
    for path in sorted(stored.keys() | expected.keys()):
        row, expected_row = stored.get(path), expected.get(path)
        if row is None:
            differences[path] = "missing in the database"
        elif expected_row is None:
            if policy.scope.selects(DID, path.encode()):
                differences[path] = "not in the repo"
            else:
                unselected += 1
        elif row.cid != expected_row.cid:
            differences[path] = "different CID"
        elif row[2:5] == NO_VALUE and not policy.store_values:
            pass
        elif records[path] in missing_blocks:
            not_compared += row.problem != "missing"
        elif row != expected_row:
            differences[path] = "different value"
    return differences, not_compared, unselected


@given(RECORDS, RECORDS, ROW_CHANGES, st.sets(st.sampled_from(BLOCKS)), POLICIES, st.booleans(), st.integers(1, 5))
@example({}, {}, {"com.example-x.a/1": "add"}, set(), Policy(WITHOUT, DEFAULT_LIMITS), True, 1)
def test_comparison_finds_the_same_differences_as_a_comparison_of_dictionaries(
    records: dict[str, bytes],
    older: dict[str, bytes],
    changes: dict[str, str],
    missing_blocks: set[bytes],
    policy: Policy,
    values_stored: bool,
    chunk_size: int,
) -> None:
    """The rows are those of `records`, except that paths in `older` have an older version or were deleted since."""
    writing = Policy(policy.scope, policy.limits, store_values=values_stored)
    rows = {path: row for path, block in (records | older).items() if (row := stored_record(path, block, writing))}
    stored = {
        path: row
        for path in rows.keys() | changes.keys()
        if (row := changed_row(path, rows.get(path), changes[path]) if path in changes else rows[path])
    }
    in_order = [stored[path] for path in sorted(stored)]
    comparison = RepoComparison(snapshot_of(records, missing_blocks), policy, scope_version=0)
    for start in range(0, len(in_order), chunk_size):
        comparison.compare_chunk(in_order[start : start + chunk_size])
    comparison.finish()
    result = comparison.result
    expected, not_compared, unselected = expected_differences(records, missing_blocks, stored, policy)
    prefix = f"at://{result.did}/"
    found = [(one["subject"].removeprefix(prefix), one["description"].partition(":")[0]) for one in result.listed]
    assert found == [*expected.items()]
    assert result.differences == len(expected)
    assert result.proofs == ({"export": len(stored)} if stored else {})
    assert result.records == len(stored) + list(expected.values()).count("missing in the database")
    counts = {"export-lacks-records": not_compared, BEING_DELETED: unselected}
    most = max(counts.values())
    reasons = {f"{reason}: {count} records" for reason, count in counts.items() if count == most}
    assert result.reason_skipped in (reasons if most else {None})


TEXTS = ("0", "-0.0", "1", "1.0", "1e0", "true", "false", "null", '"1"', '""', "1e300", f"1{'0' * 300}", "[]", "{}")
NUMBERS = ("18446744073709551615", "18446744073709551616", "0.1", "0.10", "0.1000000000000000055511151231257827")


def random_json(random: Random, depth: int = 3) -> str:
    kind = random.randrange(4) if depth else 0
    if kind <= 1:
        return random.choice(TEXTS + NUMBERS)
    items = [random_json(random, depth - 1) for _ in range(random.randrange(3))]
    if kind == 2:
        return f"[{', '.join(items)}]"
    keys = random.sample("abc", len(items))
    return "{" + ",".join(f'"{key}" :{item}' for key, item in zip(keys, items, strict=True)) + "}"


@pytest.mark.slow
async def test_equality_of_json_is_that_of_jsonb(sql: asyncpg.Connection) -> None:
    random = Random(5)
    pairs = [(one, other) for one in TEXTS + NUMBERS for other in TEXTS + NUMBERS]
    pairs += [(random_json(random, 1), random_json(random, 1)) for _ in range(6_000)]
    pairs += [(text, json.dumps(json.loads(text), sort_keys=True)) for text in map(random_json, [random] * 1_000)]
    ones, others = zip(*pairs, strict=True)
    rows = await sql.fetch(
        "select one::jsonb = other::jsonb, one::jsonb::text from unnest($1::text[], $2::text[]) p(one, other)",
        ones,
        others,
    )
    assert 1_000 < sum(equal for equal, _ in rows) < len(rows) - 1_000
    for (one, other), (equal, formatted) in zip(pairs, rows, strict=True):
        assert equal_json(one, other) is equal, (one, other)
        assert equal_json(formatted, one), one
    assert not equal_json(None, "null")
    assert equal_json(None, None)
