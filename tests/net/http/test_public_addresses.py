"""Public addresses, compared with a list of reserved ranges as plain numbers."""

import socket
from ipaddress import IPv4Address, IPv6Address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.net.http.checked_connector import is_public, network_of

RESERVED_V4 = [
    ("0.0.0.0", "0.255.255.255"),  # noqa: S104
    ("10.0.0.0", "10.255.255.255"),
    ("100.64.0.0", "100.127.255.255"),
    ("127.0.0.0", "127.255.255.255"),
    ("169.254.0.0", "169.254.255.255"),
    ("172.16.0.0", "172.31.255.255"),
    ("192.0.0.0", "192.0.0.255"),
    ("192.0.2.0", "192.0.2.255"),
    ("192.88.99.0", "192.88.99.255"),
    ("192.168.0.0", "192.168.255.255"),
    ("198.18.0.0", "198.19.255.255"),
    ("198.51.100.0", "198.51.100.255"),
    ("203.0.113.0", "203.0.113.255"),
    ("224.0.0.0", "255.255.255.255"),
]


def number(address: str) -> int:
    return int.from_bytes(socket.inet_aton(address), "big")


def reserved(value: int) -> bool:
    return value == number("168.63.129.16") or any(number(low) <= value <= number(high) for low, high in RESERVED_V4)


near_range_limits = st.sampled_from([number(limit) for pair in RESERVED_V4 for limit in pair]).flatmap(
    lambda limit: st.integers(max(limit - 2, 0), min(limit + 2, 2**32 - 1))
)
v4 = st.integers(0, 2**32 - 1) | near_range_limits


@given(v4)
def test_ipv4_address_is_public_unless_reserved(value: int) -> None:
    assert is_public(str(IPv4Address(value))) is not reserved(value)


@given(v4)
def test_ipv6_address_that_contains_an_ipv4_address_counts_as_that(value: int) -> None:
    text = str(IPv4Address(value))
    high, low = value >> 16, value & 0xFFFF
    for form in (f"::ffff:{text}", f"64:ff9b::{text}", f"2002:{high:x}:{low:x}::1"):
        assert is_public(form) is not reserved(value), form


@given(v4, st.sampled_from(["2606:4700:1:2", "2002:5db8:d822:1"]), st.sampled_from(["0", "200", "100", "300"]))
def test_isatap_address_of_a_private_ipv4_address_is_refused(value: int, prefix: str, scope: str) -> None:
    assert is_public(f"{prefix}:{scope}:5efe:{IPv4Address(value)}") is not reserved(value)


@given(v4, st.integers(0, 2**16 - 1), st.integers(0, 2**32 - 1))
def test_teredo_addresses_are_refused(server: int, port: int, client: int) -> None:
    number = 0x20010000 << 96 | server << 64 | port << 32 | client ^ 0xFFFF_FFFF
    assert not is_public(str(IPv6Address(number)))


REFUSED = """
    :: ::1 ::127.0.0.1 ::93.184.216.34 64:ff9b:1::5db8:d822 100::1 2001::1 2001:db8::1 3fff::1 4000::1 5f00::1 fc00::1
    fd00:ec2::254 fe80::1 fe80::1%1 fec0::1 ff02::1 ff0e::1 pds.example 2130706433 0177.0.0.1
"""


@pytest.mark.parametrize("address", ["", *REFUSED.split()])
def test_addresses_that_are_not_public_are_refused(address: str) -> None:
    assert not is_public(address)


def test_public_addresses_are_allowed() -> None:
    for address in ("93.184.216.34", "1.1.1.1", "2606:4700:4700::1111", "2a00:1450:4001::1"):
        assert is_public(address)


def test_addresses_of_one_machine_are_one_network() -> None:
    for address in ("192.0.2.7", "::ffff:192.0.2.7", "64:ff9b::192.0.2.7", "2002:c000:207::1"):
        assert network_of(address) == "192.0.2.7"
    for address in ("2001:db8:1:2:3::4", "2001:db8:1:2::9%eth0"):
        assert network_of(address) == "2001:db8:1:2::/64"
