"""Every command with `--json` prints JSON objects, one a line."""

import json
import os
from datetime import datetime
from pathlib import Path

import pytest

from indexer.cli.main import COMMANDS, load_command
from indexer.demo.local_relay import message_frame
from indexer.reasons import Rejection
from indexer.sync.changes import Batch, DeadLetter
from indexer.sync.stream import Cursor
from tests.cli.audit_world import POST, AuditWorld
from tests.cli.command_line import Session
from tests.cli.test_main import leaf_commands
from tests.lexicons.samples import LIKE, LIKE_DOCUMENT

CONSUMER = "select atproto.register_reader('test')"
PAUSED_HOST = """
    insert into indexer.host (host, requests, failures, consecutive_failures, paused_until, pause_reason, last_error)
    values ('pds.example', 3, 3, 3, now() + interval '1 hour', 'host-paused', 'unreachable')
"""


@pytest.mark.slow
async def test_every_command_prints_json(world: AuditWorld, world_session: Session, tmp_path: Path) -> None:
    ada = world.create_account("ada")
    await world.synchronize()
    relay, export = world.network.relay_url, tmp_path / "export.car"
    export.write_bytes(b"".join(ada.repo.export()))
    frame = message_frame("#account", {"seq": 7, "did": ada.did, "time": "now", "active": True})
    rejected = DeadLetter(relay, 7, ada.did, "account", Rejection.FIELD_INVALID, "", frame)
    await world.db.write(Batch(dead_letters=(rejected,), cursors=(Cursor(relay, "0/1", 7, "2026-01-01T00:00:00Z"),)))
    await world.delete_post(ada, "002")
    await world.sql(CONSUMER)
    await world.sql(PAUSED_HOST)
    lexicon = tmp_path / "like.json"
    lexicon.write_text(json.dumps(LIKE_DOCUMENT))
    found = dict(leaf_commands({name: load_command(name) for name in COMMANDS}))
    names = {name for name, command in found.items() for option in command.params if option.name == "as_json"}
    lines: dict[str, list[str]] = {}

    async def run(*arguments: str, code: int | None = 0) -> None:
        result = await world_session.run(*arguments, "--json")
        assert result.returncode == code or code is None, result.stderr
        name = next(name for name in names if [*arguments][: len(name.split())] == name.split())
        lines[name] = result.stdout.splitlines()
        assert all(isinstance(json.loads(line), dict) for line in lines[name])

    await run("cursor", "reset", relay, "--to", "5", "--yes")
    await run("cursor", "show")
    await run("status", code=3)
    await run("add", "did:web:one.example")
    await run("audit", code=5)
    await run("discover")
    await run("discover", "--hosts")
    await run("doctor", code=None)  # the Postgres of the tests has no fsync
    await run("identities", "import")
    await run("import-first-seen", os.devnull)
    await run("inspect", str(export))
    for arguments in (("add", str(lexicon)), ("index", LIKE, "created_at"), ("list",), ("remove", LIKE)):
        await run("lexicon", *arguments)
    await run("migrate")
    await run("record", f"at://{ada.did}/{POST}/001")
    await run("rejected", "list")
    await run("rejected", "show", "1")
    await run("rejected", "replay", "1")
    await run("repo", ada.did)
    await run("resync", ada.did)
    for change in (["set", "--collections", POST], ["show"], ["untrack", ada.did]):
        await run("scope", *change)
    await run("takedown", ada.did)
    await run("redact", ada.did, "--yes")
    assert lines.keys() == names - {"distribute"}, "it needs a cluster"
    several = {"audit", "inspect"}
    assert {name for name, printed in lines.items() if len(printed) > 1} == several
    opened_at = json.loads(lines["cursor show"][0])["open_gaps"][0]["opened_at"]
    assert datetime.fromisoformat(opened_at).tzinfo is not None, "as all other times"
    status = lines["status"][0]
    assert [name for name in ("consumers", "paused_hosts", "gaps", "cursors") if f'"{name}": []' in status] == []
