"""Denials by a directory, and when they are believed."""

from dataclasses import replace

from indexer.sync.identity import CERTAIN_DENIALS, DENIAL_SECONDS, StoredIdentity, add_denial

DID = "did:plc:ewvi7nxzyoun6zhxrhs64oiz"
KNOWN = StoredIdentity(DID, "alice.test", "https://pds.test", "did:key:zabc", 0.0)


def denial(at: float, denials: int = 1) -> StoredIdentity:
    return StoredIdentity(DID, None, None, None, at, problem="not registered", denials=denials, denied_at=at)


def test_denials_count_only_hours_apart() -> None:
    """A hundred denials within an hour, for example because of commits, are one."""
    identity = KNOWN
    for second in range(100):
        identity = add_denial(identity, denial(36.0 * second))
    assert (identity.denials, identity.gone, identity.denied_at) == (1, False, 0.0)
    for number in range(1, CERTAIN_DENIALS):
        assert not identity.gone
        identity = add_denial(identity, denial(number * DENIAL_SECONDS))
    assert identity.gone


def test_denied_identity_keeps_its_document_and_is_looked_up_again() -> None:
    identity = add_denial(KNOWN, denial(50.0))
    assert (identity.handle, identity.pds, identity.signing_key) == ("alice.test", "https://pds.test", "did:key:zabc")
    assert (identity.problem, identity.fetched_at) == ("not registered", 50.0)
    assert identity.refresh_at == 50.0 + DENIAL_SECONDS
    assert replace(identity, stale=True).refresh_at == 50.0


def test_denial_from_before_a_change_leaves_the_identity_stale() -> None:
    for stale in (True, False):
        assert add_denial(replace(KNOWN, stale=not stale), replace(denial(50.0), stale=stale)).stale is stale


def test_tombstone_is_certain_at_once() -> None:
    identity = add_denial(add_denial(KNOWN, denial(50.0)), denial(51.0, CERTAIN_DENIALS))
    assert (identity.gone, identity.refresh_at) == (True, None)
    assert add_denial(identity, denial(1e6)).denied_at == 51.0
