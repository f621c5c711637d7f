"""What becomes of an account, as its relay tells it."""

from typing import Any

import pytest

from indexer.atproto import cid
from indexer.localnet.network import LocalNetwork, did_of
from tests.localnet.decoding import decode_car, decode_frame


def news(net: LocalNetwork, after: int) -> list[tuple[str, dict[str, Any]]]:
    return [(entry.kind, decode_frame(entry.frame)[1]) for entry in net.relay.log if entry.seq > after]


def told(net: LocalNetwork, after: int) -> list[tuple[object, ...]]:
    """The messages after a seq, in short: type, then handle, status, or whether active."""
    return [
        (kind, *(payload[name] for name in ("handle", "active", "status") if name in payload))
        for kind, payload in news(net, after)
    ]


def test_a_network_needs_its_addresses_first() -> None:
    with pytest.raises(RuntimeError, match="no address"):
        LocalNetwork().create_account()


def test_dids_are_well_formed_and_follow_from_handles() -> None:
    assert did_of("ada.test") == did_of("ada.test") != did_of("bob.test")
    assert len(did_of("ada.test")) == 32
    assert set(did_of("ada.test").removeprefix("did:plc:")) <= set("abcdefghijklmnopqrstuvwxyz234567")


@pytest.mark.parametrize(
    ("doings", "expected"),
    [
        (["deactivate"], [("#account", False, "deactivated")]),
        (
            ["deactivate", "activate"],
            [("#account", False, "deactivated"), ("#account", True), ("#identity", "ada.test"), ("#sync",)],
        ),
        (["takedown", "reinstate"], [("#account", False, "takendown"), ("#account", True)]),
        (["suspend", "reinstate"], [("#account", False, "suspended"), ("#account", True)]),
        (["delete_account"], [("#account", False, "deleted")]),
        (["rotate_key"], [("#identity",), ("#sync",)]),
        (["swap_key"], []),
        (["publish_key"], [("#identity",)]),
        (["announce"], [("#sync",)]),
    ],
)
async def test_every_doing_is_told(net: LocalNetwork, doings: list[str], expected: list[tuple[object, ...]]) -> None:
    account = net.create_account("ada.test")
    after = net.relay.seq
    for doing in doings:
        getattr(account, doing)()
    assert told(net, after) == expected


async def test_a_handle_change_is_told_with_the_handle(net: LocalNetwork) -> None:
    account = net.create_account("ada.test")
    account.set_handle("countess.test")
    assert told(net, 4) == [("#identity", "countess.test")]


async def test_a_rotation_shows_in_a_sync_of_the_same_tree_at_a_newer_rev(net: LocalNetwork) -> None:
    account = net.create_account()
    before, key = account.repo.head, account.key.public.did_key()
    account.rotate_key()
    identity = net.plc.identities[account.did]
    assert identity is not None
    assert identity.key == account.key.public.did_key() != key
    (_, (_, sync)) = news(net, 4)
    assert decode_car(sync["blocks"])[0] == account.repo.head.cid != before.cid
    assert (account.repo.head.data, sync["rev"]) == (before.data, account.rev)
    assert account.rev > before.rev


@pytest.mark.parametrize("resign", [True, False])
async def test_a_migration_is_heard_from_the_new_host_only(net: LocalNetwork, resign: bool) -> None:
    account = net.create_account("ada.test", pds=0)
    account.create("com.example.note", {"n": 1})
    before, after = account.repo.head, net.relay.seq
    account.migrate(net.pdses[1], resign=resign)
    assert told(net, after) == [("#identity",), ("#account", True), ("#identity", "ada.test"), ("#sync",)]
    assert net.relay.refused == {account.did: 1}
    assert net.pdses[0].hosted[account.did].status == "deactivated"
    sync = news(net, after)[-1][1]
    assert (decode_car(sync["blocks"])[0] == before.cid) is not resign
    assert (sync["rev"] == account.rev) is resign
    account.create("com.example.note", {"n": 2})
    commit = news(net, after)[-1][1]
    assert commit["prevData"] == before.data
    assert (commit["since"] == before.rev) is not resign


async def test_the_truth_is_the_records_of_active_accounts(net: LocalNetwork) -> None:
    alive, paused, gone = (net.create_account() for _ in range(3))
    path = alive.create("com.example.note", {"n": 1})
    for account in (paused, gone):
        account.create("com.example.note", {"n": 1})
    paused.deactivate()
    gone.delete_account()
    assert net.truth() == {alive.did: {path: cid.cid_of(alive.records[path])}}
    paused.activate()
    assert net.truth().keys() == {alive.did, paused.did}
