"""Valid identifiers of each kind."""

DID, HANDLE, NSID, TID = "did:plc:ewvi7nxzyoun6zhxrhs64oiz", "alice.example.com", "app.bsky.feed.post", "3jzfcijpj2z2a"
IDENTIFIERS = (DID, "did:web:bob.test", HANDLE, "xn--a.b-c.D", NSID, "com.example.a-b.C1", TID, "self", "a:b~_.-", "..")
