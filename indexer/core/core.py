"""The core that decodes frames, verifies commits and reads exports: the Python code, or the native core beside it.

The native core never gives another result. It handles what is ordinary, and leaves everything else to the Python code.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

from indexer import __version__
from indexer.atproto.crypto import PublicKey
from indexer.atproto.limits import Limits
from indexer.core.native_core import CommitsBeingVerified, NativeCore, load_native
from indexer.core.native_export import NativeReader
from indexer.core.spool import Spool
from indexer.sync.events import CommitEvent, Event, decode_frame
from indexer.sync.export import ColumnLayout, ExportReader
from indexer.sync.policy import Policy
from indexer.sync.shard import Shard

CoreChoice = Literal["auto", "python", "native"]


class Core(NamedTuple):
    """The core of a process.

    Attributes:
        name: `native` or `python`.
        version: The version of the package that it is part of.
        threads: The maximum number of threads in which it verifies commits at once.
        decoder: Returns the function that decodes the frames of a stream for a shard, as `decode_frame` does.
        open_export: Returns a reader of an export that may write a file in a directory. Rows that it makes have the
            columns of the layout. Raises `UnavailableError` (SPOOL_FULL).
        verify: Begins to verify commits ahead; None: they are verified when they are planned.
    """

    name: str
    version: str
    threads: int
    decoder: Callable[[Limits, Shard], Callable[[bytes], Event]]
    open_export: Callable[[Path, Limits, ColumnLayout], ExportReader]
    verify: Callable[[Sequence[tuple[CommitEvent, PublicKey]], Policy], CommitsBeingVerified] | None = None


def load_core(choice: CoreChoice, threads: int) -> Core:
    """Return the core that the settings choose. A native one starts its threads.

    Args:
        choice: "python": never the native core. "auto": the native core, if it is installed and fits this release.
            "native": always.
        threads: The number of threads that verify commits at once.

    Raises:
        SettingsError: The choice is "native", and the native core is not installed or does not fit this release.
    """
    native = None if choice == "python" else load_native(threads, required=choice == "native")
    return PYTHON_CORE if native is None else with_native(native)


def with_native(native: NativeCore) -> Core:
    """Return the core that uses this native core."""
    return Core(
        "native",
        native.version,
        native.threads,
        partial(_native_decoder, native),
        partial(NativeReader, native.new_export),
        native.begin_verification,
    )


def _python_decoder(limits: Limits, shard: Shard) -> Callable[[bytes], Event]:
    owns = None if shard.count == 1 else shard.owns
    return lambda frame: decode_frame(frame, limits, owns)


def _native_decoder(native: NativeCore, limits: Limits, shard: Shard) -> Callable[[bytes], Event]:
    decode_commit, decode_other = native.commit_decoder(limits, shard), _python_decoder(limits, shard)

    def decode(frame: bytes) -> Event:
        event = decode_commit(frame)
        return decode_other(frame) if event is None else event

    return decode


PYTHON_CORE = Core(
    "python", __version__, 1, _python_decoder, lambda directory, limits, _layout: Spool(directory, limits)
)
