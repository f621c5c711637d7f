"""The versions of the schema are compared without Alembic. `test_migrate` has the privileges and newer schemas."""

import subprocess
import sys

import pytest
from alembic.config import Config
from alembic.script import ScriptDirectory

from indexer.store.migrate import migrate
from indexer.store.schema_version import migrations_folder, needs_upgrade, schema_state


@pytest.mark.slow
async def test_schema_needs_an_upgrade_until_it_has_the_last_version_of_alembic(empty_database: str) -> None:
    config = Config()
    config.set_main_option("script_location", str(migrations_folder()))
    latest = ScriptDirectory.from_config(config).get_current_head()
    for before, revision in ((None, "0001"), ("0001", "0023"), ("0023", "head")):
        state = await schema_state(empty_database)
        assert (state.database, state.release, state.is_current) == (before, latest, False)
        assert await needs_upgrade(empty_database)
        await migrate(empty_database, revision)
    assert not await needs_upgrade(empty_database)
    assert (await schema_state(empty_database)).database == latest


@pytest.mark.slow
def test_alembic_and_sqlalchemy_are_loaded_only_for_an_upgrade() -> None:
    modules = ("daemon_process", "cli.supervisor", "cli.status_commands", "cli.audit_command", "cli.doctor_checks")
    program = f"""
import sys
from importlib import import_module
for module in {modules}:
    import_module("indexer." + module)
print([name for name in ("alembic", "sqlalchemy") if name in sys.modules])
"""
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert loaded == "[]\n"
