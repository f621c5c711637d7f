from indexer.net.http.host_limits import registered_domain


def test_names_below_one_registered_domain_have_one_owner() -> None:
    for host, expected in {
        "pds.example.com": "example.com",
        "x1.victim.example.co.uk": "example.co.uk",
        "a.us-east.host.bsky.network": "bsky.network",
        "x.example.com:8443": "example.com",
    }.items():
        assert registered_domain(host) == expected
    alone = "me.github.io localhost:2583 127.0.0.1:2583 127.0.0.1 [2001:db8::1]:80 2001:db8::1 co.uk"
    for host in ("", *alone.split()):
        assert registered_domain(host) == host
