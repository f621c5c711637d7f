"""Decoding, verification and exports. Only this package knows whether the native core is used."""

from indexer.core.core import PYTHON_CORE, Core, CoreChoice, load_core

__all__ = ["PYTHON_CORE", "Core", "CoreChoice", "load_core"]
