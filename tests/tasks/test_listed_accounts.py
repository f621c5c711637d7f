import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.tasks.repo_list_pages import ListedAccounts


@given(st.sets(st.text(max_size=20), max_size=50))
def test_every_added_account_is_found(dids: set[str]) -> None:
    listed = ListedAccounts(expected=10)
    for did in dids:
        listed.add(did)
    assert all(did in listed for did in dids)


@pytest.mark.slow
def test_few_other_accounts_are_found_by_chance() -> None:
    listed = ListedAccounts(expected=20_000)
    for number in range(20_000):
        listed.add(f"did:plc:{number}")
    assert sum(f"did:web:{number}.example" in listed for number in range(20_000)) <= 5
