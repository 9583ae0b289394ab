// Charts of the deployment, of a model or of a GPU over 10 minutes, 2 hours or 24 hours. The
// frontend keeps the history; the samples of this page go on from there.

import { age, byId, bytes, clock, fillSelect, make, percent, rate, seconds, setText } from "./dom.js";
import * as events from "./events.js";
import { getJson } from "./server.js";

const RANGES = [
  { name: "10m", label: "10 min", span_s: 600, step_s: 1, tick_s: 120 },
  { name: "2h", label: "2 h", span_s: 7200, step_s: 10, tick_s: 1800 },
  { name: "24h", label: "24 h", span_s: 86400, step_s: 60, tick_s: 14400 },
];
const MISSING_S = 3; // samples come each second
const WIDTH = 300;
const HEIGHT = 64;
const PAGE_STEPS = 10;
const SVG = "http://www.w3.org/2000/svg";

function sum(values) {
  return values.reduce((total, value) => total + value, 0);
}

function largest(values) {
  return values.reduce((most, value) => (value != null && (most == null || value > most) ? value : most), null);
}

function mean(values) {
  const known = values.filter((value) => value != null);
  return known.length ? sum(known) / known.length : null;
}

const whole = (value) => (value == null ? "–" : value.toLocaleString("en-US", { maximumFractionDigits: 1 }));
const figure = (name) => ({ figures }) => (figures.length ? sum(figures.map((one) => one[name] ?? 0)) : null);

// `key` is the name of a figure in the history, `of` reads it from a sample.
const TRAFFIC = [
  {
    title: "Output tokens/s",
    format: rate,
    lines: [{ name: "", key: "output_tokens_per_s", of: figure("output_tokens_per_s") }],
  },
  {
    title: "TTFT",
    format: seconds,
    lines: [
      { name: "p50", key: "ttft_p50_s", of: ({ ttft }) => ttft?.ttft_p50_s },
      { name: "p99", key: "ttft_p99_s", of: ({ ttft }) => ttft?.ttft_p99_s },
    ],
  },
  {
    title: "Requests",
    format: whole,
    lines: [
      { name: "running", key: "in_flight", of: figure("in_flight") },
      { name: "queued", key: "queued", of: figure("queued") },
    ],
  },
  {
    title: "KV use",
    format: percent,
    top: () => 1,
    lines: [
      { name: "mean", key: "kv_mean", of: ({ workers }) => mean(workers.map((one) => one.kv_use)) },
      { name: "max", key: "kv_max", of: ({ workers }) => largest(workers.map((one) => one.kv_use)) },
    ],
  },
];

const GPU = [
  {
    title: "GPU memory",
    format: bytes,
    top: ({ gpu }) => gpu?.total_bytes,
    lines: [{ name: "used", key: "used_bytes", of: ({ gpu }) => gpu?.used_bytes }],
  },
  {
    title: "GPU load",
    format: percent,
    top: () => 1,
    lines: [{ name: "", key: "utilization", of: ({ gpu }) => gpu?.utilization }],
  },
  {
    title: "GPU power",
    format: (value) => (value == null ? "–" : `${Math.round(value)} W`),
    top: ({ gpu }) => gpu?.limit_watts,
    lines: [{ name: "", key: "watts", of: ({ gpu }) => gpu?.watts }],
  },
];

function drawn(tag, attributes) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
}

