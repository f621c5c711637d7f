"""Decide which addresses outbound connections may use: public unicast only (docs/protocol.md#outbound-requests)."""

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

# The standard library's `is_global` does not cover all of these, and its coverage depends on the patch release.
_REFUSED_V4 = tuple(
    map(
        IPv4Network,
        (
            "0.0.0.0/8",
            "10.0.0.0/8",
            "100.64.0.0/10",
            "127.0.0.0/8",
            "168.63.129.16/32",  # the metadata server of Azure has a public address
            "169.254.0.0/16",
            "172.16.0.0/12",
            "192.0.0.0/24",
            "192.0.2.0/24",
            "192.88.99.0/24",
            "192.168.0.0/16",
            "198.18.0.0/15",
            "198.51.100.0/24",
            "203.0.113.0/24",
            "224.0.0.0/4",
            "240.0.0.0/4",
        ),
    )
)
_UNICAST_V6 = IPv6Network("2000::/3")
_REFUSED_V6 = tuple(map(IPv6Network, ("2001::/23", "2001:db8::/32", "3fff::/20")))
_NAT64 = IPv6Network("64:ff9b::/96")
_ISATAP, _ISATAP_MASK = 0x0000_5EFE, 0xFCFF_FFFF  # the third quarter of the address; the mask ignores two flag bits


def is_public(address: str) -> bool:
    """Return True if `address`, an IP literal, is a public unicast address.

    For an IPv6 address that represents an IPv4 address (mapped, NAT64, 6to4), the IPv4 address decides. For one that
    may lead to an IPv4 address (ISATAP, RFC 5214), both must be public. Teredo addresses are never public here.
    """
    try:
        ip = ip_address(address)
    except ValueError:
        return False
    if isinstance(ip, IPv4Address):
        return _is_public_v4(ip)
    low, inner = _low_v4(ip), _represented_v4(ip)
    if int(ip) >> 32 & _ISATAP_MASK == _ISATAP and not _is_public_v4(low):
        return False
    if inner is not None:
        return _is_public_v4(inner)
    return ip.is_global and ip in _UNICAST_V6 and not any(ip in network for network in _REFUSED_V6)


def network_of(address: str) -> str:
    """Return the network that usually belongs to one machine: an IPv4 address, or an IPv6 network of 64 bits.

    For an IPv6 address that represents an IPv4 address, it is the IPv4 address.
    """
    ip = ip_address(address.partition("%")[0])
    if isinstance(ip, IPv6Address) and (inner := _represented_v4(ip)) is None:
        return str(IPv6Network((ip, 64), strict=False))
    return str(ip if isinstance(ip, IPv4Address) else inner)


def _represented_v4(ip: IPv6Address) -> IPv4Address | None:
    return _low_v4(ip) if ip in _NAT64 else ip.ipv4_mapped or ip.sixtofour


def _low_v4(ip: IPv6Address) -> IPv4Address:
    return IPv4Address(int(ip) & 0xFFFF_FFFF)


def _is_public_v4(ip: IPv4Address) -> bool:
    return ip.is_global and not any(ip in network for network in _REFUSED_V4)
