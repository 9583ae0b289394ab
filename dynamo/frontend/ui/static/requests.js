// Recent requests, as they end. The whole list is fetched when the section is opened; the stream
// then sends what is new. Filters, figures and export are over the list that the page has.

import { isRecorded, noteRecording, showContent } from "./content.js";
import { badge, byId, clock, count, counted, fillSelect, liveTable, make, natural, NONE, seconds, setText } from "./dom.js";
import { nameOf, noteWorkers, readReceipt, receiptNodes } from "./receipt.js";
import { getJson, recordsOf, toast } from "./server.js";

const MOST = 1000;
const ROWS = 100;
const PINS = 20;

const open = new Set();
const receipts = new Map();
const pinned = new Map();
let asked = ""; // the id in the address of the page
let linked = null; // its request
let kept = []; // newest first
let frozen = null; // what is shown while paused
let leftOut = 0;
let problems = [];
let rows = ROWS;
let redraw = () => {};

// Ids of clients may repeat; the duration makes a second use another row.
const keyOf = (row) => `${row.request_id} ${row.duration_s}`;
const endOf = (row) => row.received_at_s + row.duration_s;

function route(row) {
  if (!row.worker) return row.prefill_worker ? `${nameOf(row.prefill_worker)} →` : NONE;
  const decode = nameOf(row.worker, row.dp_rank);
  return row.prefill_worker ? `${nameOf(row.prefill_worker)} → ${decode}` : decode;
}

function itl(row) {
  return row.decode_s && row.completion_tokens > 1 ? row.decode_s / (row.completion_tokens - 1) : null;
}

// -- the list

function add(records) {
  const known = new Set(kept.map(keyOf));
  const fresh = records.filter((row) => !known.has(keyOf(row)));
  if (!fresh.length) return;
  kept = [...fresh, ...kept].sort((one, other) => endOf(other) - endOf(one)).slice(0, MOST);
  const present = new Set(kept.map(keyOf));
  for (const id of [...open, ...receipts.keys()]) {
    if (present.has(id) || pinned.has(id) || (linked && keyOf(linked) === id) || frozen?.some((row) => keyOf(row) === id)) continue;
    open.delete(id);
    receipts.delete(id);
  }
}

async function load() {
  try {
    const found = await getJson("ui/requests");
    leftOut = 0;
    problems = found.problems ?? [];
    add(recordsOf(found.requests));
  } catch (error) {
    problems = [error.message];
  }
  redraw();
}

// -- filters

const OUTCOMES = {
  ok: (row) => row.outcome === "ok",
  failed: (row) => row.outcome !== "ok" && row.outcome !== "cancelled",
  cancelled: (row) => row.outcome === "cancelled",
  cold: (row) => row.worker_wait_s != null,
};

function filters() {
  const chosen = (name) => byId(`request-${name}`).value;
  const [model, worker, outcome, key] = ["model", "worker", "outcome", "key"].map(chosen);
  const slow = Number(chosen("slow"));
  const text = chosen("text").trim().toLowerCase();
  const tests = [
    model && ((row) => row.model === model),
    worker && ((row) => row.worker === worker || row.prefill_worker === worker),
    OUTCOMES[outcome],
    key && ((row) => row.key === key),
    slow > 0 && ((row) => (row.ttft_s ?? row.duration_s) * 1000 > slow),
    text && ((row) => `${row.request_id} ${row.client_id ?? ""} ${row.endpoint}`.toLowerCase().includes(text)),
  ].filter(Boolean);
  return (row) => tests.every((test) => test(row));
}

// A select keeps its choice, also while no request has it.
function offer(name, values, label = String) {
  const select = byId(`request-${name}`);
  const wanted = [...new Set([...values, select.value])].filter(Boolean)
    .sort((one, other) => natural(label(one), label(other)));
  fillSelect(select, [["", "all"], ...wanted.map((value) => [value, label(value)])]);
  select.closest(".pairing").hidden = name === "key" && !wanted.length;
}

// -- figures of what matches

