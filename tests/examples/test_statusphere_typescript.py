"""The example AppView in TypeScript shows the truth of the network, also after it and the indexer were killed."""

import os
import subprocess
from pathlib import Path

import httpx
import pytest

from tests.examples.statusphere import ROOT, Page, RunningExample, running_example
from tests.realnet.real_network import NODE

EXAMPLE = ROOT / "examples" / "statusphere-typescript"
INSTALLED = EXAMPLE / "node_modules" / ".installed"

pytestmark = [
    pytest.mark.proof("clients"),
    pytest.mark.skipif(
        not INSTALLED.exists() or not NODE.exists(),
        reason="the packages of the example are not installed: run tests/feed_clients/setup.sh",
    ),
]


@pytest.mark.timeout(600)
async def test_typescript_appview_loses_nothing_when_it_or_the_indexer_is_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", f"{NODE.parent}{os.pathsep}{os.environ['PATH']}")
    async with running_example("statusphere-typescript") as example:
        page = await example.until_equal(example.get_page)
        for name in ("appview", "indexer", "appview", "indexer"):
            await example.kill(name)
            page = await example.until_equal(example.get_page)
        assert len(page["statuses"]) >= 4
        assert {"🎉", "🧪"} <= {row["status"] for row in page["counts"]}
        await assert_html(example, page)
        problems = [line for line in example.lines if line.startswith("feed: ")]
        assert [line for line in problems if not line.startswith("feed: no connection (")] == []
        processes = [example.process_of(name) for name in ("appview", "indexer")]
    assert [process for process in processes if Path(f"/proc/{process}").exists()] == []


async def assert_html(example: RunningExample, page: Page) -> None:
    async with httpx.AsyncClient() as http:
        html = (await http.get(example.appview_url)).text
        assert all(row["handle"] in html and row["status"] in html for row in page["statuses"])
        assert (await http.get(f"{example.appview_url}/nothing")).status_code == 404
        assert (await http.post(example.appview_url)).status_code == 405


def test_typescript_example_compiles_strictly() -> None:
    compiler = EXAMPLE / "node_modules" / "typescript" / "bin" / "tsc"
    result = subprocess.run([NODE, compiler, "--project", EXAMPLE], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, "")
