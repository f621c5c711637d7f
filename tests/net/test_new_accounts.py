from indexer.net.new_accounts import NewAccounts

NOW = 1_800_000_000.0


def test_host_adds_its_allowance_at_once_and_then_waits_in_order() -> None:
    accounts = NewAccounts(per_hour=100)
    assert [accounts.add("pds.evil.example", NOW) for _ in range(100)] == [None] * 100
    assert accounts.is_limited("pds.evil.example", NOW + 1)
    times = [accounts.add("pds.evil.example", NOW + 1) for _ in range(300)]
    waits = [time - NOW for time in times if time is not None]
    assert len(waits) == 300
    assert waits == sorted(waits)
    assert 0 < waits[0] <= 36
    assert 3 * 3_600 - 36 <= waits[-1] <= 3 * 3_600 + 36
    assert accounts.add("pds.honest.example", NOW + 1) is None


def test_hosts_of_one_registered_domain_share_its_allowance() -> None:
    accounts = NewAccounts(per_hour=100)
    assert [accounts.add(f"x{number}.evil.example", NOW) for number in range(100)] == [None] * 100
    assert accounts.is_limited("another.evil.example", NOW)
    assert accounts.add("another.evil.example", NOW) is not None
    assert not accounts.is_limited("evil.honest.example", NOW)


def test_allowance_comes_back_within_an_hour() -> None:
    accounts = NewAccounts(per_hour=100)
    for _ in range(100):
        accounts.add("pds.example", NOW)
    assert accounts.is_limited("pds.example", NOW + 1)
    assert not accounts.is_limited("pds.example", NOW + 40)
    assert [accounts.add("pds.example", NOW + 3_600) for _ in range(100)] == [None] * 100


def test_zero_means_no_limit_and_the_allowance_is_complete_when_the_clock_is_set_back() -> None:
    assert NewAccounts(per_hour=0).add("pds.example", NOW) is None
    accounts = NewAccounts(per_hour=100)
    for _ in range(101):
        accounts.add("pds.example", NOW + 86_400)
    assert not accounts.is_limited("pds.example", NOW)
    assert accounts.add("pds.example", NOW) is None