function quantile(ordered, share) {
  return ordered.length ? ordered[Math.round(share * (ordered.length - 1))] : null;
}

function percentiles(table, matching) {
  const figures = [
    ["TTFT", matching.map((row) => row.ttft_s)],
    ["ITL", matching.map(itl)],
    ["Duration", matching.map((row) => row.duration_s)],
  ];
  if (!table.firstChild) {
    const head = ["", "p50", "p90", "p99", "max"].map((text) => text ? make("th", { scope: "col", class: "num" }, text) : make("td"));
    const body = figures.map(([name]) => make("tr", {}, make("th", { scope: "row" }, name), ...[0, 1, 2, 3].map(() => make("td", { class: "num" }))));
    table.append(make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...body));
  }
  figures.forEach(([, values], index) => {
    const ordered = values.filter((value) => value != null).sort((one, other) => one - other);
    const cells = [...table.tBodies[0].rows[index].cells].slice(1);
    [0.5, 0.9, 0.99, 1].forEach((share, at) => setText(cells[at], seconds(quantile(ordered, share))));
  });
}

// -- rows

// The beginning and the end: ids of one client often differ in their last digits alone.
function short(id) {
  return id.length > 22 ? `${id.slice(0, 9)}…${id.slice(-10)}` : id;
}

function toggle(key) {
  if (open.has(key)) open.delete(key);
  else open.add(key);
  redraw();
}

function idCell(cell, row) {
  if (!cell.firstChild) {
    cell.append(make("button", { type: "button", class: "link mono", title: row.request_id, onclick: () => toggle(keyOf(row)) }, short(row.request_id)));
  }
  cell.firstChild.setAttribute("aria-expanded", String(open.has(keyOf(row))));
}

function togglePin(row) {
  const key = keyOf(row);
  if (!pinned.delete(key)) {
    if (pinned.size >= PINS) toast(`${PINS} requests are pinned already; unpin one of them`, "failed");
    else pinned.set(key, row);
  }
  redraw();
}

function pinCell(cell, row) {
  if (!cell.firstChild) {
    cell.append(make("button", { type: "button", onclick: () => togglePin(row) }));
  }
  const is = pinned.has(keyOf(row));
  setText(cell.firstChild, is ? "Unpin" : "Pin");
  cell.firstChild.setAttribute("aria-label", `${is ? "Unpin" : "Pin"} ${row.request_id}`);
}

function outcomeCell(cell, row) {
  if (!cell.firstChild) cell.append(make("span"));
  const good = row.outcome === "ok";
  badge(cell.firstChild, good ? "ready" : row.outcome === "cancelled" ? "stopped" : "failed", row.outcome);
}

function speed(row) {
  const value = itl(row);
  return value ? (1 / value).toFixed(1) : NONE;
}

const COLUMNS = [
  { label: "Time", text: (row) => clock(row.received_at_s) },
  { label: "Request", class: "name id", fill: idCell },
  { label: "Model", text: (row) => row.model },
  { label: "Endpoint", class: "extra", text: (row) => row.endpoint },
  { label: "Key", class: "extra", optional: true, text: (row) => row.key || NONE },
  { label: "Outcome", fill: outcomeCell },
  { label: "Worker", text: route },
  { label: "Prompt", class: "num", text: (row) => count(row.prompt_tokens ?? 0) },
  { label: "Cached blocks", class: "num", text: (row) => (row.prompt_blocks ? `${row.overlap_blocks ?? 0} / ${row.prompt_blocks}` : NONE) },
  { label: "Output", class: "num", text: (row) => count(row.completion_tokens ?? 0) },
  { label: "TTFT", class: "num", text: (row) => seconds(row.ttft_s) },
  { label: "Total", class: "num", text: (row) => seconds(row.duration_s) },
  { label: "Tokens/s", class: "num", text: speed },
  { label: "Pin", class: "acts", fill: pinCell },
];

async function fetchReceipt(cell, row) {
  const key = keyOf(row);
  try {
    receipts.set(key, await readReceipt(row.request_id));
    cell.replaceChildren(...receiptNodes(receipts.get(key), true));
    showBodies(cell, row);
  } catch (error) {
    cell.append(make("p", { class: "dim" }, error.message));
  }
}

