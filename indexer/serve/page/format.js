// Format numbers for people. Every function takes null for "not known" and returns a dash.

const NONE = "–";
const SPACE = "\u00a0"; // keeps a number and its unit on one line
const UNITS = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];

const known = (format) => (value) => (value === null || value === undefined ? NONE : format(value));
const digits = (value, fraction) => value.toLocaleString("en", { maximumFractionDigits: fraction });

export const whole = known((value) => digits(value, 0));

/** 1 worker, 2 workers. */
export const plural = (value, noun) => `${whole(value)} ${noun}${value === 1 ? "" : "s"}`;

export const text = known((value) => (value === "" ? NONE : String(value)));

/** 9,999 or 12.3 k, 1.2 M, 45 G. */
export const count = known((value) => {
  if (value < 10000) return digits(value, 0);
  const [size, unit] = [[1e9, "G"], [1e6, "M"], [1e3, "k"]].find(([least]) => value >= least);
  return `${digits(value / size, value / size < 100 ? 1 : 0)}${SPACE}${unit}`;
});

/** 512 B, 12.3 MB. */
export const bytes = known((value) => {
  const [size, unit] = [[1e9, "GB"], [1e6, "MB"], [1e3, "kB"]].find(([least]) => value >= least) ?? [1, "B"];
  return `${digits(value / size, value / size < 100 ? 1 : 0)}${SPACE}${unit}`;
});

/** 0.02 s, 4.5 s, 42 s, then the two largest units: 3 min 5 s, 2 d 3 h. */
export const duration = known((seconds) => {
  if (seconds < 10) return `${digits(seconds, seconds < 1 ? 2 : 1)}${SPACE}s`;
  let rest = Math.round(seconds);
  const parts = [];
  for (const [size, unit] of UNITS) {
    if (rest >= size) parts.push(`${Math.floor(rest / size)}${SPACE}${unit}`);
    rest %= size;
  }
  return parts.slice(0, 2).join(" ");
});

/** just now, 3 s ago, 3 min ago, 2 h ago: the largest unit is enough. */
export const ago = known((seconds) => {
  if (seconds < 1) return "just now";
  const [size, unit] = UNITS.find(([least]) => seconds >= least);
  return `${Math.floor(seconds / size)}${SPACE}${unit} ago`;
});

/** 0.2/s, 34/s, 1.2 k/s. */
export const rate = known((perSecond) =>
  `${perSecond < 100 ? digits(perSecond, perSecond < 1 ? 2 : 1) : count(Math.round(perSecond))}/s`);

/** 98.4 %. It is 100 % only if nothing is left. */
export const percent = known((share) => (share === 1 ? `100${SPACE}%` : `${(Math.floor(share * 1000) / 10).toFixed(1)}${SPACE}%`));

export const clock = (date) => date.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });
