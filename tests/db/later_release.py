"""A release after the present one, whose migrations change the schema."""

import shutil
from pathlib import Path

import pytest

from indexer.db.requirements import MIGRATIONS


def use_later_release(monkeypatch: pytest.MonkeyPatch, directory: Path, *versions: list[str]) -> list[Path]:
    """Let `migrate` have a migration for each of these lists of statements after those that exist; return the files."""
    folder = directory / "migrations"
    shutil.copytree(MIGRATIONS, folder)
    files = [folder / f"{9000 + number}_later.sql" for number in range(len(versions))]
    for file, statements in zip(files, versions, strict=True):
        file.write_text(";\n".join(statements))
    monkeypatch.setattr("indexer.db.requirements.MIGRATIONS", folder)
    return files
