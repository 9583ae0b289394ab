// A picture of the routing: each worker's cache and queues, and the decisions as they are made.
// Marks move by one transform of each lane a second; a decision costs one node.

import { bar, byId, count, counted, liveTable, make, natural, NONE, percent, seconds, setText } from "./dom.js";
import { nameOf, readReceipt, receiptNodes } from "./receipt.js";
import { recordsOf } from "./server.js";

const WINDOW_S = 60;
const MARKS = 400;
const RECEIPTS = 100;
const HOVER_MS = 120;

const lanes = new Map(); // pool and rank → lane
const marks = new Map(); // lane and request → {mark, at_s}
const receipts = new Map();
const tables = new Map();
let base_s = 0; // where the lanes begin; the server's time
let now_s = 0;
let current = null;
let timer = 0;

const rankOf = (worker, rank) => worker + (rank ? `:${rank}` : "");

// -- lanes

function lane(key) {
  let found = lanes.get(key);
  if (!found) {
    const track = make("div", { class: "track-of-marks" });
    track.style.transform = shift();
    lanes.set(key, found = { track, node: make("div", { class: "lane" }, track) });
  }
  return found;
}

function share(decision) {
  return decision.prompt_blocks ? (decision.overlap_blocks ?? 0) / decision.prompt_blocks : 0;
}

function add(key, decision, phase) {
  const id = `${key} ${decision.request_id}`;
  if (marks.has(id)) return;
  const cached = share(decision);
  const mark = make("button", {
    type: "button",
    class: `mark ${cached >= 0.75 ? "cached" : cached >= 0.25 ? "partly" : "cold"}`,
    tabIndex: -1,
    "aria-label": `${phase ? `${phase} of ` : ""}request ${decision.request_id}: ${decision.overlap_blocks ?? 0} of ${decision.prompt_blocks ?? 0} blocks cached`,
    "aria-controls": "routing-decision",
  });
  mark.style.left = `${((decision.at_s - base_s) / WINDOW_S) * 100}%`;
  const entry = { mark, at_s: decision.at_s, decision, id };
  mark.addEventListener("pointerenter", () => {
    clearTimeout(timer);
    timer = setTimeout(() => show(entry), HOVER_MS);
  });
  mark.addEventListener("pointerleave", () => clearTimeout(timer));
  mark.addEventListener("focus", () => show(entry));
  mark.addEventListener("click", () => show(entry));
  marks.set(id, entry);
  lane(key).track.append(mark);
}

// The oldest leave; a mark with the focus stays until it loses it.
function prune() {
  let over = marks.size - MARKS;
  for (const [id, entry] of marks) {
    const old = entry.at_s < now_s - WINDOW_S || over > 0;
    if (!old || entry.mark === document.activeElement) continue;
    over -= 1;
    entry.mark.remove();
    marks.delete(id);
    if (current === entry) current = null;
  }
}

// Lanes begin at `base_s`, so that a mark keeps its place in them; all of them move together.
function shift() {
  return `translateX(${100 - ((now_s - base_s) / WINDOW_S) * 100}%)`;
}

function move() {
  for (const one of lanes.values()) one.track.style.transform = shift();
}

function rebase() {
  base_s = now_s;
  for (const { mark, at_s } of marks.values()) mark.style.left = `${((at_s - base_s) / WINDOW_S) * 100}%`;
}

// -- the keyboard: one stop, arrow keys go from decision to decision

function byTime() {
  return [...marks.values()].sort((one, other) => one.at_s - other.at_s || natural(one.id, other.id));
}

function roving() {
  const stop = (current && marks.get(current.id)) ?? byTime().at(-1);
  for (const one of marks.values()) one.mark.tabIndex = one === stop ? 0 : -1;
}

function onKey(event) {
  const steps = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity };
  const step = steps[event.key];
  const entry = [...marks.values()].find((one) => one.mark === event.target);
  if (step === undefined || !entry) return;
  event.preventDefault();
  const all = byTime();
  all[Math.min(Math.max(all.indexOf(entry) + step, 0), all.length - 1)].mark.focus();
}

// -- the decision that is looked at

async function show(entry) {
  for (const one of marks.values()) one.mark.classList.toggle("chosen", one.decision.request_id === entry.decision.request_id);
  current = entry;
  roving();
  const id = entry.decision.request_id;
  setText(byId("routing-title"), `Decision for ${id}`);
  const panel = byId("routing-receipt");
  let found = receipts.get(id);
  try {
    if (!found) {
      found = await readReceipt(id);
      receipts.set(id, found);
      if (receipts.size > RECEIPTS) receipts.delete(receipts.keys().next().value);
    }
    if (current === entry) panel.replaceChildren(...receiptNodes(found, true));
    if (found.outcome === "running") receipts.delete(id);
  } catch (error) {
    if (current === entry) panel.replaceChildren(make("p", { class: "dim" }, error.message));
  }
}

// -- workers

const unknown = (value) => (value == null ? NONE : count(value));

