"""Consumers of the change log: the feeds for clients of tap and Jetstream, and links."""
