"""Citus: distribute the tables over the nodes of a cluster, and number changes that nodes committed."""
