// The receipt of a request: where its time went, and what each worker would have cost.

import { count, make, NONE, percent, seconds } from "./dom.js";
import { getJson } from "./server.js";

const NAMES = 2000;
const names = new Map(); // id of a worker → its name, also of one that is gone

export function noteWorkers(workers) {
  for (const one of workers) if (one.worker) names.set(one.worker, one.name);
  while (names.size > NAMES) names.delete(names.keys().next().value);
}

export function nameOf(worker, rank = 0) {
  return (names.get(worker) ?? worker ?? NONE) + (rank ? `:${rank}` : "");
}

export function readReceipt(id) {
  return getJson(`ui/requests/${encodeURIComponent(id)}`);
}

const PARTS = [
  ["waiting for a worker", "worker_wait_s", "its model had none: it was started for this request"],
  ["prepare", "prepare_s", "parse, template, tokenize"],
  ["queue", "queue_s", "until a worker was chosen"],
  ["prefill", "prefill_s", "until the first token"],
  ["decode", "decode_s", "first to last token"],
];

function part(name) {
  return `part ${name.replaceAll(" ", "-")}`;
}

function timeline(row) {
  const parts = PARTS.filter(([, field]) => field !== "worker_wait_s" || row[field] != null)
    .map(([name, field, title]) => [name, row[field] ?? 0, title]);
  const rest = row.duration_s - parts.reduce((total, part) => total + part[1], 0);
  parts.push(["network", Math.max(0, rest), "until the response was complete"]);
  const track = make("div", { class: "timeline", role: "img", "aria-label": parts.map(([name, value]) => `${name} ${seconds(value)}`).join(", ") });
  const legend = make("div", { class: "legend" });
  for (const [name, value, title] of parts) {
    const piece = make("span", { class: part(name), title: `${name}: ${title}` });
    piece.style.flexGrow = String(value / (row.duration_s || 1));
    track.append(piece);
    legend.append(make("span", { title }, make("i", { class: part(name) }), `${name} `, make("b", {}, seconds(value))));
  }
  return [track, legend];
}

function number(value) {
  return value == null ? NONE : Number(value.toFixed(3)).toString();
}

// Costs in seconds are shown in milliseconds.
function candidates(route) {
  const rows = route.candidates ?? [];
  const inSeconds = route.unit === "seconds";
  const shown = (value) => number(inSeconds && value != null ? value * 1000 : value);
  const terms = [...new Set(rows.flatMap((one) => Object.keys(one.terms ?? {})))];
  const head = make("tr", {}, ...["Worker", "Overlap", ...terms.map((name) => name.replaceAll("_", " ")), inSeconds ? "Cost, ms" : "Cost", ""].map((name, index, all) =>
    make("th", { scope: "col", class: index && index < all.length - 1 ? "num" : "" }, name)));
  const body = rows.map((one) => make("tr", { class: one.chosen ? "chosen" : "" },
    make("td", { class: "mono", title: `worker ${one.worker}` }, nameOf(one.worker, one.dp_rank)),
    make("td", { class: "num" }, number(one.overlap_blocks ?? 0)),
    ...terms.map((name) => make("td", { class: "num" }, shown(one.terms?.[name]))),
    make("td", { class: "num" }, shown(one.cost)),
    make("td", {}, one.chosen ? "chosen" : one.excluded ?? "")));
  return make("table", { class: "candidates" }, make("thead", {}, head), make("tbody", {}, ...body));
}

const INDEX = {
  exact: "exact: every KV event of these workers was applied",
  recovering: "recovering: a gap in the events is being filled",
  predicted: "predicted from earlier requests, without events",
  none: "not used",
};

function list(pairs) {
  const known = pairs.filter((pair) => pair[1] != null && pair[1] !== "");
  return make("dl", {}, ...known.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, String(value)))));
}

// Why one worker was chosen.
function routeNodes(title, route) {
  const facts = list([
    ["Router", route.mode],
    ["Index", INDEX[route.index ?? "none"] ?? route.index],
    ["Reason", route.reason],
    ["Not shown", route.omitted ? `${route.omitted} more workers` : null],
  ]);
  const nodes = [make("h3", {}, title), facts];
  if (route.candidates?.length) nodes.push(make("div", { class: "scroll", tabIndex: 0, role: "region", "aria-label": `Candidates of: ${title}` }, candidates(route)));
  return nodes;
}

// `row` is of a list, or complete with its routes: then `complete` is true.
export function receiptNodes(row, complete) {
  const cached = row.cached_tokens;
  const nodes = [...timeline(row), list([
    ["Id", row.request_id],
    ["Client's id", row.client_id],
    ["Key", row.key],
    ["Migrations", row.migrations || null],
    ["Cached tokens", cached == null ? null : `${count(cached)} of ${count(row.prompt_tokens ?? 0)} (${percent(cached / (row.prompt_tokens || 1))})`],
  ])];
  if (row.prefill_route) nodes.push(...routeNodes(`Prefill on ${nameOf(row.prefill_worker)}`, row.prefill_route));
  else if (row.prefill_worker) nodes.push(list([["Prefill worker", nameOf(row.prefill_worker)]]));
  if (row.route) nodes.push(...routeNodes(`${row.prefill_worker ? "Decode" : "Served"} on ${nameOf(row.worker)}`, row.route));
  else if (complete) nodes.push(make("p", { class: "dim" }, "No route was recorded for this request."));
  return nodes;
}
