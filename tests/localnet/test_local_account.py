"""The events of account actions, in the log of the relay."""

from typing import Any

import pytest

from indexer.atproto import cid
from indexer.localnet.local_network import LocalNetwork, did_of
from tests.localnet.independent_decoder import decode_car, decode_frame


def events(net: LocalNetwork, after: int) -> list[tuple[str, dict[str, Any]]]:
    return [(entry.kind, decode_frame(entry.frame)[1]) for entry in net.relay.log if entry.seq > after]


def short_events(net: LocalNetwork, after: int) -> list[tuple[object, ...]]:
    """Return the messages after a seq as tuples: the type, then `handle`, `active` and `status` if present."""
    return [
        (kind, *(payload[name] for name in ("handle", "active", "status") if name in payload))
        for kind, payload in events(net, after)
    ]


def test_account_needs_started_network() -> None:
    with pytest.raises(RuntimeError, match="no address"):
        LocalNetwork().create_account()


def test_did_is_well_formed_and_derived_from_handle() -> None:
    assert did_of("ada.test") == did_of("ada.test") != did_of("bob.test")
    assert len(did_of("ada.test")) == 32
    assert set(did_of("ada.test").removeprefix("did:plc:")) <= set("abcdefghijklmnopqrstuvwxyz234567")


@pytest.mark.parametrize(
    ("actions", "expected"),
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
async def test_action_emits_events(net: LocalNetwork, actions: list[str], expected: list[tuple[object, ...]]) -> None:
    account = net.create_account("ada.test")
    after = net.relay.seq
    for action in actions:
        getattr(account, action)()
    assert short_events(net, after) == expected


async def test_handle_change_emits_identity_with_handle(net: LocalNetwork) -> None:
    account = net.create_account("ada.test")
    account.set_handle("countess.test")
    assert short_events(net, 4) == [("#identity", "countess.test")]


async def test_key_rotation_emits_sync_of_same_tree_at_newer_rev(net: LocalNetwork) -> None:
    account = net.create_account()
    before, key = account.repo.head, account.key.public.did_key()
    account.rotate_key()
    identity = net.plc.identities[account.did]
    assert identity is not None
    assert identity.key == account.key.public.did_key() != key
    (_, (_, sync)) = events(net, 4)
    assert decode_car(sync["blocks"])[0] == account.repo.head.cid != before.cid
    assert (account.repo.head.data, sync["rev"]) == (before.data, account.rev)
    assert account.rev > before.rev


@pytest.mark.parametrize("sign_again", [True, False])
async def test_migration_events_come_from_new_pds_only(net: LocalNetwork, sign_again: bool) -> None:
    account = net.create_account("ada.test", pds=0)
    account.create("com.example.note", {"n": 1})
    before, after = account.repo.head, net.relay.seq
    account.migrate(net.pdses[1], sign_again=sign_again)
    assert short_events(net, after) == [("#identity",), ("#account", True), ("#identity", "ada.test"), ("#sync",)]
    assert net.relay.wrong_host == {account.did: 1}
    assert net.pdses[0].hosted[account.did].status == "deactivated"
    sync = events(net, after)[-1][1]
    assert (decode_car(sync["blocks"])[0] == before.cid) is not sign_again
    assert (sync["rev"] == account.rev) is sign_again
    account.create("com.example.note", {"n": 2})
    commit = events(net, after)[-1][1]
    assert commit["prevData"] == before.data
    assert (commit["since"] == before.rev) is not sign_again


async def test_expected_records_are_those_of_active_accounts(net: LocalNetwork) -> None:
    active, deactivated, deleted = (net.create_account() for _ in range(3))
    path = active.create("com.example.note", {"n": 1})
    for account in (deactivated, deleted):
        account.create("com.example.note", {"n": 1})
    deactivated.deactivate()
    deleted.delete_account()
    assert net.expected_records() == {active.did: {path: cid.cid_of(active.records[path])}}
    deactivated.activate()
    assert net.expected_records().keys() == {active.did, deactivated.did}
