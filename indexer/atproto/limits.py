"""Limits on everything that comes from outside. docs/protocol.md#limits describes them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Maximum sizes and counts. The defaults come from the protocol or from reference implementations.

    Attributes:
        frame_bytes: One frame of the stream, in bytes.
        frame_items: Items of one frame: containers, keys, values and tags at all levels. A #commit with 200 operations
            has about 2,600.
        commit_blocks_bytes: The CAR slice of a #commit, in bytes.
        commit_ops: Operations of a #commit.
        sync_blocks_bytes: The CAR slice of a #sync, in bytes.
        record_bytes: One record, in bytes of DAG-CBOR.
        record_json_bytes: The JSON of one record, in bytes. A byte of DAG-CBOR becomes up to 14 bytes of JSON.
        record_items: Items of one record: containers, keys, values and tags at all levels.
        car_header_bytes: The header of a CAR file without its length, in bytes. A header with one root has 58.
        block_bytes: One block of an export, in bytes.
        node_entries: Entries of a tree node. More than 200 are only possible with keys that are chosen for their hash.
        tree_depth: Layers of a tree. The SHA-256 of a key allows no more than 128.
        repo_bytes: An export after decompression, in bytes.
        repo_blocks: Blocks of an export.
        clock_drift_seconds: How far a rev, or the time of an #account message, may be in the future, in seconds.
        resync_buffer_events: Events that are buffered for one repo during its resync.
        resync_buffer_bytes: Frames that are buffered for one repo during its resync, in bytes.
    """

    frame_bytes: int = 5_000_000
    frame_items: int = 16_384
    commit_blocks_bytes: int = 2_000_000
    commit_ops: int = 200
    sync_blocks_bytes: int = 10_000
    record_bytes: int = 1_048_576
    record_json_bytes: int = 2_097_152
    record_items: int = 65_536
    car_header_bytes: int = 4_096
    block_bytes: int = 2_097_152
    node_entries: int = 1_000
    tree_depth: int = 128
    repo_bytes: int = 2_147_483_648
    repo_blocks: int = 20_000_000
    clock_drift_seconds: int = 300
    resync_buffer_events: int = 2_048
    resync_buffer_bytes: int = 16_777_216


DEFAULT_LIMITS = Limits()


def max_items(text: bytes) -> int:
    """Return an upper bound of the number of items in JSON text, without decoding it.

    Decoding 4 MiB of empty lists would block the event loop for 0.7 seconds, from a worker thread, too.
    """
    return sum(map(text.count, (b",", b"[", b"{")))
