"""How long to wait before the next attempt."""

from hashlib import sha256


def backoff_seconds(attempts: int, key: str, *, first: float = 60.0, most: float = 3600.0) -> float:
    """Doubling from `first` to `most` seconds, ±25 % of jitter that depends on `key` and `attempts` alone.

    Jitter from a hash keeps planning a pure function and still spreads repos that failed together.
    """
    doubled = min(first * 2.0 ** min(max(attempts - 1, 0), 32), most)
    spread = sha256(f"{key}/{attempts}".encode()).digest()[0] / 255
    return doubled * (0.75 + spread / 2)
