// The charts of the last hour, drawn by uPlot (global, see uplot/). Colors come from status.css.

import { clock } from "./format.js";

const HEIGHT = 150;
const MIN_SPAN_SECONDS = 300;
const MAX_SPAN_SECONDS = 3600;
const scheme = matchMedia("(prefers-color-scheme: dark)");

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** A chart of one series in a <figure>. `format` turns a value into text; the axis ends at `least` or above. */
export class Chart {
  constructor(figure, format, least) {
    this.figure = figure;
    this.label = figure.querySelector("figcaption span").textContent;
    this.output = figure.querySelector("output");
    this.container = figure.querySelector(".plot");
    this.format = format;
    this.least = least;
    this.data = [[], []];
    this.now = 0;
    this.plot = null;
    this.container.setAttribute("role", "img");
    scheme.addEventListener("change", () => this.rebuild());
    new ResizeObserver(() => this.plot?.setSize({ width: this.width(), height: HEIGHT })).observe(this.container);
  }

  /** Show these values; `now` is the right end of the time axis. */
  show(times, values, now) {
    this.data = [times, values];
    this.now = now;
    if (this.plot === null) this.rebuild();
    else this.plot.setData(this.data);
    this.describe();
  }

  width() {
    return Math.max(120, Math.floor(this.container.clientWidth));
  }

  rebuild() {
    this.plot?.destroy();
    this.plot = new uPlot(this.options(), this.data, this.container);
  }

  describe() {
    const known = this.data[1].filter((value) => value !== null);
    const latest = this.data[1].at(-1) ?? null;
    const top = known.length ? this.format(Math.max(...known)) : null;
    this.output.textContent = top === null ? "no samples yet" : `now ${this.format(latest)}, highest ${top}`;
    this.container.setAttribute("aria-label", `Chart of the last hour. ${this.label}: ${this.output.textContent}`);
  }

  /** Show the value under the pointer, or the newest one. */
  point(index) {
    if (index === null || index === undefined) this.describe();
    else this.output.textContent = `${this.format(this.data[1][index])} at ${clock(new Date(this.data[0][index] * 1000))}`;
  }

  options() {
    const muted = color("--muted"), grid = { stroke: color("--grid"), width: 1 }, font = "12px system-ui, sans-serif";
    const axis = { stroke: muted, font, ticks: { show: false } };
    return {
      width: this.width(),
      height: HEIGHT,
      padding: [8, 22, 0, 0], // the last label of the time axis is centered on the right end
      legend: { show: false },
      cursor: { y: false, drag: { x: false, y: false } },
      scales: {
        x: { range: () => [Math.max(this.now - MAX_SPAN_SECONDS, Math.min(this.data[0][0] ?? this.now, this.now - MIN_SPAN_SECONDS)), this.now] },
        y: { range: (_, __, highest) => [0, Math.max(this.least, (highest ?? 0) * 1.15)] },
      },
      axes: [
        { ...axis, size: 28, space: 70, grid: { show: false }, values: "{HH}:{mm}", incrs: [60, 120, 300, 600, 900, 1800] },
        { ...axis, size: 58, space: 36, grid, values: (_, splits) => splits.map((value) => this.format(value)) },
      ],
      series: [
        {},
        { stroke: color("--accent"), fill: color("--accent-soft"), width: 1.5, points: { show: (_, __, first, last) => last - first < 2 } },
      ],
      hooks: { setCursor: [(plot) => this.point(plot.cursor.idx)] },
    };
  }
}
