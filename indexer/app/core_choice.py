"""The core that the daemon uses, native or in Python, which the settings select: it decodes and verifies."""

from typing import NamedTuple

from indexer import __version__
from indexer.app.process_setup import available_cores
from indexer.app.settings import Settings
from indexer.core.native_core import NativeCore, load_core


class DaemonCore(NamedTuple):
    """The core of a process.

    Attributes:
        native: The native core; None for the Python code.
        name: `native` or `python`.
        version: The version of the package that it is part of.
        threads: The maximum number of threads in which it verifies a batch.
    """

    native: NativeCore | None
    name: str
    version: str
    threads: int


def core_of(settings: Settings) -> DaemonCore:
    """Return the core that the settings select. A native one starts its threads.

    Raises:
        SettingsError: The settings demand the native core, and it cannot be used.
    """
    native = load_core(settings.core, settings.verify_threads or available_cores())
    if native is None:
        return DaemonCore(None, "python", __version__, 1)
    return DaemonCore(native, "native", native.version, native.threads)