function showBodies(cell, row) {
  if (!isRecorded()) return;
  const content = make("div");
  cell.append(content);
  showContent(content, row.request_id);
}

function note(cell, row) {
  const shown = open.has(keyOf(row));
  if (shown && !cell.firstChild) {
    const full = receipts.get(keyOf(row));
    cell.replaceChildren(...receiptNodes(full ?? row, Boolean(full)));
    if (full) showBodies(cell, row);
    else fetchReceipt(cell, row);
  } else if (!shown) {
    cell.replaceChildren();
  }
  return shown;
}

// -- the section

function summary(matching, source) {
  const parts = [`${count(matching.length)} of the last ${counted(source.length, "request")}`];
  if (pinned.size) parts.push(`${pinned.size} pinned`);
  const newer = frozen && frozen.length ? kept.filter((row) => endOf(row) > endOf(frozen[0])).length : frozen ? kept.length : 0;
  if (frozen) parts.push(`paused, ${count(newer)} newer`);
  if (leftOut) parts.push(`${count(leftOut)} came too fast to be shown: Pause reads them`);
  return [...parts, ...problems].join("; ");
}

function draw(update) {
  const source = frozen ?? kept;
  offer("model", source.map((row) => row.model));
  offer("worker", source.flatMap((row) => [row.worker, row.prefill_worker]).filter(Boolean), (id) => nameOf(id));
  offer("key", source.map((row) => row.key ?? ""));
  const matches = filters();
  const matching = source.filter(matches);
  percentiles(byId("request-percentiles"), matching);
  setText(byId("request-count"), summary(matching, source));
  const first = new Map([...(linked ? [[keyOf(linked), linked]] : []), ...pinned]);
  const others = matching.filter((row) => !first.has(keyOf(row)));
  byId("request-more").hidden = others.length <= rows;
  update([...first.values(), ...others.slice(0, rows)]);
}

function exportJson() {
  const requests = (frozen ?? kept).filter(filters()).map((row) => receipts.get(keyOf(row)) ?? row);
  const url = URL.createObjectURL(new Blob([JSON.stringify({ requests }, null, 1)], { type: "application/json" }));
  make("a", { href: url, download: `requests-${new Date().toISOString().slice(0, 19).replaceAll(":", "")}.json` }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

async function pause() {
  frozen = frozen ? null : kept;
  const button = byId("request-pause");
  setText(button, frozen ? "Resume" : "Pause");
  if (frozen && leftOut) {
    await load();
    frozen &&= kept;
  }
  redraw();
}

// Opens the request that the address names, kept in the list or not; "" for none.
async function reveal(id) {
  asked = id;
  linked = null;
  try {
    const found = id && await readReceipt(id);
    if (id !== asked) return; // the address has another one now
    if (found) {
      linked = found;
      receipts.set(keyOf(linked), linked);
      open.add(keyOf(linked));
    }
  } catch (error) {
    if (id !== asked) return;
    toast(error.message, "failed");
  }
  redraw();
  if (linked) byId("request-rows").querySelector(".id button").focus();
}

export function install() {
  const update = liveTable(byId("request-rows"), COLUMNS, { key: keyOf, empty: "No request matches.", note });
  redraw = () => draw(update);
  for (const name of ["model", "worker", "outcome", "key", "slow", "text"]) {
    byId(`request-${name}`).addEventListener("input", () => {
      rows = ROWS;
      redraw();
    });
  }
  byId("request-pause").addEventListener("click", pause);
  byId("request-export").addEventListener("click", exportJson);
  byId("request-more").addEventListener("click", () => {
    rows += ROWS;
    redraw();
  });
  redraw();
  return {
    load,
    reveal,
    add(data) {
      leftOut += data.left_out;
      problems = data.problems;
      add(recordsOf(data.requests));
      redraw();
    },
    note(status) {
      noteRecording(status);
      noteWorkers(status.workers);
    },
  };
}
