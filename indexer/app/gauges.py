"""The gauges of the daemon that the metrics read from the stages at each scrape."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from indexer.app.feeds import DaemonFeeds
from indexer.app.probe import DaemonProbe
from indexer.core import Core
from indexer.live.stream_position import StreamPosition
from indexer.net.http import HostLimits
from indexer.serve.disk_space import disk_space
from indexer.telemetry.metric_definitions import MAX_LISTED
from indexer.telemetry.metrics import Reading


@dataclass(frozen=True, slots=True)
class DaemonGauges:
    """Reads the gauges. `readers` returns a function for each one, by its name.

    Attributes:
        relays: The URLs of the relays in the settings.
        data_dir: The directory whose disk space is measured.
        core: The implementation of decoding and verification.
    """

    probe: DaemonProbe
    feeds: DaemonFeeds
    hosts: HostLimits
    stream_position: StreamPosition
    relays: Sequence[str]
    data_dir: Path
    core: Core

    def readers(self) -> dict[str, Callable[[], Reading]]:
        """Return the functions that read the gauges of the roles of this process."""
        readers = {**self._readiness(), **self._queues(), **self._hosts(), **self._feeds(), **self._disk()}
        readers["indexer_core_info"] = lambda: {(self.core.name, self.core.version): 1.0}
        return readers | self._stream() if "live" in self.probe.roles else readers

    def _readiness(self) -> dict[str, Callable[[], Reading]]:
        probe = self.probe
        return {
            "indexer_ready": lambda: float(not probe.stalled() and not probe.ready()),
            "indexer_not_ready": lambda: {(reason.code,): 1.0 for reason in (*probe.stalled(), *probe.ready())},
            "indexer_stage_seconds_without_progress": lambda: {
                (name,): probe.seconds_without_progress(stage) for name, stage in probe.stages.items()
            },
            "indexer_condition_occurrences": lambda: {
                (condition.kind.name, condition.subject): condition.count for condition in probe.conditions.active()
            },
        }

    def _queues(self) -> dict[str, Callable[[], Reading]]:
        probe = self.probe
        return {
            "indexer_firehose_lag_seconds": lambda: _or_nan(probe.batch_writer.lag),
            "indexer_queue_bytes": lambda: probe.inbox.unsettled_bytes,
            "indexer_queue_messages": lambda: probe.inbox.unsettled,
            "indexer_key_waiting_messages": lambda: len(probe.key_lookups),
            "indexer_resync_running": lambda: len(probe.resync_pool.running),
        }

    def _hosts(self) -> dict[str, Callable[[], Reading]]:
        hosts = self.hosts
        return {
            "indexer_hosts_paused": lambda: len(hosts.paused()),
            "indexer_hosts_failing": lambda: len(hosts.failing()),
            "indexer_host_consecutive_failures": lambda: {
                (state.host,): state.consecutive_failures for state in hosts.failing()[:MAX_LISTED]
            },
        }

    def _feeds(self) -> dict[str, Callable[[], Reading]]:
        tap_feed = self.feeds.tap_feed
        return {
            "indexer_feed_clients": self.feeds.clients,
            "indexer_feed_oldest_unacknowledged_seconds": tap_feed.oldest_unacknowledged_seconds,
            "indexer_feed_refused_events": lambda: len(tap_feed.refused),
            "indexer_feed_set_aside_events": lambda: tap_feed.set_aside,
        }

    def _disk(self) -> dict[str, Callable[[], Reading]]:
        return {
            "indexer_data_disk_free_bytes": lambda: disk_space(self.data_dir).free,
            "indexer_data_disk_size_bytes": lambda: disk_space(self.data_dir).size,
        }

    def _stream(self) -> dict[str, Callable[[], Reading]]:
        return {
            "indexer_relay_connected": lambda: self._by_relay(self._is_connected),
            "indexer_seconds_since_last_message": lambda: self._by_relay(self._silence),
            "indexer_cursor_age_seconds": self._cursor_age,
        }

    def _by_relay(self, value: Callable[[str], float]) -> Reading:
        return {(relay,): value(relay) for relay in self.relays}

    def _is_connected(self, relay: str) -> float:
        connection = self.probe.subscription.connection
        return float(connection is not None and connection.relay == relay)

    def _silence(self, relay: str) -> float:
        return monotonic() - self.probe.firehose_consumer.last_message.get(relay, math.nan)

    def _cursor_age(self) -> Reading:
        relay = self.stream_position.relay
        return {(relay,): _or_nan(self.probe.batch_writer.cursor_age)} if relay else {}


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value
