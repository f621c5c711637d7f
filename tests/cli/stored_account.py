"""The account of the fixture `stored_account`."""

from indexer.atproto.cid import cid_of

DID = "did:plc:" + "a" * 24
HANDLE = "someone.example"
REV = "3jzfcijpj2z2b"
NOTE = b"\xa1\x65$type\x70com.example.note"
CID = cid_of(NOTE)
