"""The Grafana dashboard and the alert rules: names that exist, and each one rings or shows data in Prometheus."""

import asyncio
import json
import re
import subprocess
from pathlib import Path
from time import time
from typing import Any

import pytest

from docs.dashboard_picture import DASHBOARD, Span, draw, panels_of
from docs.make_dashboard_picture import PrometheusServer, monitored_network
from indexer.app.daemon import INBOX_BYTES
from tests.docs.test_references import anchors
from tests.serve.prometheus_programs import needs_prometheus, needs_promtool
from tests.source_code import PROJECT
from tests.telemetry.metric_names import unknown_names
from tests.waiting import until
from tests.yaml_files import read_yaml

MODEL: dict[str, Any] = json.loads(DASHBOARD.read_text())
PANELS = panels_of(MODEL)
RULES = PROJECT / "config/prometheus/alerts.yml"
INCIDENTS = sorted((PROJECT / "tests/prometheus").glob("*.yml"))
SECONDS = 30.0

browser = pytest.mark.proof("browser")


def alert_rules() -> dict[str, dict[str, Any]]:
    groups = read_yaml(RULES)["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"]}


def test_panels_and_alerts_use_only_metrics_and_labels_that_exist() -> None:
    assert unknown_names("sum(indexer_no_such_metric)") != []
    assert unknown_names('indexer_queue_bytes{wrong="label"}') != []
    expressions = [target["expr"] for panel in PANELS for target in panel["targets"]]
    assert len(expressions) > 50
    assert [expression for expression in expressions if 'instance=~"$instance"' not in expression] == []
    expressions += [rule["expr"] for rule in alert_rules().values()]
    assert [problem for expression in expressions for problem in unknown_names(expression)] == []


def test_every_alert_is_rung_by_a_test_and_has_a_section_in_the_runbook() -> None:
    alerts = alert_rules()
    groups = [group for file in INCIDENTS for group in read_yaml(file)["tests"]]
    cases = [case for group in groups for case in group.get("alert_rule_test", [])]
    assert {case["alertname"] for case in cases if case.get("exp_alerts")} == alerts.keys()
    sections = anchors(PROJECT / "docs/runbook.md")
    for name, rule in alerts.items():
        assert rule["annotations"]["runbook_url"] == f"docs/runbook.md#{name.lower()}"
        assert name.lower() in sections
    limits = re.findall(r"indexer_queue_bytes(?:\[\w+\]\))? > ([\d.e]+)", RULES.read_text())
    assert limits
    assert all(INBOX_BYTES / 2 < float(limit) < INBOX_BYTES for limit in limits), "before the daemon stops reading"


@browser
def test_dashboard_is_the_generated_one_and_follows_the_schema_of_grafana() -> None:
    """Grafana's own library drops fields that it does not know."""
    from grafana_foundation_sdk.cog.encoder import JSONEncoder  # noqa: PLC0415 - only the extra `docs` installs it
    from grafana_foundation_sdk.cog.plugins import register_default_plugins  # noqa: PLC0415
    from grafana_foundation_sdk.models.dashboard import Dashboard  # noqa: PLC0415

    from docs.dashboard import dashboard_json  # noqa: PLC0415

    assert DASHBOARD.read_text() == dashboard_json(), "run `make docs`"
    register_default_plugins()
    read = Dashboard.from_json(json.loads(DASHBOARD.read_text()))
    assert json.loads(json.dumps(read, cls=JSONEncoder)) == MODEL


def promtool(*arguments: str | Path) -> None:
    result = subprocess.run(["promtool", *arguments], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


@browser
@needs_promtool
def test_prometheus_accepts_the_files() -> None:
    promtool("check", "rules", RULES)
    promtool("check", "config", PROJECT / "config/prometheus/prometheus.yml")


@browser
@needs_promtool
@pytest.mark.timeout(600)
@pytest.mark.parametrize("file", INCIDENTS, ids=lambda file: file.stem)
def test_alerts_ring_as_the_file_says(file: Path) -> None:
    promtool("test", "rules", file)


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


@browser
@needs_prometheus
@pytest.mark.timeout(400)
async def test_every_panel_shows_data_of_a_run_with_faults(database: str, tmp_path: Path) -> None:
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
        assert {name: rule["health"] for name, rule in rules.items()} == dict.fromkeys(alert_rules(), "ok")
        assert rules["EventsNotConserved"]["state"] == "inactive"
        await asyncio.to_thread(draw, prometheus.url, tmp_path / "dashboard.png", Span(began, time()))
    assert (tmp_path / "dashboard.png").stat().st_size > 10_000
