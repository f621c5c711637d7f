"""Limits on everything that comes from outside. docs/protocol.md#limits describes them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Maximum sizes and counts. The defaults come from the protocol or from reference implementations.

    Items are containers, keys, values and tags at all levels.
    """

    frame_bytes: int = 5_000_000
    frame_items: int = 16_384  # a #commit with 200 operations has about 2,600
    commit_blocks_bytes: int = 2_000_000  # the CAR slice of a #commit
    commit_ops: int = 200
    sync_blocks_bytes: int = 10_000  # the CAR slice of a #sync
    record_bytes: int = 1_048_576  # of DAG-CBOR
    record_json_bytes: int = 2_097_152  # a byte of DAG-CBOR becomes up to 14 bytes of JSON
    record_items: int = 65_536
    car_header_bytes: int = 4_096  # without the length before it; a header with one root has 58
    block_bytes: int = 2_097_152  # of an export
    node_entries: int = 1_000  # more than 200 are only possible with keys that are chosen for their hash
    tree_depth: int = 128  # the SHA-256 of a key allows no more layers
    repo_bytes: int = 2_147_483_648  # of an export after decompression
    repo_blocks: int = 20_000_000  # of an export
    clock_drift_seconds: int = 300  # how far a rev, or the time of an #account message, may be in the future
    resync_buffer_events: int = 2_048  # for one repo during its resync
    resync_buffer_bytes: int = 16_777_216  # frames, for one repo during its resync


DEFAULT_LIMITS = Limits()


def max_items(text: bytes) -> int:
    """Return an upper bound of the number of items in JSON text, without decoding it.

    Decoding 4 MiB of empty lists would block the event loop for 0.7 seconds, from a worker thread, too.
    """
    return sum(map(text.count, (b",", b"[", b"{")))