function backlog(row) {
  if (row.prefill_s != null) return row.prefill_s ? seconds(row.prefill_s) : "0 s";
  return row.prefill_tokens == null ? NONE : counted(row.prefill_tokens, "token");
}

const COLUMNS = [
  {
    label: "Worker",
    class: "name",
    fill: (cell, row) => {
      setText(cell, nameOf(row.worker, row.dp_rank) + (row.busy ? " · busy" : ""));
      cell.title = `worker ${row.worker}`;
    },
  },
  {
    label: "Cached blocks",
    class: "meter",
    optional: true,
    fill: (cell, row) => bar(cell, row.cached_blocks == null ? null : row.cached_blocks / row.most, unknown(row.cached_blocks)),
  },
  { label: "KV use", class: "meter", optional: true, fill: (cell, row) => bar(cell, row.kv_use, percent(row.kv_use)) },
  { label: "Engine runs", class: "num", optional: true, text: (row) => unknown(row.running) },
  { label: "Engine waits", class: "num", optional: true, text: (row) => unknown(row.waiting) },
  { label: "Prefill queue", class: "meter", optional: true, fill: (cell, row) => bar(cell, row.prefill_s == null ? null : row.prefill_s / row.longest_s, backlog(row)) },
  { label: "In flight", class: "num", text: (row) => count(row.in_flight ?? 0) },
  {
    label: "Decisions of the last minute",
    class: "decisions",
    fill: (cell, row) => {
      const { node } = lane(row.key);
      if (cell.firstChild !== node) cell.replaceChildren(node);
    },
  },
];

const poolKey = (pool) => `${pool.model} ${pool.phase ?? ""}`;

function summary(pool) {
  const cost = pool.unit ? `kv, costs in ${pool.unit}` : `${pool.mode || "no"} mode: caches do not count`;
  const waiting = pool.waiting ? `; waiting for a worker: ${count(pool.waiting)}` : "";
  return `${cost}${waiting}`;
}

function table(pool) {
  const key = poolKey(pool);
  let found = tables.get(key);
  if (!found) {
    const note = make("span", { class: "dim" });
    const node = make("table", { "aria-label": `Workers of ${key}` });
    const panel = make("div", { class: "panel" }, make("h2", {}, pool.model + (pool.phase ? ` · ${pool.phase}` : ""), note), node);
    byId("routing-pools").append(panel);
    const update = liveTable(node, COLUMNS, { key: (row) => row.key, empty: "No worker." });
    tables.set(key, found = { panel, note, update });
  }
  return found;
}

function draw(pool) {
  const { note, update } = table(pool);
  setText(note, summary(pool));
  const workers = pool.workers ?? [];
  const blocks = Math.max(1, ...workers.map((one) => Math.max(one.total_blocks ?? 0, one.cached_blocks ?? 0)));
  const longest_s = Math.max(1, ...workers.map((one) => one.prefill_s ?? 0));
  const rows = workers.map((one) => ({
    ...one,
    key: `${poolKey(pool)} ${rankOf(one.worker, one.dp_rank)}`,
    most: one.total_blocks ?? blocks,
    longest_s,
  }));
  rows.sort((one, other) => natural(nameOf(one.worker), nameOf(other.worker)) || (one.dp_rank ?? 0) - (other.dp_rank ?? 0));
  update(rows);
  return rows.map((row) => row.key);
}

export function install() {
  byId("routing-pools").addEventListener("keydown", onKey);
  return (view) => {
    now_s = view.at_s;
    if (!base_s || now_s - base_s > 20 * WINDOW_S) rebase();
    const keys = new Set(view.pools.flatMap(draw));
    const wanted = new Set(view.pools.map(poolKey));
    for (const [key, { panel }] of tables) {
      if (wanted.has(key)) continue;
      panel.remove();
      tables.delete(key);
    }
    for (const decision of recordsOf(view.decisions)) {
      const phases = new Set(view.pools.filter((pool) => pool.model === decision.model).map((pool) => pool.phase ?? ""));
      const phase = phases.has("decode") ? "decode" : "";
      const decode = `${decision.model} ${phase} ${rankOf(decision.worker, decision.dp_rank)}`;
      if (keys.has(decode)) add(decode, decision, phase);
      if (!decision.prefill_worker) continue;
      const rank = view.pools.find((pool) => pool.model === decision.model && pool.phase === "prefill")
        ?.workers?.find((one) => one.worker === decision.prefill_worker)?.dp_rank;
      const prefill = `${decision.model} prefill ${rankOf(decision.prefill_worker, rank)}`;
      if (keys.has(prefill)) add(prefill, decision, "prefill");
    }
    for (const key of lanes.keys()) if (!keys.has(key)) lanes.delete(key);
    prune();
    move();
    roving();
    byId("routing-empty").hidden = view.pools.length > 0;
    setText(byId("routing-note"), view.left_out ? `not drawn: ${counted(view.left_out, "decision")} of the last second` : "");
  };
}
