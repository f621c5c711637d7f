"""Helpers for asyncio that do not depend on the rest of the program."""
