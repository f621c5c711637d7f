"""Change names of a module of the product, in this process only."""

from types import ModuleType


def change_names(module: ModuleType, **values: object) -> None:
    """Let names of the module have other values; fail for a name that the module does not have."""
    missing = values.keys() - vars(module).keys()
    assert not missing, f"{module.__name__} has no {', '.join(sorted(missing))}"
    vars(module).update(values)
