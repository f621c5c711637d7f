"""Bounds on everything that comes from outside, with their precedents. All of them are settings."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes in bytes, counts, and seconds. The defaults are the protocol's or the reference implementations'."""

    frame_bytes: int = 5_000_000  # the relay's own limit
    commit_blocks_bytes: int = 2_000_000  # lexicon: #commit.blocks
    commit_ops: int = 200  # lexicon: #commit.ops
    sync_blocks_bytes: int = 10_000  # lexicon: #sync.blocks
    record_bytes: int = 1_048_576  # data model guide: 1 MiB
    car_header_bytes: int = 4_096  # a header with one root has 59
    block_bytes: int = 2_097_152  # no record, node or commit comes near it
    node_entries: int = 1_000  # more than 200 would need mined keys
    tree_depth: int = 128  # SHA-256 has no more leading zero pairs
    repo_bytes: int = 2_147_483_648  # an export, decompressed
    repo_blocks: int = 20_000_000  # blocks of an export
    clock_drift_seconds: int = 300  # how far a rev may lie in the future
    kept_events: int = 2_048  # events kept for one repo during its resync
    kept_bytes: int = 16_777_216  # and their frames' bytes


DEFAULT_LIMITS = Limits()
