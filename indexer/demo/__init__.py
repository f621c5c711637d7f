"""A small AT Protocol network on loopback, for `indexer demo` and the tests. Every commit is really signed."""
