import asyncio
import json
import signal
import subprocess
import sys
from functools import partial

import pytest

from indexer.cli.audit import MAX_LISTED_DIFFERENCES
from indexer.demo.local_pds import GET_REPO
from tests.cli.audit_world import POST, UNKNOWN_DID, AuditWorld
from tests.cli.command_line import PROJECT, Session, environment_without_settings, error_line
from tests.faulty_network import Fault, FaultyAccount
from tests.waiting import until

pytestmark = pytest.mark.slow


async def test_audit_prints_differences_and_writes_nothing(
    world: AuditWorld, ada: FaultyAccount, world_session: Session
) -> None:
    bob, cyd = world.create_account("bob"), world.create_account("cyd")
    await world.synchronize()
    message = b'{"error": "RepoNotFound", "message": "\\u001b[2J"}'
    cyd.pds.faults.append(Fault(GET_REPO, cyd.did, status=400, body=message))
    await world.sql("update indexer.record set rkey = E'\\x1b[2J' where rkey = '001' and did = $1", ada.did)
    await world.delete_post(ada, "002")
    await world.sql("update indexer.repo set active = false, hosting_status = 'deactivated' where did = $1", bob.did)
    name = (await world.sql("select current_database()"))[0][0]
    await world.sql(f"alter database {name} set default_transaction_read_only = on")
    before = await world.all_rows()
    result = await world_session.run("audit", ada.did, bob.did, cyd.did, UNKNOWN_DID, ada.did)
    assert await world.all_rows() == before
    uri = f"at://{ada.did}/{POST}"
    *lines, repos, records, proofs, skipped = result.stdout.splitlines()
    assert sorted(lines) == sorted(
        [
            repr(f"{uri}/\x1b[2J") + " not in the repo",
            f"{uri}/001 missing in the database",
            f"{uri}/002 missing in the database",
            f"{bob.did} not compared: inactive: deactivated",
            f"{cyd.did} not compared: " + repr("repo-not-found: 400 RepoNotFound \x1b[2J"),
            f"{UNKNOWN_DID} not compared: not in the database",
        ]
    )
    assert repos == "repos: 1 compared, 0 equal"
    assert records == f"records: {len(ada.records)} compared, differences: 3"
    assert proofs == f"proofs: {len(ada.records) - 2} export"
    assert skipped == "not compared: 3 (1 inactive, 1 not in the database, 1 repo-not-found)"
    assert (result.returncode, result.stderr) == (5, "")
    assert not list((world.directory / "spool").iterdir())


async def test_random_sample_is_audited_by_default(world: AuditWorld, world_session: Session) -> None:
    for arguments in ((), ("--json",)):
        result = await world_session.run("audit", *arguments)
        assert result.returncode == 1
        assert error_line(result) == "no repo is synchronized, so there is nothing to compare"
    for name in ("ada", "bob"):
        world.create_account(name)
    await world.synchronize()
    result = await world_session.run("audit")
    assert result.stdout == "repos: 2 compared, 2 equal\nrecords: 10 compared, differences: 0\nproofs: 10 export\n"
    assert (result.returncode, result.stderr) == (0, "")
    await world.sql("update indexer.record set proof = 'c' where rkey = '001'")
    await world.sql("update indexer.record set proof = null where rkey = '002'")
    result = await world_session.run("audit")
    assert result.stdout.endswith("proofs: 2 commit, 6 export, 2 unknown\n")
    result = await world_session.run("audit", "--sample", "1")
    assert result.stdout.startswith("repos: 1 compared, 1 equal\n")


async def test_exit_code_is_that_of_the_worst_result(world: AuditWorld, world_session: Session) -> None:
    ada, bob, cyd = (world.create_account(name) for name in ("ada", "bob", "cyd"))
    await world.synchronize()
    assert (await world_session.run("audit", ada.did, bob.did)).returncode == 0
    assert (await world_session.run("audit", ada.did, UNKNOWN_DID)).returncode == 4
    bob.deactivate()
    result = await world_session.run("audit", ada.did, bob.did, UNKNOWN_DID)
    assert f"{bob.did} not compared: repo-deactivated: 400 RepoDeactivated" in result.stdout
    assert result.returncode == 1
    result = await world_session.run("audit", "--json", ada.did, bob.did)
    summary = json.loads(result.stdout.splitlines()[-1])["summary"]
    assert (summary["equal"], summary["reasons_skipped"]) == (1, {"repo-deactivated": 1})
    assert result.returncode == 1
    await world.delete_post(cyd, "002")
    assert (await world_session.run("audit", ada.did, bob.did, cyd.did, UNKNOWN_DID)).returncode == 5


async def test_only_the_first_of_many_differences_are_listed(world: AuditWorld, world_session: Session) -> None:
    ada = world.create_account("ada", posts=250)
    await world.synchronize()
    await world.sql("delete from indexer.record")
    result = await world_session.run("audit", ada.did)
    *lines, more, _, records = result.stdout.splitlines()
    assert lines == [
        f"at://{ada.did}/{POST}/{number:03} missing in the database" for number in range(MAX_LISTED_DIFFERENCES)
    ]
    assert more == f"{ada.did} differences that are not listed: 150"
    assert records == "records: 250 compared, differences: 250"


async def test_interrupted_audit_exits_without_output(world: AuditWorld) -> None:
    ada = world.create_account("ada", posts=200)
    await world.synchronize()
    ada.pds.faults.append(Fault(GET_REPO, rate=2_000))
    before = ada.pds.requests[GET_REPO]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "indexer", "audit", ada.did),
        cwd=PROJECT,
        env=environment_without_settings() | world.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    await until(lambda: ada.pds.requests[GET_REPO] > before)
    process.send_signal(signal.SIGINT)
    output, errors = await asyncio.wait_for(process.communicate(), 30)
    assert (process.returncode, output, errors.strip()) == (130, b"", b"")
    assert not list((world.directory / "spool").iterdir())
