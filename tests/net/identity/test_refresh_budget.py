from hypothesis import given
from hypothesis import strategies as st

from indexer.net.identity.identity_cache import BURST_SECONDS, MAX_IDLE_USERS, SHARES, RefreshBudget

USERS = ["one", "two", "three", "four", "five", "six"]
spendings = st.lists(st.tuples(st.sampled_from(USERS), st.floats(0, 3)), max_size=200)


@given(spendings, st.floats(0.01, 50))
def test_no_interval_exceeds_the_rate_and_the_burst(spent: list[tuple[str, float]], rate: float) -> None:
    budget, now, allowed = RefreshBudget(rate), 1_000.0, list[tuple[str, float]]()
    for user, pause in spent:
        now += pause
        if budget.spend(user, user, now):
            allowed.append((user, now))
    for limit, times in [
        (rate, [at for _, at in allowed]),
        *((rate / SHARES, [at for user, at in allowed if user == one]) for one in USERS),
    ]:
        for first in range(len(times)):
            for last in range(first, len(times)):
                maximum = max(limit * BURST_SECONDS, 1) + limit * (times[last] - times[first])
                assert last - first + 1 <= maximum + 1e-6


def test_hosts_get_only_their_share() -> None:
    budget = RefreshBudget(10.0)
    assert sum(budget.spend("greedy", "greedy", 0.0) for _ in range(1_000)) == 20
    assert sum(budget.spend("modest", "modest", 0.0) for _ in range(5)) == 5


def test_hosts_of_one_domain_leave_a_share_to_those_of_others() -> None:
    """Its owner may give each account a host of its own, also another one at each lookup."""
    budget = RefreshBudget(10.0)
    assert sum(budget.spend(f"host{number}.greedy", "greedy", 0.0) for number in range(1_000)) == 80
    assert sum(budget.spend("modest", "modest", 0.0) for _ in range(20)) == 20


def test_budget_is_complete_when_the_clock_is_set_back() -> None:
    budget = RefreshBudget(10.0)
    while budget.spend("user", "user", 86_400.0):
        pass
    assert budget.spend("user", "user", 0.0)
    assert budget.spend("another", "another", 0.0)


def test_users_without_recent_actions_are_forgotten() -> None:
    budget = RefreshBudget(1e6)
    for number in range(50_000):
        assert budget.spend(str(number), str(number), number * 10.0)
    assert len(budget.full_at) <= MAX_IDLE_USERS
