"""Bound the number of items in JSON text before it is decoded."""


def max_items(text: bytes) -> int:
    """Return an upper bound of the number of items in JSON text, without decoding it.

    Decoding 4 MiB of empty lists would block the event loop for 0.7 seconds, from a worker thread, too.
    """
    return sum(map(text.count, (b",", b"[", b"{")))
