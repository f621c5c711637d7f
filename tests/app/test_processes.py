"""Several daemon processes that share a shard: `indexer run --processes N`."""

import asyncio
import os
import signal
from functools import partial
from pathlib import Path

import pytest

from indexer.app.processes import process_environment, run_several
from indexer.app.settings import Settings, load_settings
from indexer.atproto.syntax import CollectionFilter
from indexer.demo.scenario import Scenario
from indexer.errors import SettingsError
from indexer.sync.shard import Shard
from tests.daemon_process import daemon_environment, indexer_run
from tests.database_checks import assert_change_log_consistent, wait_until_equal
from tests.faulty_network import FaultyNetwork
from tests.waiting import until


def test_processes_share_buckets_ports_threads_and_rates() -> None:
    settings = Settings(
        shard="1/2", http_bind="127.0.0.1:2580", plc_rate="10", host_rate="9", host_concurrency="10", verify_threads="8"
    )
    own = [process_environment(settings, index, 3) for index in range(3)]
    assert [one["INDEXER_SHARD"] for one in own] == ["3/6", "4/6", "5/6"]
    assert [one["INDEXER_HTTP_BIND"] for one in own] == ["127.0.0.1:2580", "127.0.0.1:2581", "127.0.0.1:2582"]
    assert {one["INDEXER_HOST_RATE"] for one in own} == {"3.0"}
    assert {one["INDEXER_HOST_CONCURRENCY"] for one in own} == {"4"}
    assert {one["INDEXER_VERIFY_THREADS"] for one in own} == {"3"}
    assert [float(own[0][f"INDEXER_{name}_RATE"]) * 3 for name in ("PLC", "OUTBOUND", "HANDLE")] == [10, 100, 10]
    buckets = [bucket for one in own for bucket in Shard.parse(one["INDEXER_SHARD"]).buckets]
    assert buckets == list(Shard(1, 2).buckets)


def test_processes_get_the_scope_and_the_upstream_that_their_parent_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = Settings().for_record_types(["com.example.note", "app.bsky.feed.like"], None)
    for settings in (chosen, Settings(), Settings(track="listed")):
        for name, value in process_environment(settings, 0, 2).items():
            monkeypatch.setenv(name, value)
        own = load_settings()
        assert own.first_scope.same_choice(settings.first_scope)
        assert (own.chooses_scope, own.upstream) == (settings.chooses_scope, settings.upstream)


def test_processes_are_told_that_everything_is_wanted() -> None:
    settings = Settings(collections=CollectionFilter())
    assert settings.chooses_scope
    assert process_environment(settings, 0, 2)["INDEXER_TRACK"] == "all"
    assert not process_environment(Settings(), 0, 2)["INDEXER_TRACK"]


async def test_more_processes_than_buckets_are_a_settings_error() -> None:
    with pytest.raises(SettingsError, match="--processes: 32 processes for shard 0/16 need 512 shards"):
        await run_several(Settings(shard="0/16"), 32, None)


def children_of(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.slow
async def test_processes_index_a_network_and_drain_once_at_ctrl_c_or_when_their_parent_is_killed(
    database: str, tmp_path: Path
) -> None:
    """A terminal sends SIGINT to the process group, and a second signal would end a process without draining."""
    log = tmp_path / "daemon.log"
    async with FaultyNetwork() as network:
        scenario, environment = Scenario(network, seed=11), daemon_environment(network, database, tmp_path)
        several = partial(indexer_run, tmp_path, environment, "--no-migrate", "--processes", start_new_session=True)
        async with several("2") as parent:
            for step in range(40):
                scenario.perform(step, 60)
            await wait_until_equal(network, database, min_records=20)
            victim, other = children_of(parent.pid)
            os.kill(victim, signal.SIGKILL)
            await until(lambda: len(set(children_of(parent.pid)) - {victim, other}) == 1)
            await until(lambda: log.read_text().count("daemon.started") == 3)
            os.killpg(parent.pid, signal.SIGINT)
            assert await asyncio.wait_for(parent.wait(), 60) == 0, log.read_text()[-2_000:]
        assert log.read_text().count('daemon.stopped"') == 2
        for step in range(40, 60):
            scenario.perform(step, 60)
        async with several("3") as parent:
            await wait_until_equal(network, database, min_records=20)
            parent.kill()
            await parent.wait()
            await until(lambda: log.read_text().count('daemon.stopped"') == 5)
        await assert_change_log_consistent(database)
    assert "daemon.stopped-at-once" not in log.read_text()
