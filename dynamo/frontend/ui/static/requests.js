// Recent requests. One that is open shows where its time went and what each worker would have cost.

import { badge, byId, clock, count, liveTable, make, NONE, percent, seconds, setText } from "./dom.js";
import { getJson } from "./server.js";

const PARTS = [
  ["waiting for a worker", "worker_wait_s", "its model had none: it was started for this request"],
  ["prepare", "prepare_s", "parse, template, tokenize"],
  ["queue", "queue_s", "until a worker was chosen"],
  ["prefill", "prefill_s", "until the first token"],
  ["decode", "decode_s", "first to last token"],
];

const open = new Set();
const receipts = new Map();
let redraw = () => {};

function toggle(id) {
  if (open.has(id)) open.delete(id);
  else open.add(id);
  redraw();
}

// The beginning and the end: ids of one client often differ in their last digits alone.
function short(id) {
  return id.length > 22 ? `${id.slice(0, 9)}…${id.slice(-10)}` : id;
}

function idCell(cell, row) {
  if (!cell.firstChild) {
    const button = make("button", { type: "button", class: "link mono", onclick: () => toggle(row.request_id) });
    cell.append(button);
  }
  const button = cell.firstChild;
  setText(button, short(row.request_id));
  button.title = row.request_id;
  button.setAttribute("aria-expanded", String(open.has(row.request_id)));
}

function speed(row) {
  if (!row.decode_s || !(row.completion_tokens > 1)) return NONE;
  return ((row.completion_tokens - 1) / row.decode_s).toFixed(1);
}

function overlap(row) {
  return row.prompt_blocks ? `${row.overlap_blocks ?? 0} / ${row.prompt_blocks}` : NONE;
}

const COLUMNS = [
  { label: "Time", text: (row) => clock(row.received_at_s) },
  { label: "Request", class: "name id", fill: idCell },
  { label: "Model", text: (row) => row.model },
  { label: "Endpoint", class: "extra", text: (row) => row.endpoint },
  {
    label: "Outcome",
    fill: (cell, row) => {
      if (!cell.firstChild) cell.append(make("span"));
      const good = (row.outcome ?? "ok") === "ok";
      badge(cell.firstChild, good ? "ready" : "failed", row.outcome ?? "ok");
    },
  },
  { label: "Worker", class: "mono", text: (row) => (row.worker || NONE) + (row.dp_rank ? `:${row.dp_rank}` : "") },
  { label: "Prompt", class: "num", text: (row) => count(row.prompt_tokens ?? 0) },
  { label: "Cached blocks", class: "num", text: overlap },
  { label: "Output", class: "num", text: (row) => count(row.completion_tokens ?? 0) },
  { label: "TTFT", class: "num", text: (row) => seconds(row.ttft_s) },
  { label: "Total", class: "num", text: (row) => seconds(row.duration_s) },
  { label: "Tokens/s", class: "num", text: speed },
];

// -- the receipt

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

function candidates(route) {
  const rows = route.candidates ?? [];
  const inSeconds = route.unit === "seconds";
  const shown = (value) => number(inSeconds && value != null ? value * 1000 : value);
  const terms = [...new Set(rows.flatMap((one) => Object.keys(one.terms ?? {})))];
  const head = make("tr", {}, ...["Worker", "Overlap", ...terms.map((name) => name.replaceAll("_", " ")), inSeconds ? "Cost, ms" : "Cost", ""].map((name, index, all) =>
    make("th", { scope: "col", class: index && index < all.length - 1 ? "num" : "" }, name)));
  const body = rows.map((one) => make("tr", { class: one.chosen ? "chosen" : "" },
    make("td", { class: "mono" }, one.worker + (one.dp_rank ? `:${one.dp_rank}` : "")),
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

function facts(row) {
  const pairs = [
    ["Migrations", row.migrations || null],
    ["Prefill worker", row.prefill_worker || null],
    ["Cached tokens", row.cached_tokens == null ? null : `${count(row.cached_tokens)} of ${count(row.prompt_tokens ?? 0)} (${percent(row.cached_tokens / (row.prompt_tokens || 1))})`],
    ["Router", row.route ? row.route.mode : null],
    ["Index", row.route ? INDEX[row.route.index ?? "none"] ?? row.route.index : null],
    ["Reason", row.route?.reason || null],
    ["Not shown", row.route?.omitted ? `${row.route.omitted} more workers` : null],
  ].filter((pair) => pair[1] !== null);
  return make("dl", {}, ...pairs.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, String(value)))));
}

function receipt(cell, row) {
  const full = receipts.get(row.request_id) ?? row;
  cell.replaceChildren(...timeline(full), facts(full));
  if (full.route?.candidates?.length) cell.append(candidates(full.route));
  else if (receipts.get(row.request_id)) cell.append(make("p", { class: "dim" }, "No route was recorded for this request."));
}

async function fetchReceipt(cell, row) {
  try {
    receipts.set(row.request_id, await getJson(`v1/requests/${encodeURIComponent(row.request_id)}`));
    receipt(cell, row);
  } catch (error) {
    cell.append(make("p", { class: "dim" }, error.message));
  }
}

function note(cell, row) {
  const shown = open.has(row.request_id);
  if (shown && !cell.firstChild) {
    receipt(cell, row);
    fetchReceipt(cell, row);
  } else if (!shown) {
    cell.replaceChildren();
  }
  return shown;
}

export function install() {
  const update = liveTable(byId("request-rows"), COLUMNS, {
    key: (row) => row.request_id,
    empty: "No request has ended since the frontend started.",
    note,
  });
  let latest = [];
  redraw = () => update(latest);
  return (status) => {
    latest = status.requests;
    const present = new Set(latest.map((row) => row.request_id));
    for (const id of [...open, ...receipts.keys()]) {
      if (!present.has(id)) {
        open.delete(id);
        receipts.delete(id);
      }
    }
    update(latest);
  };
}
