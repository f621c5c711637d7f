"""Which addresses an outbound connection may go to: public unicast ones, whatever notation they came in (spec §7.1)."""

from ipaddress import IPv4Address, IPv4Network, IPv6Network, ip_address

# The standard library's `is_global` doesn't hold all of these, and which ones depends on its patch level.
_REFUSED_V4 = tuple(
    map(
        IPv4Network,
        (
            "0.0.0.0/8",
            "10.0.0.0/8",
            "100.64.0.0/10",
            "127.0.0.0/8",
            "168.63.129.16/32",  # the metadata server of a large cloud, on a public address
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
_ISATAP, _ISATAP_MASK = 0x0000_5EFE, 0xFCFF_FFFF  # third quarter of the address; two bits of it say whose it is


def is_public(address: str) -> bool:
    """Whether `address`, an IP literal as the resolver gives it, is a public unicast address.

    An IPv6 address that stands for an IPv4 one (mapped, NAT64, 6to4) is judged as that one; one that may lead to an
    IPv4 one (ISATAP, RFC 5214) as both. Teredo, with two of them in it, is refused whole.
    """
    try:
        ip = ip_address(address)
    except ValueError:
        return False
    if isinstance(ip, IPv4Address):
        return _is_public_v4(ip)
    low = IPv4Address(int(ip) & 0xFFFF_FFFF)
    inner = low if ip in _NAT64 else ip.ipv4_mapped or ip.sixtofour
    if int(ip) >> 32 & _ISATAP_MASK == _ISATAP and not _is_public_v4(low):
        return False
    if inner is not None:
        return _is_public_v4(inner)
    return ip.is_global and ip in _UNICAST_V6 and not any(ip in network for network in _REFUSED_V6)


def _is_public_v4(ip: IPv4Address) -> bool:
    return ip.is_global and not any(ip in network for network in _REFUSED_V4)
