from hypothesis import given
from hypothesis import strategies as st

from indexer.identity.budget import BURST_SECONDS, SHARES, Budget

USERS = ["one", "two", "three", "four", "five", "six"]
spendings = st.lists(st.tuples(st.sampled_from(USERS), st.floats(0, 3)), max_size=200)


@given(spendings, st.floats(0.01, 50))
def test_no_span_of_time_sees_more_than_the_rate_and_the_burst(spent: list[tuple[str, float]], rate: float) -> None:
    budget, now, done = Budget(rate), 1_000.0, list[tuple[str, float]]()
    for user, pause in spent:
        now += pause
        if budget.spend(user, now):
            done.append((user, now))
    for most, times in [
        (rate, [at for _, at in done]),
        *((rate / SHARES, [at for user, at in done if user == one]) for one in USERS),
    ]:
        for first in range(len(times)):
            for last in range(first, len(times)):
                allowed = max(most * BURST_SECONDS, 1) + most * (times[last] - times[first])
                assert last - first + 1 <= allowed + 1e-6


def test_what_one_user_may_not_spend_is_there_for_others() -> None:
    budget = Budget(10.0)
    assert sum(budget.spend("greedy", 0.0) for _ in range(1_000)) == 20
    assert sum(budget.spend("modest", 0.0) for _ in range(5)) == 5


def test_who_has_not_spent_lately_takes_no_memory() -> None:
    budget = Budget(1e6)
    for number in range(50_000):
        assert budget.spend(str(number), number * 10.0)
    assert len(budget._full_at) < 20_000
