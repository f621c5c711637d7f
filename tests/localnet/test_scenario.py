"""The events and exports of a scenario, read by a simple consumer that verifies nothing."""

from collections import Counter

import pytest

from indexer.localnet.local_network import LocalNetwork
from indexer.localnet.scenario import DRAFT, NOTE, Scenario
from tests.localnet.http_clients import http_client
from tests.localnet.independent_decoder import decode_all, decode_car, decode_frame, decode_records


def perform_all(net: LocalNetwork, seed: int, steps: int) -> Scenario:
    scenario = Scenario(net, seed)
    for step in range(steps):
        scenario.perform(step, steps)
    return scenario


async def consume(net: LocalNetwork) -> tuple[dict[str, dict[str, bytes]], list[str]]:
    """Return the records after all events, and the repos with a chain break, whose export was fetched."""
    repos: dict[str, dict[str, bytes]] = {}
    data: dict[str, bytes | None] = {}
    broken = []
    async with http_client(base_url=net.relay.url, follow_redirects=True) as client:
        for entry in net.relay.log:
            _, event = decode_frame(entry.frame)
            if entry.kind == "#account" and not event["active"]:
                del repos[event["did"]]
            if entry.kind != "#commit":
                continue
            did = event["repo"]
            records = repos.setdefault(did, {})
            if event.get("prevData") != data.get(did):
                broken.append(did)
            for op in event["ops"]:
                records.pop(op["path"], None)
                if op["cid"]:
                    records[op["path"]] = op["cid"]
            data[did] = decode_all(decode_car(event["blocks"])[1][event["commit"]])[0]["data"]
        for did in broken:
            export = await client.get(f"/xrpc/com.atproto.sync.getRepo?did={did}")
            root, blocks = decode_car(export.content)
            repos[did] = decode_records(blocks, decode_all(blocks[root])[0]["data"])
    return repos, broken


@pytest.mark.slow
async def test_events_and_exports_give_expected_records(net: LocalNetwork) -> None:
    report = perform_all(net, seed=7, steps=600).report
    repos, broken = await consume(net)
    assert repos == net.expected_records()
    dids = {event.kind: event.did for event in report.events}
    assert list(dids) == ["rotate key", "lose commit", "deactivate", "delete account"]
    assert len(set(dids.values())) == 4
    assert broken == [dids["lose commit"]]
    assert {dids["deactivate"], dids["delete account"]}.isdisjoint(repos)


@pytest.mark.slow
async def test_report_matches_the_events(net: LocalNetwork) -> None:
    report = perform_all(net, seed=3, steps=600).report
    events = [decode_frame(entry.frame)[1] for entry in net.relay.log if entry.kind == "#commit"]
    lost, firsts = 1, report.accounts
    assert report.commits.total() == len(events) + lost - firsts
    ops = Counter(op["action"] for event in events for op in event["ops"])
    assert report.ops == ops + Counter(create=2)
    assert {*report.commits} == {"empty", "one-op", "multi-op", "twice-a-path"}
    assert report.accounts == len(net.accounts) > 8
    assert {account.key.curve for account in net.accounts.values()} == {"k256", "p256"}
    assert {account.pds for account in net.accounts.values()} == set(net.pdses)
    collections = {path.partition("/")[0] for account in net.accounts.values() for path in account.records}
    assert {NOTE, DRAFT} < collections


@pytest.mark.slow
async def test_same_seed_gives_same_records(net: LocalNetwork) -> None:
    perform_all(net, seed=5, steps=200)
    async with LocalNetwork() as again, LocalNetwork() as other:
        perform_all(again, seed=5, steps=200)
        perform_all(other, seed=6, steps=200)
    assert net.expected_records() == again.expected_records()
    assert net.expected_records() != other.expected_records()


def test_scenario_needs_an_account_for_each_account_event() -> None:
    with pytest.raises(ValueError, match="4 accounts"):
        Scenario(LocalNetwork(), accounts=3)


@pytest.mark.slow
@pytest.mark.parametrize("accounts", [4, 8])
async def test_run_performs_all_steps(net: LocalNetwork, accounts: int) -> None:
    report = await Scenario(net, accounts=accounts).run(seconds=0.15, rate=400)
    assert len(report.events) == 4
    assert report.commits.total() >= 50
