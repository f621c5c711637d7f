import pytest

from indexer.outbound import registered_domain


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("pds.example.com", "example.com"),
        ("x1.victim.example.co.uk", "example.co.uk"),
        ("a.us-east.host.bsky.network", "bsky.network"),
        ("me.github.io", "me.github.io"),
        ("x.example.com:8443", "example.com"),
        ("localhost:2583", "localhost:2583"),
        ("127.0.0.1:2583", "127.0.0.1:2583"),
        ("127.0.0.1", "127.0.0.1"),
        ("[2001:db8::1]:80", "[2001:db8::1]:80"),
        ("2001:db8::1", "2001:db8::1"),
        ("co.uk", "co.uk"),
        ("", ""),
    ],
)
def test_names_below_one_registered_domain_have_one_owner(host: str, expected: str) -> None:
    assert registered_domain(host) == expected
