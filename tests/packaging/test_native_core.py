"""The distribution of the native core: its version, its pinned crates, and how it is found by the main package."""

import re
import tomllib
from pathlib import Path
from typing import Any

from indexer import __version__
from tests.source_code import PROJECT, source_files

NATIVE = PROJECT / "native"
NAME = "atproto-indexer-native"
IGNORED = ("target", "dist")


def toml(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text())


def our_files() -> list[Path]:
    """Return the files of the native core that are not made by a build."""
    relative = [path.relative_to(NATIVE) for path in source_files("native")]
    return [NATIVE / path for path in relative if path.parts[0] not in IGNORED and path.name != "Cargo.lock"]


def test_native_core_has_the_version_of_the_program_that_installs_it() -> None:
    extras = toml(PROJECT / "pyproject.toml")["project"]["optional-dependencies"]
    assert toml(NATIVE / "Cargo.toml")["package"]["version"] == __version__
    assert extras["native"] == [f"{NAME}=={__version__}"]
    assert toml(NATIVE / "pyproject.toml")["project"]["name"] == NAME


def test_every_crate_is_pinned_with_its_checksum_and_without_the_address_of_a_registry() -> None:
    packages = toml(NATIVE / "crates.lock")["package"]
    ours = [package for package in packages if package["name"] == NAME]
    assert len(packages) > len(toml(NATIVE / "Cargo.toml")["dependencies"])
    assert all(re.fullmatch(r"[0-9a-f]{64}", package["checksum"]) for package in packages if package not in ours)
    assert all("source" not in package for package in packages)
    assert [name for name in toml(NATIVE / "Cargo.toml")["dependencies"] if name not in ours[0]["dependencies"]] == []


def test_no_file_of_the_native_core_names_a_registry() -> None:
    assert {path.name for path in our_files()} >= {"Cargo.toml", "crates.lock", "lock", "build", "lib.rs"}
    named = [str(path) for path in our_files() if re.search(r"crates\.io|registry\+|sparse\+", path.read_text())]
    assert named == []


def test_unsafe_code_is_forbidden_in_the_native_core() -> None:
    assert toml(NATIVE / "Cargo.toml")["lints"]["rust"]["unsafe_code"] == "forbid"
    assert toml(NATIVE / "Cargo.toml")["profile"]["release"]["panic"] == "unwind"


def test_builds_use_the_pinned_crates() -> None:
    for script in (NATIVE / "build", NATIVE / "check"):
        text = script.read_text()
        assert text.index("./lock") < text.index("--locked")
        assert all(
            "--locked" in line for line in text.splitlines() if re.search(r"cargo (test|clippy)|maturin\" ", line)
        )
