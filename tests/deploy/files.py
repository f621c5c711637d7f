"""Read the deployment files of the repository."""

import re
from collections.abc import Iterator
from typing import Any

from tests.source_code import PROJECT
from tests.yaml_files import read_yaml

KUBERNETES = PROJECT / "deploy/kubernetes"
SYSTEMD = PROJECT / "deploy/systemd"
UNIT = SYSTEMD / "indexer.service"
BASE, DEMO, CITUS = COMPOSE_FILES = "docker-compose.yml", "docker-compose.demo.yml", "docker-compose.citus.yml"


def instruction(name: str) -> str:
    """Return the argument of the last instruction of the Dockerfile with this name."""
    text = (PROJECT / "Dockerfile").read_text().replace("\\\n", " ")
    return str(re.findall(rf"^{name} +(.+)$", text, re.MULTILINE)[-1]).strip()


def services(name: str) -> dict[str, Any]:
    """Return the services of a Compose file with merge keys resolved, and without the interpolation of variables."""
    found: dict[str, Any] = read_yaml(PROJECT / name)["services"]
    return found


def manifests() -> dict[str, dict[str, Any]]:
    """Return the Kubernetes objects that the kustomization lists, by kind."""
    found = [read_yaml(KUBERNETES / name) for name in read_yaml(KUBERNETES / "kustomization.yaml")["resources"]]
    assert len({item["kind"] for item in found}) == len(found)
    return {item["kind"]: item for item in found}


def entry(key: str) -> str:
    """Return the value of a key of the systemd unit, which has it once."""
    (value,) = re.findall(rf"^{key}=(.*)$", UNIT.read_text(), re.MULTILINE)
    return str(value)


def seconds(text: str) -> float:
    """Return a duration of Compose or systemd in seconds."""
    match = re.fullmatch(r"(\d+)(s|m|min)?", text)
    assert match is not None, text
    return int(match[1]) * (60 if match[2] in {"m", "min"} else 1)


def indexer_variables(value: Any) -> Iterator[str]:
    """Yield the INDEXER_ variables that a structure names, as keys or as names of entries."""
    if isinstance(value, dict):
        for key, item in value.items():
            if str(key).startswith("INDEXER_"):
                yield key
            yield from indexer_variables(item)
    elif isinstance(value, list):
        for item in value:
            yield from indexer_variables(item)
    elif isinstance(value, str) and value.startswith("INDEXER_"):
        yield value.partition("=")[0]
