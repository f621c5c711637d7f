"""Logs, metrics and conditions, which every stage reports."""
