// What happened to the deployment: marks over the time of the charts, and a list, newest first.

import { byId, clock, make, setText } from "./dom.js";

const KEPT = 500;
const LISTED = 100;
const BAD = new Set(["died", "failed", "error", "alert"]);
const DAY_S = 86400;

let events = [];
let shown = { subject: "", span_s: 600, end_s: 0 };

function chosen() {
  const model = shown.subject.startsWith("model ") ? shown.subject.slice(6) : null;
  const begin_s = shown.end_s - shown.span_s;
  return events.filter((one) => one.at_s >= begin_s && (model === null || one.model === model || one.name === model));
}

function when(at_s) {
  const day = new Date(at_s * 1000);
  const other = shown.end_s - at_s > DAY_S / 2 && day.toDateString() !== new Date(shown.end_s * 1000).toDateString();
  return (other ? `${day.getMonth() + 1}/${day.getDate()} ` : "") + clock(at_s);
}

function row(one) {
  const kind = BAD.has(one.kind) ? "failed" : "";
  return make("li", { class: kind },
    make("time", { dateTime: new Date(one.at_s * 1000).toISOString() }, when(one.at_s)),
    make("b", {}, one.kind), make("span", { class: "who" }, one.name ?? ""),
    make("span", {}, one.text ?? "", one.by ? make("span", { class: "dim" }, ` (by ${one.by})`) : ""));
}

// Only marks move with each sample: the list keeps its place and the reader's selection.
function marks(found) {
  const strip = byId("event-strip");
  while (strip.childElementCount > found.length) strip.lastChild.remove();
  while (strip.childElementCount < found.length) strip.append(make("span"));
  found.forEach((one, index) => {
    const node = strip.children[index];
    const name = BAD.has(one.kind) ? "failed" : "";
    if (node.className !== name) node.className = name;
    node.style.left = `${(100 * (1 - (shown.end_s - one.at_s) / shown.span_s)).toFixed(2)}%`;
    const title = `${clock(one.at_s)} ${one.kind} ${one.name ?? ""}: ${one.text ?? ""}`;
    if (node.title !== title) node.title = title;
  });
}

function draw() {
  const found = chosen();
  marks(found);
  const listed = found.slice(-LISTED).reverse();
  const key = listed.map((one) => `${one.at_s} ${one.kind} ${one.name}`).join();
  const list = byId("event-list");
  if (list.dataset.key === key) return;
  list.dataset.key = key;
  list.replaceChildren(...listed.map(row));
  list.hidden = !listed.length;
  const left = found.length - listed.length;
  setText(byId("events-note"), left ? `the last ${LISTED}; more: dynamo events` : listed.length ? "" : "none in this time");
}

export function add(found, all) {
  events = (all ? found : [...events, ...found]).slice(-KEPT);
  draw();
}

export function show(subject, span_s, end_s) {
  shown = { subject, span_s, end_s };
  draw();
}
