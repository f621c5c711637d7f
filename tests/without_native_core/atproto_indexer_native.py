"""Hide the native core: with this folder in PYTHONPATH, its import fails as if it was not installed."""

raise ModuleNotFoundError("hidden by PYTHONPATH", name=__name__)
