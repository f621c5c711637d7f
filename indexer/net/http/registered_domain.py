"""Find the registered domain of a host name: one owner controls all names below it."""

from functools import cache, lru_cache

from publicsuffixlist import PublicSuffixList


@lru_cache(maxsize=16_384)
def registered_domain(host: str) -> str:
    """Return the registered domain of a host name, as of `host_of`; the host itself if it has none.

    The Public Suffix List decides, including its private suffixes: names directly below one have different owners, too.
    An IP address, or a name without a dot, counts as a domain of its own, and so does each of its ports.
    """
    name = host.rpartition(":")[0] or host
    if name.rpartition(".")[2].isdecimal() or ":" in name:
        return host
    return _suffixes().privatesuffix(name) or host


@cache
def _suffixes() -> PublicSuffixList:
    return PublicSuffixList()  # reads the list that is part of the library