// The keyboard reaches each value: the plot is a slider over the samples.
class Chart {
  constructor(spec) {
    this.spec = spec;
    this.samples = [];
    this.sample = {}; // the last one, and its values
    this.current = null;
    this.chosen = null; // the time that is pointed at
    this.legend = spec.lines.map((line, index) =>
      make("span", { class: `series s${index}` }, make("span", { class: "dim" }, line.name), make("b")));
    this.scale = make("span", { class: "scale dim" });
    this.ticks = make("div", { class: "ticks dim", "aria-hidden": "true" });
    this.svg = drawn("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" });
    this.grid = drawn("path", { class: "grid" });
    this.area = drawn("path", { class: "area" });
    this.paths = spec.lines.map((_, index) => drawn("path", { class: `line s${index}` }));
    this.cursor = drawn("path", { class: "cursor" });
    this.svg.append(this.grid, this.area, ...this.paths, this.cursor);
    this.plot = make("div", { class: "plot", role: "slider", tabIndex: 0, "aria-label": spec.title, "aria-valuenow": "0" }, this.scale, this.svg);
    this.plot.addEventListener("pointermove", (event) => this.point(event));
    this.plot.addEventListener("pointerleave", () => this.choose(null));
    this.plot.addEventListener("focus", () => this.choose(this.samples.at(-1)?.[0] ?? null));
    this.plot.addEventListener("blur", () => this.choose(null));
    this.plot.addEventListener("keydown", (event) => this.key(event));
    this.time = make("span", { class: "time dim" });
    this.told = make("p", { class: "hidden", id: `chart-${spec.title.replace(/\W+/g, "-")}` });
    this.plot.setAttribute("aria-describedby", this.told.id);
    this.node = make("div", { class: "panel chart" },
      make("div", { class: "chart-head" }, make("h2", {}, spec.title), this.time, make("span", { class: "grow" }), ...this.legend),
      this.plot, this.ticks, this.told);
  }

  load(found) {
    const columns = this.spec.lines.map((line) => found.series[line.key] ?? []);
    const count = Math.max(0, ...Object.values(found.series).map((one) => one.length));
    for (let index = 0; index < count; index += 1) {
      this.samples.push([found.start_s + index * found.step_s, ...columns.map((one) => one[index] ?? null)]);
    }
  }

  point(event) {
    const box = this.svg.getBoundingClientRect();
    const end_s = this.end_s ?? 0;
    this.choose(end_s - this.range.span_s * (1 - (event.clientX - box.left) / box.width));
  }

  key(event) {
    const at = this.chosen === null ? this.samples.length - 1 : this.samples.indexOf(this.shown());
    const to = {
      ArrowLeft: at - 1, ArrowDown: at - 1, ArrowRight: at + 1, ArrowUp: at + 1,
      PageDown: at - PAGE_STEPS, PageUp: at + PAGE_STEPS, Home: 0, End: this.samples.length - 1, Escape: -2,
    }[event.key];
    if (to === undefined || !this.samples.length) return;
    event.preventDefault();
    this.choose(to === -2 ? null : this.samples[Math.min(Math.max(to, 0), this.samples.length - 1)][0]);
  }

  choose(at_s) {
    this.chosen = at_s;
    this.tell();
  }

  shown() {
    return this.chosen === null ? this.current ?? this.samples.at(-1) : nearest(this.samples, this.chosen);
  }

  update(at_s, sample) {
    this.sample = sample;
    this.current = [at_s, ...this.spec.lines.map((line) => line.of(sample) ?? null)];
    this.tell();
  }

  draw(range, end_s) {
    const { samples, spec } = this;
    [this.range, this.end_s] = [range, end_s];
    while (samples.length && samples[0][0] < end_s - range.span_s) samples.shift();
    const columns = spec.lines.map((_, index) => samples.map((one) => one[index + 1]));
    const most = largest(columns.map(largest));
    const top = spec.top?.(this.sample) ?? ceiling(most || 1);
    const x = this.x = (at_s) => WIDTH * (1 - (end_s - at_s) / range.span_s);
    const y = (value) => HEIGHT - 1 - ((HEIGHT - 3) * Math.min(value, top)) / top;
    this.paths.forEach((path, index) => path.setAttribute("d", line(samples, index + 1, x, y)));
    this.area.setAttribute("d", area(samples, x, y));
    this.drawTicks(range, end_s, x);
    setText(this.scale, spec.format(top));
    const span = samples.length ? age(end_s - samples[0][0]) : "";
    const parts = spec.lines.map((one, index) => `${one.name || spec.title}: ${summary(columns[index], spec.format)}`);
    setText(this.told, samples.length ? `The last ${span}. ${parts.join("; ")}.` : "");
    this.tell();
  }

  // The values at the cursor; without one, those of the last sample.
  tell() {
    const { samples, spec } = this;
    const shown = this.shown();
    const texts = spec.lines.map((_, index) => spec.format(shown?.[index + 1]));
    const pointed = this.chosen !== null && shown;
    this.cursor.setAttribute("d", pointed && this.x ? `M${this.x(shown[0]).toFixed(1)} 0V${HEIGHT}` : "");
    setText(this.time, pointed ? clock(shown[0]) : "");
    this.legend.forEach((node, index) => setText(node.lastChild, texts[index]));
    const told = spec.lines.map((one, index) => `${one.name} ${texts[index]}`.trim()).join(", ");
    const last = Math.max(0, samples.length - 1);
    const at = this.chosen === null ? last : Math.max(0, samples.indexOf(shown));
    this.plot.setAttribute("aria-valuetext", shown ? `${told} at ${clock(shown[0])}` : "no sample yet");
    this.plot.setAttribute("aria-valuemin", "0");
    this.plot.setAttribute("aria-valuemax", String(last));
    this.plot.setAttribute("aria-valuenow", String(at));
  }

  drawTicks(range, end_s, x) {
    // Full hours and minutes of the reader's clock.
    const offset_s = new Date(end_s * 1000).getTimezoneOffset() * 60;
    let at_s = Math.ceil((end_s - range.span_s - offset_s) / range.tick_s) * range.tick_s + offset_s;
    const ticks = [];
    for (; at_s <= end_s; at_s += range.tick_s) ticks.push(at_s);
    this.grid.setAttribute("d", ticks.map((one) => `M${x(one).toFixed(1)} 0V${HEIGHT}`).join(""));
    while (this.ticks.childElementCount < ticks.length) this.ticks.append(make("span"));
    [...this.ticks.children].forEach((node, index) => {
      const at = x(ticks[index]) / WIDTH;
      node.hidden = index >= ticks.length || at < 0.05 || at > 0.95;
      if (node.hidden) return;
      node.style.left = `${(at * 100).toFixed(2)}%`;
      setText(node, clock(ticks[index]).slice(0, 5));
    });
  }
}

