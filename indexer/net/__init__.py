"""Everything that is asked over the network: HTTP with limits, identities, PDSes and relays."""
