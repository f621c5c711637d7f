"""Find metrics, labels and label values in PromQL that this program does not have."""

import re
from collections.abc import Iterator
from functools import cache

from indexer.telemetry.metrics import Metrics

METRIC = re.compile(r"\b(indexer_\w+|process_\w+)\b(?:\{([^}]*)\})?")
MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"')
TARGET_LABELS = frozenset({"job", "instance"})
"""Labels that Prometheus adds."""
BUCKET_LABEL = "le"
SUFFIXES = ("_bucket", "_sum", "_count")


def unknown_names(expression: str) -> list[str]:
    """Return a sentence for each metric, label and label value in `expression` that does not exist."""
    values, definitions = _label_values(), Metrics().definitions
    problems = []
    for name, selector in METRIC.findall(expression):
        family = next((name.removesuffix(suffix) for suffix in SUFFIXES if name.endswith(suffix)), name)
        if name not in values and family not in definitions and name not in definitions:
            problems.append(f"{name}: no such metric")
            continue
        labels = set(definitions[family].labels) if family in definitions else set[str]()
        for label, operator, value in MATCHER.findall(selector):
            if label in TARGET_LABELS or (label == BUCKET_LABEL and name.endswith("_bucket")):
                continue
            if label not in labels:
                problems.append(f"{name}: no label {label}")
            known = values.get(name, {}).get(label, set())
            problems += [
                f"{name}: no {label} {wanted}"
                for wanted in _wanted(operator, value)
                if known and not any(re.fullmatch(wanted, item) for item in known)
            ]
    return problems


def _wanted(operator: str, value: str) -> Iterator[str]:
    """Yield the alternatives of a matcher, as regular expressions."""
    yield from value.split("|") if operator in {"=~", "!~"} else [re.escape(value)]


@cache
def _label_values() -> dict[str, dict[str, set[str]]]:
    """Return the values of each label that exist from the start: those of closed sets."""
    found: dict[str, dict[str, set[str]]] = {}
    for family in Metrics().registry.collect():
        for sample in family.samples:
            labels = found.setdefault(sample.name, {})
            for label, value in sample.labels.items():
                labels.setdefault(label, set()).add(value)
    return found
