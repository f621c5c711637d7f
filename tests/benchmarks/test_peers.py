"""The parts of `benchmarks.peers` that need no tap: comparison, tables and the consumer."""

import io
import socket
from pathlib import Path
from threading import Thread

import orjson
import pytest
from click.testing import CliRunner

from benchmarks import peers, tap
from benchmarks.peer_results import (
    MAX_DIFFERENCES,
    ONE_PROCESS,
    TAP,
    TAP_SQLITE,
    TWO_SHARDS,
    Measured,
    RepoResult,
    columns_of,
    find_differences,
    markdown_of,
    section_of,
)
from benchmarks.tap_consumer import Consumer, event_id, frames
from benchmarks.workload import digest_of, framed
from indexer.atproto.cid import cid_of, cid_text

TEXT = 0x81
RESULT = RepoResult("3a", "da7a", 2, "digest")


@pytest.mark.parametrize(
    "found", [RESULT._replace(rev="3b"), RESULT._replace(data="other"), RESULT._replace(records=1, digest="x")]
)
def test_different_repo_is_reported(found: RepoResult) -> None:
    assert find_differences({"did:a": RESULT}, {"did:a": found}, "here") == [
        f"here: did:a has {found} instead of {RESULT}"
    ]


def test_equal_repo_is_no_difference_even_if_its_tree_is_unknown() -> None:
    assert find_differences({"did:a": RESULT}, {"did:a": RESULT}, "here") == []
    assert find_differences({"did:a": RESULT}, {"did:a": RESULT._replace(data="")}, "here") == []


def test_missing_and_unknown_repos_are_reported() -> None:
    assert find_differences({"did:a": RESULT}, {"did:b": RESULT}, "here") == [
        "here: did:b does not exist in the workload",
        "here: did:a is missing",
    ]


def test_only_the_first_differences_are_reported_in_full() -> None:
    truth = {f"did:{number:02}": RESULT for number in range(MAX_DIFFERENCES + 3)}
    found = find_differences(truth, {}, "here")
    assert found[0] == "here: did:00 is missing"
    assert found[MAX_DIFFERENCES:] == ["here: and 3 more"]


def measured(seconds: float, program: float, postgres: float | None) -> Measured:
    cpu = {"program": program} if postgres is None else {"program": program, "Postgres": postgres}
    return Measured(count=1_000, seconds=seconds, delivered=None, cpu=cpu, peak=100 << 20)


def test_section_has_medians_of_all_rounds_and_their_ratios() -> None:
    section = section_of(
        "commit",
        {
            TAP: [measured(1.0, 0.6, 0.4), measured(2.0, 0.6, 0.4), measured(9.0, 0.6, 0.4)],
            TAP_SQLITE: [measured(4.0, 0.9, None)],
            ONE_PROCESS: [measured(0.5, 0.3, 0.2)],
            TWO_SHARDS: [measured(0.25, 0.3, 0.2)],
        },
    )
    assert section["commits/s"] == {
        TAP: 500,
        TAP_SQLITE: 250,
        ONE_PROCESS: 2_000,
        TWO_SHARDS: 4_000,
        "indexer / tap": 4,
        "2 shards / tap": 8,
        "indexer / tap-sqlite": 8,
    }
    together = section["CPU with Postgres, µs per commit"]
    assert (together[TAP], together[TAP_SQLITE], together[ONE_PROCESS]) == pytest.approx((1_000, 900, 500))
    assert together["indexer / tap"] == pytest.approx(0.5)
    assert TAP_SQLITE not in section["Postgres CPU, µs per commit"]


def test_markdown_has_a_row_per_figure_and_a_dash_for_absent_values() -> None:
    sections = {"live": section_of("commit", {TAP: [measured(2.0, 0.6, 0.4)], TAP_SQLITE: [measured(4.0, 0.9, None)]})}
    assert columns_of(sections) == [TAP, TAP_SQLITE]
    lines = markdown_of(sections, {"cpu": "fast", "cores": 2}).splitlines()
    assert lines[:4] == ["cpu: fast; cores: 2", "", "| **live** | tap | tap-sqlite |", "|---|---|---|"]
    assert "| commits/s | 500 | 250 |" in lines
    assert "| Postgres CPU, µs per commit | 400 | - |" in lines
    assert len(lines) == 4 + len(sections["live"])


