"""The packages from npm that examples and tests need are pinned, and no file names a registry."""

import json
import re
from pathlib import Path

import pytest

from tests.source_code import PROJECT, source_files

LOCKS = [path for path in source_files("examples", "tests") if path.name == "package-lock.json"]


def test_lock_files_are_found() -> None:
    assert len(LOCKS) >= 5


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: str(path.relative_to(PROJECT).parent))
def test_npm_packages_are_pinned_without_the_address_of_a_registry(lock: Path) -> None:
    packages = json.loads(lock.read_text())["packages"]
    root = packages.pop("")
    assert all("integrity" in package and "resolved" not in package for package in packages.values())
    manifest = json.loads(lock.with_name("package.json").read_text())
    for kind in ("dependencies", "devDependencies"):
        assert manifest.get(kind) == root.get(kind)
        assert all(re.fullmatch(r"\d+\.\d+\.\d+", version) for version in manifest.get(kind, {}).values())
