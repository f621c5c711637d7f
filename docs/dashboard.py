"""The Grafana dashboard: `make docs` writes it to config/grafana/dashboards/indexer.json.

Change docs/dashboard_panels.py, not the JSON. Grafana's own library makes the JSON from it, so it follows Grafana's
schema.
"""

import json
from itertools import count
from typing import TypeAlias

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, table, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import (
    BigValueColorMode,
    BigValueGraphMode,
    GraphThresholdsStyleMode,
    LegendDisplayMode,
    LegendPlacement,
    SortOrder,
    StackingMode,
    TooltipDisplayMode,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DataSourceRef,
    DataTransformerConfig,
    Threshold,
    VariableOption,
    VariableRefresh,
)
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from docs.dashboard_panels import ROWS, Panel

TITLE = "AT Protocol indexer"
SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
SELECTOR = 'job="indexer", instance=~"$instance"'
WIDTH = 24
"""Columns of Grafana's grid."""
STAT_HEIGHT, HEIGHT = 4, 8


def dashboard_json() -> str:
    """Return the text of config/grafana/dashboards/indexer.json."""
    builder = (
        dashboard.Dashboard(TITLE)
        .uid("atproto-indexer")
        .description("The stream, resyncs, hosts, identities, database and consumers of the indexer.")
        .tags(["atproto", "indexer"])
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .refresh("30s")
        .time("now-1h", "now")
        .timezone("browser")
        .editable()
        .with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
        .with_variable(
            dashboard.QueryVariable("instance")
            .label("Process")
            .datasource(SOURCE)
            .query("label_values(indexer_build_info, instance)")
            .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
            .multi(multi=True)
            .include_all(include_all=True)
            .all_value(".*")
            .current(VariableOption(selected=True, text="All", value="$__all"))
        )
    )
    numbers = count(1)
    for title, panels in ROWS.items():
        builder = builder.with_row(dashboard.Row(title).id(next(numbers)))
        for panel in panels:
            builder = builder.with_panel(_build(panel).id(next(numbers)))
    return json.dumps(builder.build(), cls=JSONEncoder, indent=2, sort_keys=True) + "\n"


AnyPanel: TypeAlias = timeseries.Panel | stat.Panel | table.Panel


def _build(panel: Panel) -> AnyPanel:
    builder = _lines(panel) if panel.kind in {"lines", "stacked"} else _stat() if panel.kind == "stat" else _table()
    height = STAT_HEIGHT if panel.kind == "stat" else HEIGHT
    builder = builder.title(panel.title).description(panel.description).unit(panel.unit).datasource(SOURCE)
    builder = builder.span(panel.width).height(height)
    if panel.decimals is not None:
        builder = builder.decimals(panel.decimals)
    if panel.steps:
        below = Threshold(value=None, color="green" if panel.steps[0][0] else "red")
        steps = [below, *[Threshold(value=value, color=color) for value, color in panel.steps]]
        builder = builder.thresholds(dashboard.ThresholdsConfig().steps(steps))
    for letter, (legend, expression) in zip("ABCDEFG", panel.queries, strict=False):
        query = prometheus.Dataquery().expr(expression.replace("@", SELECTOR)).legend_format(legend).ref_id(letter)
        query = query.instant().format(PromQueryFormat.TABLE) if panel.kind == "table" else query.range()
        builder = builder.with_target(query)
    return builder


def _lines(panel: Panel) -> timeseries.Panel:
    builder = (
        timeseries.Panel()
        .min(0)
        .line_width(1)
        .fill_opacity(25 if panel.kind == "stacked" else 5)
        .legend(
            common.VizLegendOptions()
            .show_legend(show_legend=True)
            .display_mode(LegendDisplayMode.LIST)
            .placement(LegendPlacement.BOTTOM)
        )
        .tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI).sort(SortOrder.DESCENDING))
    )
    if panel.kind == "stacked":
        builder = builder.stacking(common.StackingConfig().mode(StackingMode.NORMAL))
    if panel.steps:
        builder = builder.thresholds_style(common.GraphThresholdsStyleConfig().mode(GraphThresholdsStyleMode.DASHED))
    return builder


def _stat() -> stat.Panel:
    return (
        stat.Panel()
        .graph_mode(BigValueGraphMode.AREA)
        .color_mode(BigValueColorMode.VALUE)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).values(values=False))
        .no_value("-")
    )


def _table() -> table.Panel:
    names = {"host": "Host", "Value": "Failed requests"}
    return (
        table.Panel()
        .no_value("none")
        .filterable(filterable=False)
        .with_transformation(
            DataTransformerConfig(
                id_val="organize", options={"excludeByName": {"Time": True}, "indexByName": {}, "renameByName": names}
            )
        )
    )
