"""A scenario followed by a consumer that believes every message, and takes an export where the chain breaks."""

from collections import Counter

import httpx
import pytest

from indexer.localnet.load import DRAFT, NOTE, Scenario
from indexer.localnet.network import LocalNetwork
from tests.localnet.decoding import decode_all, decode_car, decode_frame, decode_records


def play(net: LocalNetwork, seed: int, steps: int) -> Scenario:
    scenario = Scenario(net, seed)
    for step in range(steps):
        scenario.perform(step, steps)
    return scenario


async def follow(net: LocalNetwork) -> tuple[dict[str, dict[str, bytes]], list[str]]:
    """The records that the stream adds up to, and the repos whose chain broke on the way."""
    repos: dict[str, dict[str, bytes]] = {}
    data: dict[str, bytes | None] = {}
    broken = []
    async with httpx.AsyncClient(base_url=net.relay.url, follow_redirects=True) as client:
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


async def test_its_stream_and_exports_add_up_to_the_truth(net: LocalNetwork) -> None:
    report = play(net, seed=7, steps=600).report
    repos, broken = await follow(net)
    assert repos == net.truth()
    happened = {happening.what: happening.did for happening in report.happenings}
    assert list(happened) == ["rotate key", "lose commit", "deactivate", "delete account"]
    assert len(set(happened.values())) == 4
    assert broken == [happened["lose commit"]]
    assert {happened["deactivate"], happened["delete account"]}.isdisjoint(repos)


async def test_it_does_all_that_it_reports(net: LocalNetwork) -> None:
    report = play(net, seed=3, steps=600).report
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


async def test_a_seed_makes_one_world(net: LocalNetwork) -> None:
    play(net, seed=5, steps=200)
    async with LocalNetwork() as again, LocalNetwork() as other:
        play(again, seed=5, steps=200)
        play(other, seed=6, steps=200)
    assert net.truth() == again.truth()
    assert net.truth() != other.truth()


def test_it_needs_an_account_for_each_accident() -> None:
    with pytest.raises(ValueError, match="4 accounts"):
        Scenario(LocalNetwork(), accounts=3)


@pytest.mark.parametrize("accounts", [4, 8])
async def test_it_runs_for_its_time(net: LocalNetwork, accounts: int) -> None:
    report = await Scenario(net, accounts=accounts).run(seconds=0.3, rate=200)
    assert len(report.happenings) == 4
    assert report.commits.total() >= 50
