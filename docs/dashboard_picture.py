"""Draw the panels of the Grafana dashboard from the answers of a Prometheus server, as a PNG.

    python -m docs.dashboard_picture http://127.0.0.1:9090 dashboard.png --minutes 60

It reads config/grafana/dashboards/indexer.json, and draws titles, units, thresholds and the layout as Grafana does. It
needs no Grafana, and serves for pictures in documents and for a look at a server without one.
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from io import BytesIO
from pathlib import Path
from time import time
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode
from urllib.request import urlopen

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DASHBOARD = Path(__file__).parents[1] / "config" / "grafana" / "dashboards" / "indexer.json"
MAX_POINTS = 240
RATE_INTERVAL_SECONDS = 15
"""The shortest interval of rates; Grafana also takes at least four scrape intervals."""
COLUMNS = 24
COLUMN_INCHES, ROW_INCHES = 0.58, 0.36
HEADER_ROWS = 0.8
"""Height of a panel's title, in rows of the grid."""
DOTS_PER_INCH = 90
PNG_COLOURS = 192
"""Colours of the picture: a fifth of the bytes that all of them take."""
PAGE, BOX, TEXT, FAINT = "#111217", "#1b1e23", "#d8d9e0", "#7b7f89"
COLOURS = ("#73bf69", "#f2cc0c", "#5794f2", "#ff9830", "#f2495c", "#b877d9", "#8ab8ff", "#37872d", "#e0b400", "#c4162a")
NAMED = {"green": "#73bf69", "orange": "#ff9830", "red": "#f2495c"}
MAX_LISTED = 6
"""Rows of a table, and names in a legend."""


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a panel: its name, and its points as Unix seconds and values. NaN is left out."""

    name: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Span:
    """The time that is drawn, in Unix seconds."""

    start: float
    end: float

    @property
    def step(self) -> float:
        """Seconds between two points."""
        return max(1.0, math.ceil((self.end - self.start) / MAX_POINTS))

    def concrete(self, expression: str) -> str:
        """Return a query of the dashboard with values instead of Grafana's variables."""
        rate = max(RATE_INTERVAL_SECONDS, 4 * self.step)
        for name, value in (
            ("$__rate_interval", f"{rate:.0f}s"),
            ("$__range", f"{math.ceil(self.end - self.start)}s"),
            ("$instance", ".*"),
        ):
            expression = expression.replace(name, value)
        return expression