def record_event(number: int, action: str, path: str, rev: str) -> bytes:
    collection, _, rkey = path.partition("/")
    record = {"did": "did:a", "collection": collection, "rkey": rkey, "action": action, "rev": rev}
    cid = {} if action == "delete" else {"cid": cid_text(cid_of(f"{number}".encode()))}
    return orjson.dumps({"id": number, "type": "record", "record": record | cid})


def test_events_are_applied_in_order() -> None:
    identity = orjson.dumps({"id": 9, "type": "identity", "identity": {"did": "did:b"}})
    results = tap.results_of_events(
        [
            record_event(1, "create", "a.b.c/one", "3a"),
            record_event(2, "create", "a.b.c/two", "3a"),
            identity,
            record_event(3, "update", "a.b.c/two", "3b"),
            record_event(4, "delete", "a.b.c/one", "3c"),
        ]
    )
    assert results == {"did:a": RepoResult("3c", "", 1, digest_of({"a.b.c/two": cid_of(b"3")}))}


@pytest.mark.parametrize("size", [0, 125, 126, 65_535, 65_536])
def test_frames_are_found_in_a_stream(size: int) -> None:
    stream = framed(b"x" * size) + framed(b"second")
    assert [stream[start:end] for _, start, end in frames(stream)] == [b"x" * size, b"second"]
    assert [stream[start:end] for _, start, end in frames(stream[:-1])] == [b"x" * size]
    assert list(frames(stream[:1])) == []


def test_event_without_an_id_is_refused() -> None:
    assert event_id(b'{"id":17,"type":"record"}') == 17
    with pytest.raises(ValueError, match="no id at the start"):
        event_id(b'{"type":"record","id":17}')


def text_frame(payload: bytes) -> bytes:
    frame = framed(payload)
    return bytes([TEXT]) + frame[1:]


def test_consumer_acknowledges_every_event_and_writes_it_to_the_file() -> None:
    ours, theirs = socket.socketpair()
    file = io.BytesIO()
    events = [record_event(number, "create", f"a.b.c/{number}", "3a") for number in (1, 2)]
    identity = orjson.dumps({"id": 3, "type": "identity", "identity": {"did": "did:a"}})
    stream = b"".join(map(text_frame, [*events, identity]))
    with ours, theirs:
        consumer = Consumer(ours, file)
        receiving = Thread(target=consumer.receive)
        receiving.start()
        theirs.sendall(stream[:100])
        theirs.sendall(stream[100:])
        assert consumer.wait_for(2) > 0
        theirs.shutdown(socket.SHUT_WR)
        receiving.join()
        acknowledged = frames_of_client(theirs.recv(1_000))
    assert acknowledged == [{"type": "ack", "id": number} for number in (1, 2, 3)]
    assert file.getvalue().splitlines() == [*events, identity]
    assert consumer.ids == {1, 2}
    with pytest.raises(ConnectionError, match="after 2 of 3"):
        consumer.wait_for(3)


def frames_of_client(data: bytes) -> list[object]:
    """Return the payloads of complete masked frames of less than 126 bytes."""
    payloads, start = [], 0
    while len(data) >= start + 6 and len(data) >= (end := start + 6 + (data[start + 1] & 0x7F)):
        mask, masked = data[start + 2 : start + 6], data[start + 6 : end]
        payloads.append(orjson.loads(bytes(byte ^ mask[index % 4] for index, byte in enumerate(masked))))
        start = end
    return payloads


def test_benchmark_is_skipped_with_a_notice_without_tap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tap, "SHARED", tmp_path / "absent")
    result = CliRunner().invoke(peers.main, ["--quick"])
    assert result.exit_code == 0
    assert "Skipped: there is no tap" in result.output
