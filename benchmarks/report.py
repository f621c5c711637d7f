"""Print the results of a benchmark as tables or JSON, and show progress."""

import platform
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeVar

import orjson
from rich.console import Console
from rich.progress import track
from rich.table import Table

import indexer
from indexer.app.clients import core_of
from indexer.app.settings import DEMO_SETTINGS, load_from_environment

T = TypeVar("T")

Figures = dict[str, float | str]
"""By name, which contains the unit."""

Report = dict[str, Figures]
"""By section."""

MICRO, MIB = 1_000_000, 1 << 20

TABLE_WIDTH = 72
"""Columns of a table with one figure in each row."""


def cpu_of(part: str, unit: str) -> str:
    """Return the name of a figure of CPU time."""
    return f"{part} CPU, µs per {unit}"


def machine() -> Figures:
    """Return the CPU, its cores, the build of Python, the version of the indexer, and the core that it uses."""
    cpu = next(
        (line.partition(": ")[2] for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.machine(),
    )
    cores = Path("/proc/cpuinfo").read_text().count("processor\t:")
    core = core_of(load_from_environment(*DEMO_SETTINGS))  # as the daemons, which get the same environment
    return {
        "cpu": cpu,
        "cores": cores,
        "python": f"{platform.python_version()}, {platform.python_compiler()}",
        "indexer": indexer.__version__,
        "core": core.name,
        "core threads": core.threads,
    }


def costs(unit: str, seconds: Mapping[str, float], count: int) -> Figures:
    """Return the µs per unit of each stage and in total, for `count` units."""
    figures = {stage: value / count * MICRO for stage, value in seconds.items()}
    return {f"{stage}, µs per {unit}": value for stage, value in (figures | {"total": sum(figures.values())}).items()}


def generation_progress(items: Iterable[T], count: int) -> Iterable[T]:
    """Yield `items` and show a progress bar on stderr."""
    return track(items, "Generating the workload, once", count, console=Console(stderr=True))


def show(report: Report, *, as_json: bool) -> None:
    """Print a report."""
    if as_json:
        Console().print_json(orjson.dumps(report).decode())
        return
    console = console_of(TABLE_WIDTH)
    for section, figures in report.items():
        table = Table(title=section, title_justify="left", show_header=False, width=TABLE_WIDTH)
        table.add_column(no_wrap=True)
        table.add_column(justify="right", overflow="fold", ratio=1)
        for name, value in figures.items():
            table.add_row(name, number(value))
        console.print(table)


def console_of(width: int) -> Console:
    """Return a console for tables of this width. Without a terminal, rich would cut them at 80 columns."""
    return Console(width=max(width, Console().width))


def number(value: float | str) -> str:
    """Return a figure with three digits or more, and text as it is."""
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if value == int(value) or abs(value) >= 100 else f"{value:.3g}"  # noqa: PLR2004
