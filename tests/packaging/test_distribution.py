"""The wheel and the source distribution, and the pinned versions of all dependencies."""

import re
import subprocess
import sys
import tarfile
import tomllib
from importlib.metadata import distribution
from pathlib import Path, PurePosixPath
from shutil import unpack_archive
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from indexer import __version__
from tests.source_code import PROJECT, source_files

NAME = "atproto-indexer"
NATIVE = PROJECT / "native"


def files_in(folder: str) -> set[str]:
    """Return the source files in a folder of the project, relative to it."""
    return {str(path.relative_to(PROJECT / folder)) for path in source_files(folder)}


@pytest.mark.slow
def test_both_distributions_contain_the_package_with_its_migrations(tmp_path: Path) -> None:
    """The wheel is built from the source distribution."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path), str(PROJECT)]
    subprocess.run(command, check=True, capture_output=True)
    [wheel], [source] = tmp_path.glob("*.whl"), tmp_path.glob("*.tar.gz")
    with ZipFile(wheel) as file:
        names = set(file.namelist())
    metadata = f"atproto_indexer-{__version__}.dist-info"
    assert {PurePosixPath(name).parts[0] for name in names} == {"indexer", metadata}
    packaged = {name.removeprefix("indexer/") for name in names if name.startswith("indexer/")}
    assert files_in("migrations") > {"env.py", "script.py.mako", "versions/0101_schema.py"}
    assert "db/schema/02_repos.sql" in files_in("indexer")
    assert packaged == files_in("indexer") | {f"migrations/{name}" for name in files_in("migrations")}
    with tarfile.open(source) as archive:
        names = {str(PurePosixPath(*PurePosixPath(name).parts[1:])) for name in archive.getnames()}
    for folder in ("indexer", "migrations", "docs", "config"):
        assert {f"{folder}/{name}" for name in files_in(folder)} <= names
    assert {"pyproject.toml", "constraints.txt", "README.md", "CHANGELOG.md", "LICENSE"} <= names
    unpack_archive(wheel, tmp_path / "installed", "zip")
    program = "from indexer.db.requirements import migrations_folder; print(migrations_folder())"
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path / "installed", capture_output=True, text=True, check=True
    )
    assert Path(result.stdout.strip()) == tmp_path / "installed" / "indexer" / "migrations"


def installed_requirements(name: str, extras: frozenset[str], found: dict[str, str]) -> None:
    """Add an installed distribution and everything that it requires to `found`: name to version."""
    installed = distribution(name)
    found[canonicalize_name(name)] = installed.version
    for requirement in map(Requirement, installed.requires or ()):
        contexts = [{"extra": extra} for extra in (*extras, "")]
        needed = requirement.marker is None or any(map(requirement.marker.evaluate, contexts))
        if needed and (canonicalize_name(requirement.name) not in found or requirement.extras):
            installed_requirements(requirement.name, frozenset(requirement.extras), found)


@pytest.mark.slow
def test_every_dependency_is_pinned_in_its_installed_version() -> None:
    found: dict[str, str] = {}
    installed_requirements(NAME, frozenset({"dev"}), found)
    del found[canonicalize_name(NAME)]
    lines = (PROJECT / "constraints.txt").read_text().splitlines()
    pins = {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}
    assert found.items() <= pins.items()


def test_crates_are_pinned_with_their_checksums() -> None:
    crates = tomllib.loads((NATIVE / "crates.lock").read_text())["package"]
    [ours] = [crate for crate in crates if crate["name"] == f"{NAME}-native"]
    crates.remove(ours)
    assert all(re.fullmatch(r"[0-9a-f]{64}", crate["checksum"]) and "source" not in crate for crate in crates)
    assert set(tomllib.loads((NATIVE / "Cargo.toml").read_text())["dependencies"]) <= set(ours["dependencies"])


def test_native_core_has_the_version_of_the_program_that_installs_it() -> None:
    extras = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    cargo = tomllib.loads((NATIVE / "Cargo.toml").read_text())
    assert cargo["package"]["version"] == __version__
    assert extras["native"] == [f"{NAME}-native=={__version__}"]
    assert cargo["lints"]["rust"]["unsafe_code"] == "forbid"
