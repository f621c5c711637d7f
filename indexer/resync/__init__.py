"""Resyncs: fetch, verify and compare full exports of repos that are desynchronized."""
