"""Crawls of repo lists: discover accounts, and reconcile the database with a relay."""
