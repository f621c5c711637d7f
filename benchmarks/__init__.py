"""Benchmarks: `make bench-live`, `make bench-resync` and `python -m benchmarks.guard`. Results: docs/performance.md.

A separate process (`load_relay`, `export_host`) serves a generated workload (`workload`) to the real daemon, which runs
in another process on a real Postgres (`harness`). Afterwards the database is compared with the workload
(`database_rows`). The same run measures the floor (`floor`): the lower bound of the CPU time on this machine. Results
from different machines are compared by their ratio to it.

`peers` compares the daemon with tap on the same workload (`make bench-peers`).
"""