def panels_of(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the panels of a dashboard, without its rows."""
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def answer(url: str, panel: dict[str, Any], span: Span) -> list[Series]:
    """Ask Prometheus for the series of a panel."""
    found = []
    for target in panel["targets"]:
        query = {"query": span.concrete(target["expr"]), "start": span.start, "end": span.end, "step": span.step}
        with urlopen(f"{url}/api/v1/query_range?{urlencode(query)}", timeout=30) as response:  # noqa: S310 - http
            result = json.load(response)["data"]["result"]
        for series in result:
            values = [(float(at), float(text)) for at, text in series["values"]]
            points = tuple((at, value) for at, value in values if math.isfinite(value))
            found.append(Series(_legend(target["legendFormat"], series["metric"]), points))
    return found


def draw(url: str, path: Path, span: Span, *, rows: int | None = None) -> None:
    """Draw the dashboard into `path`; `rows` limits it to its first rows of panels."""
    # Most tests that import this module draw nothing, and loading matplotlib takes most of a second.
    import matplotlib as mpl  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415
    from PIL import Image  # noqa: PLC0415

    panels = _first_rows(json.loads(DASHBOARD.read_text())["panels"], rows)
    height = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels)
    with mpl.rc_context({"text.color": TEXT, "axes.edgecolor": FAINT, "font.size": 8, "font.family": "DejaVu Sans"}):
        figure = Figure(figsize=(COLUMNS * COLUMN_INCHES, height * ROW_INCHES), facecolor=PAGE, dpi=DOTS_PER_INCH)
        page = _Page(figure, height)
        for panel in panels:
            if panel["type"] == "row":
                page.title(panel)
            else:
                _draw_panel(page.box(panel), panel, answer(url, panel, span), span)
        pixels = BytesIO()
        figure.savefig(pixels, facecolor=PAGE, format="png")
    Image.open(pixels).convert("RGB").quantize(PNG_COLOURS).save(path, format="PNG", optimize=True)


def _first_rows(panels: list[dict[str, Any]], rows: int | None) -> list[dict[str, Any]]:
    starts = [number for number, panel in enumerate(panels) if panel["type"] == "row"]
    return panels if rows is None or rows >= len(starts) else panels[: starts[rows]]


class _Page:
    """Places panels on the figure: Grafana counts rows from the top, matplotlib from the bottom."""

    def __init__(self, figure: "Figure", rows: int) -> None:
        self._figure = figure
        self._rows = rows

    def _place(self, x: float, y: float, width: float, height: float) -> tuple[float, float, float, float]:
        return x / COLUMNS, 1 - (y + height) / self._rows, width / COLUMNS, height / self._rows

    def title(self, row: dict[str, Any]) -> None:
        left, bottom, _, height = self._place(0.15, row["gridPos"]["y"], COLUMNS, 1)
        self._figure.text(left, bottom + height * 0.3, f"▾ {row['title']}", fontsize=11, weight="bold")

    def box(self, panel: dict[str, Any]) -> "Axes":
        """Draw the background and the title of a panel; return its empty axes."""
        grid = panel["gridPos"]
        background = self._figure.add_axes(
            self._place(grid["x"] + 0.07, grid["y"] + 0.07, grid["w"] - 0.14, grid["h"] - 0.14), facecolor=BOX
        )
        background.set(xticks=[], yticks=[])
        background.spines[:].set_visible(False)
        left, bottom, _, height = self._place(grid["x"] + 0.25, grid["y"], grid["w"], HEADER_ROWS)
        self._figure.text(left, bottom + height * 0.2, panel["title"], fontsize=8.5)
        is_chart = panel["type"] == "timeseries"
        margins = (1.25, 1.7) if is_chart else (0.3, 0.4)
        return self._figure.add_axes(
            self._place(
                grid["x"] + margins[0], grid["y"] + HEADER_ROWS + 0.15,
                grid["w"] - margins[0] - 0.4, grid["h"] - HEADER_ROWS - margins[1],
            ),
            facecolor=BOX,
        )  # fmt: skip


def _draw_panel(axes: "Axes", panel: dict[str, Any], series: Sequence[Series], span: Span) -> None:
    axes.spines[:].set_visible(False)
    unit, steps = panel["fieldConfig"]["defaults"]["unit"], _steps(panel)
    known = [line for line in series if line.points]
    if not known and panel["type"] != "timeseries":
        axes.set(xticks=[], yticks=[])
        axes.text(0.5, 0.5, "no data", ha="center", va="center", color=FAINT, transform=axes.transAxes)
    elif panel["type"] == "stat":
        _draw_stat(axes, known, unit, steps, is_whole=panel["fieldConfig"]["defaults"].get("decimals") == 0)
    elif panel["type"] == "table":
        _draw_table(axes, known, unit)
    else:
        is_stacked = panel["fieldConfig"]["defaults"]["custom"].get("stacking", {}).get("mode") == "normal"
        _draw_lines(axes, known, unit, steps, span, is_stacked=is_stacked)


def _draw_stat(
    axes: "Axes", series: Sequence[Series], unit: str, steps: Sequence[tuple[float, str]], *, is_whole: bool
) -> None:
    """Draw the last values as text, and their history behind it."""
    values = [round(line.points[-1][1]) if is_whole else line.points[-1][1] for line in series]
    colour = NAMED[next((name for value, name in reversed(steps) if values[0] >= value), "green")]
    axes.plot([at for at, _ in series[0].points], [value for _, value in series[0].points], color=colour, alpha=0.25)
    axes.set(xticks=[], yticks=[])
    text = " of ".join(_humanize(value, unit) for value in values)
    axes.text(0.5, 0.5, text, ha="center", va="center", color=colour, fontsize=17, transform=axes.transAxes)


def _draw_table(axes: "Axes", series: Sequence[Series], unit: str) -> None:
    axes.set(xticks=[], yticks=[], xlim=(0, 1), ylim=(MAX_LISTED, 0))
    ordered = sorted(series, key=lambda line: -line.points[-1][1])[:MAX_LISTED]
    for number, line in enumerate(ordered):
        axes.text(0, number + 0.5, line.name, fontsize=8, va="center")
        axes.text(1, number + 0.5, _humanize(line.points[-1][1], unit), fontsize=8, va="center", ha="right")


def _draw_lines(
    axes: "Axes",
    series: Sequence[Series],
    unit: str,
    steps: Sequence[tuple[float, str]],
    span: Span,
    *,
    is_stacked: bool,
) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator, MultipleLocator  # noqa: PLC0415 - as in `draw`

    times = [span.start + number * span.step for number in range(int((span.end - span.start) / span.step) + 1)]
    ordered = sorted(series, key=lambda line: -max(value for _, value in line.points))
    scraped = {round(at) for line in series for at, _ in line.points}
    base = [0.0 if round(at) in scraped else math.nan for at in times]  # a line breaks where no scrape succeeded
    highest = 0.0
    for number, line in enumerate(ordered):
        by_time = {round(at): value for at, value in line.points}
        values = [by_time.get(round(at), math.nan) for at in times]
        colour = COLOURS[number % len(COLOURS)]
        top = [low + (0 if math.isnan(value) else value) for low, value in zip(base, values, strict=True)]
        if is_stacked:
            axes.fill_between(times, base, top, color=colour, alpha=0.35, linewidth=0)
        shown = top if is_stacked else values
        axes.plot(times, shown, color=colour, linewidth=1, label=line.name if number < MAX_LISTED else None)
        base = top if is_stacked else base
        highest = max([highest, *[value for value in shown if value > 0]])
    highest = 1.1 * highest or 1.0
    for value, name in steps:
        if value <= highest:
            axes.axhline(value, color=NAMED[name], linewidth=0.8, linestyle="--")
    axes.set_xlim(times[0], times[-1])
    axes.set_ylim(0, highest)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda at, _: datetime.fromtimestamp(at, UTC).strftime("%H:%M")))
    axes.xaxis.set_major_locator(MultipleLocator(60 * max(1, math.ceil((span.end - span.start) / 240))))
    factor = _tick_factor(highest, unit)
    ticks = MaxNLocator(4, integer=unit == "short" and highest > 1).tick_values(0, highest / factor)
    axes.set_yticks([factor * tick for tick in ticks if factor * tick <= highest])
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _humanize(value, unit)))
    axes.tick_params(colors=FAINT, labelsize=6.5, length=0)
    axes.grid(color=FAINT, alpha=0.2, linewidth=0.5)
    if ordered:
        axes.legend(
            loc="upper center", bbox_to_anchor=(0.45, -0.12), ncols=min(len(ordered), 4), frameon=False, fontsize=6.5,
            labelcolor=TEXT, handlelength=1, columnspacing=1, handletextpad=0.4, borderaxespad=0,
        )  # fmt: skip


def _steps(panel: dict[str, Any]) -> list[tuple[float, str]]:
    steps = panel["fieldConfig"]["defaults"].get("thresholds", {}).get("steps", [])
    return [(-math.inf if step["value"] is None else step["value"], step["color"]) for step in steps]


def _legend(template: str, labels: dict[str, str]) -> str:
    """Return a legend with the values of its labels; Grafana shows all labels if there is no legend."""
    for name, value in labels.items():
        template = template.replace("{{" + name + "}}", value)
    return template or ", ".join(labels.values())


def _humanize(value: float, unit: str) -> str:
    if unit == "percentunit":
        return f"{value:.0%}" if value in {0, 1} else f"{value:.1%}"
    if unit == "s":
        return _duration(value)
    base, suffix = (1_024, "iB") if unit == "bytes" else (1_000, "")
    scales = ["", "K" if unit == "bytes" else "k", "M", "G", "T"]
    while abs(value) >= base and len(scales) > 1:
        value /= base
        scales.pop(0)
    number = f"{value:.0f}" if value == round(value) or value >= 100 else f"{value:.3g}"  # noqa: PLR2004 - three digits
    end = f"{scales[0]}{suffix if scales[0] else 'B' if unit == 'bytes' else ''}"
    return f"{number}{' ' if unit == 'bytes' else ''}{end}{'/s' if unit in {'reqps', 'ops', 'wps'} else ''}"


def _tick_factor(highest: float, unit: str) -> float:
    """Return the factor of the unit in which the ticks of an axis are round numbers."""
    factors = {"bytes": [1_024.0**power for power in range(5)], "s": [0.001, 1.0, 60.0, 3_600.0, 86_400.0]}
    return max([factor for factor in factors.get(unit, []) if factor <= highest], default=1.0)


def _duration(seconds: float) -> str:
    for size, name in ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s")):
        if abs(seconds) >= size:
            return f"{seconds / size:.3g} {name}"
    return f"{seconds * 1_000:.3g} ms" if seconds else "0 s"


def main() -> int:
    """Draw the dashboard of a running Prometheus; return the exit code."""
    parser = argparse.ArgumentParser(description="Draw the Grafana dashboard from the answers of a Prometheus server.")
    parser.add_argument("url", help="URL of Prometheus")
    parser.add_argument("picture", type=Path, help="PNG to write")
    parser.add_argument("--minutes", type=float, default=60.0, help="time until now that is drawn")
    parser.add_argument("--rows", type=int, help="draw only so many rows of panels")
    arguments = parser.parse_args()
    now = time()
    draw(arguments.url, arguments.picture, Span(now - arguments.minutes * 60, now), rows=arguments.rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
