"""Exponential back-off with deterministic jitter."""

from hashlib import sha256


def backoff_seconds(attempts: int, key: str, *, first: float = 60.0, maximum: float = 3600.0) -> float:
    """Return how long to wait after `attempts` failures: doubled from `first` to `maximum` seconds, ±25 % jitter.

    The jitter is a hash of `key` and `attempts`. So planning stays a pure function, and repos that failed at the same
    time are still retried at different times.
    """
    doubled = min(first * 2.0 ** min(max(attempts - 1, 0), 32), maximum)
    jitter = sha256(f"{key}/{attempts}".encode()).digest()[0] / 255
    return doubled * (0.75 + jitter / 2)
