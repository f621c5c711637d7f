"""Valid identifiers of each kind, and patterns of collections."""

DID, HANDLE, NSID, TID = "did:plc:ewvi7nxzyoun6zhxrhs64oiz", "alice.example.com", "app.bsky.feed.post", "3jzfcijpj2z2a"
IDENTIFIERS = (DID, "did:web:bob.test", HANDLE, "xn--a.b-c.D", NSID, "com.example.a-b.C1", TID, "self", "a:b~_.-", "..")
PATTERNS = ("*", NSID, "app.bsky.*", "app.*", "app.bsky.feed.*", "com.example.a.b")
