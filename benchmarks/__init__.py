"""Benchmarks that anyone can run: `make bench-live`, `make bench-resync`. Results: docs/performance.md.

A generated world (`world`) is served by a process of its own (`relay`, `host`) to the real daemon, another process,
on a real Postgres (`stand`). Afterwards the database is compared with the world's truth (`tables`), and what the
machine could do at best is measured in the same run (`floor`), so that results compare by ratio.
"""