function summary(values, format) {
  const known = values.filter((value) => value != null);
  if (!known.length) return "unknown";
  const lowest = known.reduce((least, value) => Math.min(least, value));
  return `lowest ${format(lowest)}, mean ${format(mean(known))}, highest ${format(largest(known))}`;
}

// The next 1, 2 or 5 times a power of ten: the scale moves seldom.
function ceiling(value) {
  const unit = 10 ** Math.floor(Math.log10(value));
  return unit * [1, 2, 5, 10].find((step) => value <= step * unit * 1.000001);
}

function line(samples, index, x, y) {
  let path = "";
  let drawing = false;
  for (const one of samples) {
    if (one[index] == null) {
      drawing = false;
      continue;
    }
    path += `${drawing ? "L" : "M"}${x(one[0]).toFixed(1)} ${y(one[index]).toFixed(1)}`;
    drawing = true;
  }
  return path;
}

// One shape for each run of samples without a gap.
function area(samples, x, y) {
  const runs = [[]];
  for (const one of samples) {
    if (one[1] == null) runs.push([]);
    else runs.at(-1).push(one);
  }
  return runs.filter((run) => run.length > 1).map((run) =>
    `${line(run, 1, x, y)}L${x(run.at(-1)[0]).toFixed(1)} ${HEIGHT}L${x(run[0][0]).toFixed(1)} ${HEIGHT}Z`).join("");
}

function nearest(samples, at_s) {
  return samples.reduce((best, one) => (Math.abs(one[0] - at_s) < Math.abs(best[0] - at_s) ? one : best), samples[0]);
}

// -- what is shown

let range = RANGES[0];
let subject = "";
let charts = [];
let at_s = 0; // of the last sample
let loaded_s = 0; // of the last slot of the history
let loading = null;

function show() {
  charts = (subject.startsWith("gpu ") ? GPU : TRAFFIC).map((spec) => new Chart(spec));
  byId("charts").replaceChildren(...charts.map((one) => one.node));
  events.show(subject, range.span_s, at_s);
  loaded_s = 0;
  load();
}

// Read what the history has since the last slot; all of it after a gap in this page's samples.
async function load() {
  const chosen = loading = { range, subject };
  const query = new URLSearchParams({ range: range.name, subject, after: String(loaded_s) });
  try {
    const found = await getJson(`ui/history?${query}`);
    if (loading !== chosen) return;
    if (!loaded_s) for (const one of charts) one.samples.length = 0;
    for (const one of charts) one.load(found);
    const count = Math.max(0, ...Object.values(found.series).map((one) => one.length));
    loaded_s = found.start_s + (count - 1) * found.step_s;
    draw();
  } catch {
    loaded_s = 0; // the next sample tries again
  } finally {
    if (loading === chosen) loading = null;
  }
}

function draw() {
  for (const one of charts) one.draw(range, Math.max(at_s, loaded_s));
}

// What is chosen stays a choice, also while it is not there.
function subjects(status) {
  const known = [
    ["", "All models"],
    ...status.models.map((one) => [`model ${one.model}`, one.model]),
    ...status.gpus.map((one) => [`gpu ${one.gpu}`, `GPU ${one.gpu}`]),
  ];
  return known.some(([value]) => value === subject) ? known : [...known, [subject, subject]];
}

export function install() {
  const buttons = RANGES.map((one) => make("button", { type: "button", "aria-pressed": String(one === range) }, one.label));
  buttons.forEach((button, index) => button.addEventListener("click", () => {
    range = RANGES[index];
    buttons.forEach((one) => one.setAttribute("aria-pressed", String(one === button)));
    show();
  }));
  byId("chart-ranges").append(...buttons);
  byId("chart-subject").addEventListener("change", (event) => {
    subject = event.target.value;
    show();
  });
}

export function update(status) {
  const first = !charts.length;
  const before_s = at_s;
  at_s = status.at_s;
  fillSelect(byId("chart-subject"), subjects(status), subject);
  if (first) show();
  const gap = at_s > before_s + MISSING_S || at_s < before_s;
  const model = subject.startsWith("model ") ? subject.slice(6) : null;
  const models = status.models.filter((one) => model === null || one.model === model);
  const sample = {
    figures: models.map((one) => one.figures).filter(Boolean),
    workers: status.workers.filter((one) => model === null || one.model === model),
    gpu: status.gpus.find((one) => `gpu ${one.gpu}` === subject),
  };
  sample.ttft = model === null ? status : sample.figures[0];
  for (const one of charts) one.update(at_s, sample);
  events.show(subject, range.span_s, at_s);
  if (gap) loaded_s = 0;
  const live = range.step_s === 1;
  if (!loaded_s || (!live && at_s >= loaded_s + 2 * range.step_s)) {
    if (!loading) load();
  } else if (live && !loading) {
    for (const one of charts) one.samples.push(one.current);
    loaded_s = Math.floor(at_s);
    draw();
  }
}
