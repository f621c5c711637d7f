import pytest


@pytest.fixture(autouse=True)
def first_commits_may_be_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no repo be fetched because its first commit, which contains the whole repo, waits on a loaded machine."""
    for module in ("account", "plan"):
        monkeypatch.setattr(f"indexer.sync.{module}.FIRST_COMMIT_SECONDS", 20.0)
