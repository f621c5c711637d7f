"""Read the deployment files of the repository."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from indexer.settings import OTHER_VARIABLES, Settings, variable
from tests.yaml_files import read_yaml

ROOT = Path(__file__).parents[2]
KUBERNETES = ROOT / "deploy/kubernetes"
SETUP = "run tests/deploy/setup.sh"
VARIABLES = OTHER_VARIABLES | set(map(variable, Settings.model_fields))


def dockerfile() -> str:
    """Return the Dockerfile, with continued lines joined."""
    return (ROOT / "Dockerfile").read_text().replace("\\\n", " ")


def instruction(name: str) -> str:
    """Return the argument of the last instruction of the Dockerfile with this name."""
    return str(re.findall(rf"^{name} +(.+)$", dockerfile(), re.MULTILINE)[-1]).strip()


def image_environment() -> dict[str, str]:
    return dict(word.split("=", 1) for word in instruction("ENV").split())


def compose(name: str) -> dict[str, Any]:
    """Return a Compose file with its merge keys resolved, and without the interpolation of variables."""
    return read_yaml(ROOT / name)


def manifests() -> dict[str, dict[str, Any]]:
    """Return the Kubernetes objects that the kustomization lists, by kind."""
    kustomization = read_yaml(KUBERNETES / "kustomization.yaml")
    found = [read_yaml(KUBERNETES / name) for name in kustomization["resources"]]
    assert len({item["kind"] for item in found}) == len(found)
    return {item["kind"]: item for item in found}


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
