"""A release after the present one, whose migrations change the schema."""

import shutil
from pathlib import Path

import pytest

from indexer.db.requirements import migrations_folder

MIGRATION = '''"""A later version."""

from alembic import op

revision = "{revision}"
down_revision = "{previous}"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for statement in {statements!r}:
        op.execute(statement)
'''


def use_later_release(monkeypatch: pytest.MonkeyPatch, directory: Path, *versions: list[str]) -> list[Path]:
    """Let `migrate` have a migration for each of these lists of statements after those that exist; return the files."""
    folder = directory / "migrations"
    shutil.copytree(migrations_folder(), folder, ignore=shutil.ignore_patterns("__pycache__"))
    previous = max(path.name[:4] for path in (folder / "versions").glob("[0-9]*.py"))
    files = []
    for number, statements in enumerate(versions):
        revision = str(9000 + number)
        file = folder / "versions" / f"{revision}_later.py"
        file.write_text(MIGRATION.format(revision=revision, previous=previous, statements=statements))
        files.append(file)
        previous = revision
    monkeypatch.setattr("indexer.db.requirements.migrations_folder", lambda: folder)
    return files
