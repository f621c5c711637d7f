"""The alert rules: Prometheus accepts them, incidents make them fire, and each has a section in the runbook."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from indexer.daemon import INBOX_BYTES
from tests.docs.test_references import anchors
from tests.monitoring.metric_names import unknown_names
from tests.monitoring.prometheus_programs import needs_promtool
from tests.yaml_files import read_yaml

ROOT = Path(__file__).parents[2]
RULES = ROOT / "config" / "prometheus" / "alerts.yml"
CONFIGURATION = ROOT / "config" / "prometheus" / "prometheus.yml"
TESTS = sorted((ROOT / "tests" / "prometheus").glob("*.yml"))
GROUPS = [group for file in TESTS for group in read_yaml(file)["tests"]]
RUNBOOK = ROOT / "docs" / "runbook.md"
SEVERITIES = {"critical", "warning", "info"}


def alert_rules() -> dict[str, dict[str, Any]]:
    groups = read_yaml(RULES)["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"]}


ALERTS = alert_rules()


def promtool(*arguments: str | Path) -> tuple[int, str]:
    result = subprocess.run(["promtool", *arguments], capture_output=True, text=True, check=False)
    return result.returncode, result.stdout + result.stderr


@needs_promtool
@pytest.mark.parametrize("command", [("rules", RULES), ("config", CONFIGURATION)], ids=lambda command: command[0])
def test_prometheus_accepts_the_files(command: tuple[str, Path]) -> None:
    code, output = promtool("check", *command)
    assert code == 0, output


@needs_promtool
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("file", TESTS, ids=lambda file: file.stem)
def test_alerts_ring_as_the_file_says(file: Path) -> None:
    code, output = promtool("test", "rules", file)
    assert code == 0, output


def test_every_alert_is_rung_by_a_test() -> None:
    cases = [case for group in GROUPS for case in group.get("alert_rule_test", [])]
    assert {case["alertname"] for case in cases if case.get("exp_alerts")} == ALERTS.keys()


@pytest.mark.parametrize(
    ("incident", "alerts"),
    [
        ("44 events per second and every check green", {"ThroughputCollapsed"}),
        ("a feed dead for three weeks", {"RelayDisconnected", "DaemonNotReady", "CursorNearRetention"}),
        ("a socket without data", {"StreamStalled"}),
    ],
)
def test_incident_of_the_field_is_replayed_and_rings(incident: str, alerts: set[str]) -> None:
    [replay] = [group for group in GROUPS if group["name"] == incident]
    assert {case["alertname"] for case in replay["alert_rule_test"] if case.get("exp_alerts")} == alerts


@pytest.mark.parametrize("name", ALERTS)
def test_section_of_the_alert_says_what_it_means_who_notices_where_to_look_and_what_to_do(name: str) -> None:
    section = re.search(rf"^### {name}\n(.*?)(?=^##)", RUNBOOK.read_text(), re.MULTILINE | re.DOTALL)
    assert section
    assert re.findall(r"^- \*\*(.+?):\*\*", section[1], re.MULTILINE) == ["Means", "Users notice", "Look at", "Do"]
    severity = ALERTS[name]["labels"]["severity"]
    assert re.search(rf"\b{severity}\b", section[1].partition("**Users notice")[0], re.IGNORECASE), severity


@pytest.mark.parametrize("name", ALERTS)
def test_alert_has_a_severity_a_sentence_with_the_value_and_a_section_in_the_runbook(name: str) -> None:
    rule = ALERTS[name]
    assert rule["labels"].keys() == {"severity"}
    assert rule["labels"]["severity"] in SEVERITIES
    summary = rule["annotations"]["summary"]
    assert "$value" in summary
    assert summary.endswith(".")
    page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
    assert page == "docs/runbook.md"
    assert anchor == name.lower()
    assert anchor in anchors(ROOT / page)


def test_rules_call_a_queue_full_before_the_daemon_stops_reading() -> None:
    limits = {float(limit) for limit in re.findall(r"indexer_queue_bytes(?:\[\w+\]\))? > ([\d.e]+)", RULES.read_text())}
    assert len(limits) == 1
    assert INBOX_BYTES / 2 < limits.pop() < INBOX_BYTES


@pytest.mark.parametrize("name", ALERTS)
def test_alert_uses_only_metrics_and_labels_that_exist(name: str) -> None:
    assert unknown_names(ALERTS[name]["expr"]) == []
