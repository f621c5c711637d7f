import pytest

from indexer.concurrency import stage_progress
from indexer.concurrency.stage_progress import StageProgress

EVER = 0.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1_000.0]
    monkeypatch.setattr(stage_progress, "monotonic", lambda: now[0])
    return now


def test_stage_without_work_makes_no_progress_and_has_not_stalled(clock: list[float]) -> None:
    stage = StageProgress("a stage")
    clock[0] += 500
    assert stage.seconds_without_progress(EVER) == 0


def test_time_counts_from_the_beginning_of_work_and_from_each_step(clock: list[float]) -> None:
    stage = StageProgress("a stage")
    stage.begin()
    clock[0] += 3
    stage.begin()
    assert stage.seconds_without_progress(EVER) == 3, "there was work before"
    stage.moved()
    clock[0] += 2
    assert stage.seconds_without_progress(EVER) == 2
    stage.idle()
    assert stage.seconds_without_progress(EVER) == 0


def test_time_in_which_the_stage_was_not_able_to_work_does_not_count(clock: list[float]) -> None:
    stage = StageProgress("a stage")
    stage.begin()
    clock[0] += 100
    assert stage.seconds_without_progress(able_since=clock[0] - 5) == 5


def test_one_task_that_hangs_is_not_hidden_by_others(clock: list[float]) -> None:
    stage = StageProgress("a stage")
    loop = stage.add()
    with stage.task():
        clock[0] += 10
        with stage.task() as other:
            assert stage.seconds_without_progress(EVER) == 10, "the one that waits longest counts"
            other.moved()
        with loop.busy():
            stage.moved()
        stage.idle()
        assert stage.seconds_without_progress(EVER) == 10
    assert stage.seconds_without_progress(EVER) == 0


def test_failed_task_leaves_no_work(clock: list[float]) -> None:
    stage = StageProgress("a stage")
    with pytest.raises(ValueError, match="a bug"), stage.task():
        raise ValueError("a bug")
    with pytest.raises(ValueError, match="a bug"), stage.busy():
        raise ValueError("a bug")
    clock[0] += 10
    assert stage.seconds_without_progress(EVER) == 0
