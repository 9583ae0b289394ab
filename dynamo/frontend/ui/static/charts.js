// Small line charts, drawn from the samples that this page received: the last minute at first, at
// most the last five.

import { byId, clock, make, percent, rate, seconds, setText } from "./dom.js";

const SHORTEST_S = 60;
const LONGEST_S = 300;
const MISSING_S = 3; // samples come each second
const WIDTH = 300;
const HEIGHT = 64;
const SVG = "http://www.w3.org/2000/svg";

function sum(values) {
  return values.reduce((total, value) => total + value, 0);
}

function largest(values) {
  const known = values.filter((value) => value != null);
  return known.length ? Math.max(...known) : null;
}

function mean(values) {
  const known = values.filter((value) => value != null);
  return known.length ? sum(known) / known.length : null;
}

const CHARTS = [
  {
    title: "Output tokens/s",
    format: rate,
    lines: [{ name: "", of: ({ figures }) => sum(figures.map((one) => one.output_tokens_per_s ?? 0)) }],
  },
  {
    title: "TTFT",
    format: seconds,
    lines: [
      { name: "p50", of: ({ status }) => status.ttft_p50_s },
      { name: "p99", of: ({ status }) => status.ttft_p99_s },
    ],
  },
  {
    title: "Requests",
    format: (value) => (value == null ? "–" : String(value)),
    lines: [
      { name: "running", of: ({ figures }) => sum(figures.map((one) => one.in_flight ?? 0)) },
      { name: "queued", of: ({ figures }) => sum(figures.map((one) => one.queued ?? 0)) },
    ],
  },
  {
    title: "KV use",
    format: percent,
    top: 1,
    lines: [
      { name: "mean", of: ({ workers }) => mean(workers.map((one) => one.kv_use)) },
      { name: "max", of: ({ workers }) => largest(workers.map((one) => one.kv_use)) },
    ],
  },
];

function drawn(tag, attributes) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
}

class Chart {
  constructor(spec) {
    this.spec = spec;
    this.samples = [];
    this.pointed = null;
    this.legend = spec.lines.map((line, index) =>
      make("span", { class: `series s${index}` }, make("span", { class: "dim" }, line.name), make("b")));
    this.scale = make("span", { class: "scale dim" });
    this.svg = drawn("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" });
    this.area = drawn("path", { class: "area" });
    this.paths = spec.lines.map((_, index) => drawn("path", { class: `line s${index}` }));
    this.cursor = drawn("path", { class: "cursor" });
    this.svg.append(this.area, ...this.paths, this.cursor);
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerleave", () => this.point(null));
    this.time = make("span", { class: "time dim" });
    this.node = make("div", { class: "panel chart" },
      make("div", { class: "chart-head" }, make("h2", {}, spec.title), this.time, make("span", { class: "grow" }), ...this.legend),
      make("div", { class: "plot" }, this.scale, this.svg));
  }

  add(at_s, sample) {
    const before = this.samples.at(-1)?.[0];
    if (before < at_s - MISSING_S) this.samples.push([(before + at_s) / 2, ...this.spec.lines.map(() => null)]);
    this.samples.push([at_s, ...this.spec.lines.map((line) => line.of(sample))]);
    while (this.samples.length && this.samples[0][0] < at_s - LONGEST_S) this.samples.shift();
    this.draw();
  }

  point(event) {
    if (event === null) {
      this.pointed = null;
    } else {
      const box = this.svg.getBoundingClientRect();
      this.pointed = (event.clientX - box.left) / box.width;
    }
    this.draw();
  }

  draw() {
    const { samples, spec } = this;
    if (!samples.length) return;
    const now = samples.at(-1)[0];
    const top = spec.top ?? ceiling(largest(samples.flatMap((one) => one.slice(1))) || 1);
    const span_s = Math.max(SHORTEST_S, now - samples[0][0]);
    const x = (at_s) => WIDTH * (1 - (now - at_s) / span_s);
    const y = (value) => HEIGHT - 1 - ((HEIGHT - 3) * Math.min(value, top)) / top;
    this.paths.forEach((path, index) => path.setAttribute("d", line(samples, index + 1, x, y)));
    this.area.setAttribute("d", area(samples, x, y));
    const shown = this.pointed === null ? samples.at(-1) : nearest(samples, now - span_s * (1 - this.pointed));
    this.cursor.setAttribute("d", this.pointed === null ? "" : `M${x(shown[0])} 0V${HEIGHT}`);
    setText(this.time, this.pointed === null ? "" : clock(shown[0]));
    const texts = spec.lines.map((_, index) => spec.format(shown[index + 1]));
    this.legend.forEach((node, index) => setText(node.lastChild, texts[index]));
    setText(this.scale, spec.format(top));
    const told = spec.lines.map((one, index) => `${one.name} ${texts[index]}`.trim()).join(", ");
    this.svg.setAttribute("aria-label", `${spec.title}: ${told}`);
  }
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
    `${line(run, 1, x, y)}L${x(run.at(-1)[0])} ${HEIGHT}L${x(run[0][0])} ${HEIGHT}Z`).join("");
}

function nearest(samples, at_s) {
  return samples.reduce((best, one) => (Math.abs(one[0] - at_s) < Math.abs(best[0] - at_s) ? one : best));
}

const charts = CHARTS.map((spec) => new Chart(spec));

export function install() {
  byId("charts").append(...charts.map((one) => one.node));
}

export function update(status) {
  const figures = status.models.map((one) => one.figures).filter(Boolean);
  for (const one of charts) one.add(status.at_s, { status, figures, workers: status.workers });
}
