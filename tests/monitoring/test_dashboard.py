"""The Grafana dashboard: it follows Grafana's schema, and every panel shows data of a real run."""

import asyncio
import json
import re
from pathlib import Path
from time import time
from typing import Any

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard
from PIL import Image

from docs.dashboard import dashboard_json
from docs.dashboard_panels import ROWS
from docs.dashboard_picture import DASHBOARD, Span, draw, panels_of
from tests.monitoring.metric_names import unknown_names
from tests.monitoring.monitored_network import monitored_network
from tests.monitoring.prometheus_programs import needs_prometheus
from tests.monitoring.prometheus_server import PrometheusServer
from tests.monitoring.test_alerts import ALERTS, RULES
from tests.waiting import until
from tests.yaml_files import read_yaml

PROVISIONING = DASHBOARD.parents[1] / "provisioning"
MODEL: dict[str, Any] = json.loads(DASHBOARD.read_text())
PANELS = panels_of(MODEL)
SECONDS = 30.0


def title_of(panel: dict[str, Any]) -> str:
    title: str = panel["title"]
    return title


def test_dashboard_is_the_generated_one() -> None:
    assert DASHBOARD.read_text() == dashboard_json(), "run `make docs`"


def test_every_field_belongs_to_the_schema_of_grafana() -> None:
    """Grafana's own library drops fields that it does not know."""
    register_default_plugins()
    read = Dashboard.from_json(json.loads(DASHBOARD.read_text()))
    assert json.loads(json.dumps(read, cls=JSONEncoder)) == MODEL


def test_dashboard_has_a_row_for_each_part() -> None:
    assert [panel["title"] for panel in MODEL["panels"] if panel["type"] == "row"] == list(ROWS)
    assert set(ROWS) >= {
        "Overview",
        "Counters that should be zero",
        "Live path",
        "Resync and backfill",
        "Hosts",
        "Identity",
        "Database",
        "Consumers of the change log",
    }
    assert all(ROWS.values()), "no row is empty"
    assert sum(map(len, ROWS.values())) == len(PANELS)


def test_identifiers_and_places_of_panels_are_unique() -> None:
    for values in (
        [panel["id"] for panel in MODEL["panels"]],
        [title_of(panel) for panel in PANELS],
        [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in MODEL["panels"]],
    ):
        assert len(values) == len(set(values))


@pytest.mark.parametrize("panel", PANELS, ids=title_of)
def test_panel_has_a_title_a_unit_and_a_description(panel: dict[str, Any]) -> None:
    assert panel["title"]
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert re.search(r"[.`]$", panel["description"])
    assert panel["datasource"]["uid"] == "${datasource}"


@pytest.mark.parametrize("panel", PANELS, ids=title_of)
def test_panel_uses_only_metrics_and_labels_that_exist(panel: dict[str, Any]) -> None:
    for target in panel["targets"]:
        assert unknown_names(target["expr"]) == []
        assert 'instance=~"$instance"' in target["expr"]


def test_grafana_is_provisioned_with_the_data_source_and_the_dashboard() -> None:
    [source] = read_yaml(PROVISIONING / "datasources" / "prometheus.yml")["datasources"]
    assert (source["type"], source["url"]) == ("prometheus", "${PROMETHEUS_URL}")
    [provider] = read_yaml(PROVISIONING / "dashboards" / "indexer.yml")["providers"]
    assert provider["options"]["path"] == "/var/lib/grafana/dashboards"


async def panels_without_data(prometheus: PrometheusServer, span: Span) -> list[str]:
    """Return the queries that have no finite value in the time of the run."""
    empty = []
    for panel in PANELS:
        for target in panel["targets"]:
            query = span.concrete(target["expr"])
            data = await prometheus.get("query_range", query=query, start=span.start, end=span.end, step=1)
            result = data["result"]
            values = [float(value) for series in result for _, value in series["values"]]
            if not any(abs(value) < float("inf") for value in values):  # false for NaN
                empty.append(f"{panel['title']}: {target['expr']}")
    return empty


@needs_prometheus
@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_every_panel_shows_data_of_a_run_with_faults(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The daemon counts repos with a small share of the time, so seldom if the database is slow.
    monkeypatch.setattr("tests.waiting.TIMEOUT", 200.0)
    began = time()
    async with monitored_network(database, tmp_path, SECONDS, rules=RULES) as (_, prometheus, acted):
        empty: list[str] = []

        async def all_have_data() -> bool:
            nonlocal empty
            empty = await panels_without_data(prometheus, Span(began, time()))
            return not empty

        await asyncio.wait_for(acted.wait(), 120)
        await until(all_have_data, lambda: empty)
        groups = (await prometheus.get("rules"))["groups"]
        rules = {rule["name"]: rule for group in groups for rule in group["rules"]}
        assert {name: rule["health"] for name, rule in rules.items()} == dict.fromkeys(ALERTS, "ok")
        assert rules["EventsNotConserved"]["state"] == "inactive"
        await asyncio.to_thread(draw, prometheus.url, tmp_path / "dashboard.png", Span(began, time()))
    with Image.open(tmp_path / "dashboard.png") as picture:
        assert picture.width > 1_000
