"""The wheel and the source distribution: their files and metadata, and the pinned versions of all dependencies."""

import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from email.parser import HeaderParser
from importlib.metadata import distribution
from pathlib import Path, PurePosixPath
from shutil import unpack_archive
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from indexer import __version__
from indexer.store.schema_version import migrations_folder
from tests.source_code import PROJECT, source_files

NAME = "atproto-indexer"
SUPPORTED_PYTHON = {"3.11", "3.12", "3.13"}
ALL_PYTHON = [f"3.{minor}" for minor in range(30)]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with both distributions. The wheel is built from the source distribution."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(PROJECT)]
    subprocess.run(command, check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Iterator[ZipFile]:
    (path,) = built.glob("*.whl")
    with ZipFile(path) as file:
        yield file


def files_in(folder: str) -> set[str]:
    """Return the source files in a folder of the project, relative to it."""
    return {str(path.relative_to(PROJECT / folder)) for path in source_files(folder)}


@pytest.mark.slow
def test_wheel_installs_nothing_beside_the_package_and_its_metadata(wheel: ZipFile) -> None:
    top_level = {PurePosixPath(name).parts[0] for name in wheel.namelist()}
    assert top_level == {"indexer", f"atproto_indexer-{__version__}.dist-info"}


@pytest.mark.slow
def test_wheel_contains_the_package_and_has_the_migrations_in_it(wheel: ZipFile) -> None:
    packaged = {name.removeprefix("indexer/") for name in wheel.namelist() if name.startswith("indexer/")}
    assert files_in("migrations") > {"env.py", "script.py.mako", "versions/0001_tables_and_public_schema.py"}
    assert packaged == files_in("indexer") | {f"migrations/{name}" for name in files_in("migrations")}


@pytest.mark.slow
def test_source_distribution_contains_the_package_and_the_migrations(built: Path) -> None:
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {str(PurePosixPath(*PurePosixPath(name).parts[1:])) for name in archive.getnames()}
    for folder in ("indexer", "migrations", "docs", "config"):
        assert {f"{folder}/{name}" for name in files_in(folder)} <= names
    assert {"pyproject.toml", "constraints.txt", "README.md", "CHANGELOG.md", "LICENSE"} <= names


@pytest.mark.slow
def test_metadata_names_the_distribution_the_command_and_the_supported_versions(wheel: ZipFile) -> None:
    folder = f"atproto_indexer-{__version__}.dist-info"
    metadata = HeaderParser().parsestr(wheel.read(f"{folder}/METADATA").decode())
    assert (metadata["Name"], metadata["Version"]) == (NAME, __version__)
    assert metadata["Author"] == "The indexer authors"
    assert "atproto" in metadata["Keywords"].split(",")
    assert metadata.get_all("Project-URL")
    classified = re.findall(r":: (3\.\d+)$", "\n".join(metadata.get_all("Classifier", [])), re.MULTILINE)
    allowed = SpecifierSet(metadata["Requires-Python"])
    assert set(classified) == {version for version in ALL_PYTHON if allowed.contains(version)} == SUPPORTED_PYTHON
    assert "indexer = indexer.cli.main:main" in wheel.read(f"{folder}/entry_points.txt").decode()


@pytest.mark.slow
def test_migrations_of_an_installed_wheel_are_in_the_package(built: Path, tmp_path: Path) -> None:
    (path,) = built.glob("*.whl")
    unpack_archive(path, tmp_path, "zip")
    program = "from indexer.store.schema_version import migrations_folder; print(migrations_folder())"
    result = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert Path(result.stdout.strip()) == tmp_path / "indexer" / "migrations"


def test_migrations_of_the_repository_are_beside_the_package() -> None:
    assert migrations_folder() == PROJECT / "migrations"


def installed_requirements(name: str, extras: frozenset[str], found: dict[str, str]) -> None:
    """Add an installed distribution and everything that it requires to `found`: name to version."""
    installed = distribution(name)
    found[canonicalize_name(name)] = installed.version
    for requirement in map(Requirement, installed.requires or ()):
        contexts = [{"extra": extra} for extra in (*extras, "")]
        needed = requirement.marker is None or any(map(requirement.marker.evaluate, contexts))
        if needed and (canonicalize_name(requirement.name) not in found or requirement.extras):
            installed_requirements(requirement.name, frozenset(requirement.extras), found)


def test_every_dependency_is_pinned_in_its_installed_version() -> None:
    found: dict[str, str] = {}
    installed_requirements(NAME, frozenset({"dev"}), found)
    del found[canonicalize_name(NAME)]
    lines = (PROJECT / "constraints.txt").read_text().splitlines()
    pins = {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}
    assert found.items() <= pins.items()
