from indexer.db.crawls import CrawlProgress


def test_progress_counts_accounts_and_ends_with_the_last_page() -> None:
    began = CrawlProgress("discover", "https://relay.test", "a.b.c", began_at=5.0, shard="1/2", last_gap=9)
    first = began.after_page("next", 10, 3, 6.0)
    assert first == CrawlProgress("discover", "https://relay.test", "a.b.c", "next", 10, 3, 5.0, None, "1/2", 9)
    second = first.after_page(None, 4, 1, 7.0)
    assert second == CrawlProgress("discover", "https://relay.test", "a.b.c", None, 14, 4, 5.0, 7.0, "1/2", 9)
