// Models, workers, other services.

import { age, badge, bar, byId, bytes, causeNote, count, liveTable, make, NONE, percent, rate, seconds, sentence, set, setText } from "./dom.js";
import * as gpuPanel from "./gpus.js";
import { toolTable } from "./lists.js";
import * as plannerPanel from "./planner.js";
import { act, confirmed } from "./server.js";

const WARNINGS = {
  drain: "It finishes its running requests, then exits and is not started again.",
  restart: "It is replaced. If it is the only one, requests wait until the new one serves.",
  unload: "Its workers finish their requests and release their GPUs.",
  remove_model: "It is taken out of the deployment and out of the graph file; its files stay on disk. Its workers finish their requests and exit.",
};
const STATES = {
  ready: "ready", loading: "loading", draining: "draining", asleep: "asleep", failed: "failed", stopped: "stopped",
};

// `warn()` says what to ask before, besides what is always asked.
function action(name, target, warn) {
  const label = name[0].toUpperCase() + name.slice(1).replace("_model", "");
  const button = make("button", { type: "button", "aria-label": `${label} ${target}` }, label);
  button.addEventListener("click", async () => {
    const warning = WARNINGS[name] ?? warn?.(name);
    if (warning && !(await confirmed(`${label} ${target}?`, warning, label))) return;
    button.disabled = true;
    await act(name, target);
    button.disabled = false;
  });
  return button;
}

// Buttons are made again only if the set of them changes; the focus stays in the cell.
function actions(cell, target, names, more = [], warn = undefined) {
  const wanted = names.join();
  if (cell.dataset.wanted === wanted) return;
  cell.dataset.wanted = wanted;
  const label = cell.contains(document.activeElement) ? document.activeElement.textContent : null;
  cell.replaceChildren(...more, ...names.map((name) => action(name, target, warn)));
  const buttons = [...cell.children];
  if (label !== null) (buttons.find((one) => one.textContent === label) ?? buttons[0])?.focus();
}

function stateCell(cell, row) {
  if (!cell.firstChild) cell.append(make("span"), make("progress", { max: 1 }));
  const [label, progress] = cell.children;
  const loading = row.state === "loading";
  const share = loading && row.progress != null ? ` ${percent(row.progress)}` : "";
  badge(label, row.state, (row.state === "zero" ? "no worker" : row.state) + share);
  set(progress, "hidden", !share);
  if (share) set(progress, "value", row.progress);
}

function titled(cell, text, title) {
  setText(cell, text);
  if (cell.title !== title) cell.title = title;
}

const gpus = (row) => row.gpus?.join(" ") || NONE;

// What a model may be asked: its workers can sleep if their engines can.
function modelActions(row) {
  const awake = row.ready || row.state === "loading";
  return [
    ...(row.can_sleep ? ["sleep"] : []),
    ...(awake ? ["unload"] : row.state === "asleep" ? ["wake"] : ["load"]),
    ...(row.in_graph ? ["remove_model"] : []),
  ];
}

// A load that costs another model its sleeping worker asks before.
function warnOfLoad(row, name) {
  const texts = ["load", "wake"].includes(name) && row.load?.some((one) => one.removes?.length) ? row.load_texts : [];
  return texts.length ? `It ${texts.join("; ")}.` : "";
}

const MODELS = [
  { label: "Model", class: "name", text: (row) => row.model, sort: (row) => row.model },
  { label: "State", fill: stateCell, sort: (row) => row.state },
  { label: "Workers", class: "num", text: (row) => `${row.ready ?? 0} / ${row.wanted ?? 0}` },
  { label: "GPUs", class: "num", optional: true, text: gpus, sort: (row) => row.gpus?.join(" ") },
  { label: "VRAM", class: "num", optional: true, text: (row) => bytes(row.vram_bytes), sort: (row) => row.vram_bytes },
  { label: "Tokens/s", class: "num", text: (row) => rate(row.figures && (row.figures.output_tokens_per_s ?? 0)), sort: (row) => row.figures?.output_tokens_per_s ?? 0 },
  { label: "TTFT p50", class: "num", text: (row) => seconds(row.figures?.ttft_p50_s) },
  { label: "TTFT p99", class: "num", text: (row) => seconds(row.figures?.ttft_p99_s), sort: (row) => row.figures?.ttft_p99_s },
  { label: "Running", class: "num", text: (row) => count(row.figures && (row.figures.in_flight ?? 0)), sort: (row) => row.figures?.in_flight ?? 0 },
  { label: "Queued", class: "num", text: (row) => count(row.figures && (row.figures.queued ?? 0)) },
  { label: "Cache hits", class: "num", text: (row) => percent(row.figures?.hit_rate) },
  { label: "Unloads in", class: "num", optional: true, text: (row) => (row.idle_until_s == null ? NONE : age(row.idle_until_s)) },
  {
    label: "Actions",
    class: "acts",
    fill: (cell, row) => {
      cell.row = row;
      actions(cell, row.model, modelActions(row), [], (name) => warnOfLoad(cell.row, name));
    },
  },
];

const BY_STATE = {
  ready: ["drain", "restart"],
  asleep: ["wake", "drain"],
  loading: ["restart"],
  draining: [],
  failed: ["restart"],
  stopped: ["restart"],
};

// A worker without a service is one of a frontend without a deployment.
function workerActions(row) {
  if (!row.service) return ["drain"];
  return [...(row.can_sleep ? ["sleep"] : []), ...(BY_STATE[row.state] ?? [])];
}

function workerColumns(openLogs) {
  return [
    { label: "Worker", class: "name", fill: (cell, row) => titled(cell, row.name, row.worker ? `worker ${row.worker}` : ""), sort: (row) => row.name },
    { label: "Model", text: (row) => (row.model || NONE) + (row.pool ? ` · ${row.pool}` : ""), sort: (row) => row.model },
    { label: "State", fill: stateCell, sort: (row) => row.state },
    { label: "PID", class: "num", text: (row) => row.pids?.join(" ") || NONE },
    { label: "GPUs", class: "num", optional: true, text: gpus, sort: (row) => row.gpus?.join(" ") },
    { label: "VRAM", class: "num", optional: true, text: (row) => bytes(row.vram_bytes), sort: (row) => row.vram_bytes },
    { label: "Running", class: "num", text: (row) => count(row.in_flight), sort: (row) => row.in_flight },
    { label: "KV use", class: "meter", fill: (cell, row) => bar(cell, row.kv_use, percent(row.kv_use)), sort: (row) => row.kv_use },
    { label: "Restarts", class: "num", fill: (cell, row) => titled(cell, count(row.restarts ?? 0), row.last_exit ? `last exit: ${row.last_exit}` : ""), sort: (row) => row.restarts ?? 0 },
    { label: "Up", class: "num", text: (row) => age(row.uptime_s), sort: (row) => row.uptime_s },
    {
      label: "Actions",
      class: "acts",
      fill: (cell, row) => actions(cell, row.name, workerActions(row), [logsButton(row.name, openLogs)]),
    },
  ];
}

function logsButton(name, openLogs) {
  return make("button", { type: "button", onclick: () => openLogs(name), "aria-label": `Logs of ${name}` }, "Logs");
}

function workerNote(cell, row) {
  const exit = row.last_exit && row.state !== "ready" ? `Last exit: ${row.last_exit}. ` : "";
  const cause = row.cause ?? "";
  return causeNote(cell, { cause: cause.includes(row.last_exit ?? "") ? cause : exit + cause, remedy: row.remedy });
}

const OTHERS = (openLogs) => [
  { label: "Service", class: "name", text: (row) => row.name },
  { label: "State", fill: stateCell },
  { label: "PID", class: "num", text: (row) => row.pids?.join(" ") || NONE },
  { label: "Up", class: "num", text: (row) => age(row.uptime_s) },
  { label: "Actions", class: "acts", fill: (cell, row) => actions(cell, row.name, ["restart"], [logsButton(row.name, openLogs)]) },
];

function problems(list, texts) {
  set(list, "hidden", !texts.length); // a page without an operator's key hides it, too
  const text = texts.join("\n");
  if (list.dataset.text === text) return;
  list.dataset.text = text;
  list.replaceChildren(...texts.map((one) => make("li", {}, sentence(one))));
}

// What the lists need of other parts of a sample.
function modelRows(status) {
  const byName = new Map(status.workers.map((one) => [one.name, one]));
  return status.models.map((row) => {
    const workers = (row.workers ?? []).map((one) => byName.get(one)).filter(Boolean);
    return {
      ...row,
      can_sleep: workers.some((one) => one.can_sleep),
      in_graph: status.state === "running" && Boolean(workers.length || row.load?.length),
      load_texts: gpuPanel.loadTexts(row, status),
    };
  });
}

const words = (row) => [row.name, row.model, row.state, row.pool, row.cause, row.gpus?.map((one) => `gpu ${one}`).join(" ")].join(" ");

export function install(openLogs) {
  const gpus = gpuPanel.install();
  const models = toolTable(byId("models"), MODELS, {
    key: (row) => row.model, empty: "No model yet. A worker registers its model when it has loaded it.", note: causeNote,
    words, states: { ...STATES, zero: "no worker" }, things: "models",
  });
  const workers = toolTable(byId("workers"), workerColumns(openLogs), {
    key: (row) => row.name, empty: "No worker.", note: workerNote,
    words, states: STATES, things: "workers",
    groups: {
      Model: (row) => row.model || "no model",
      State: (row) => row.state,
      GPU: (row) => (row.gpus?.length ? `GPU ${row.gpus.join(" ")}` : "no GPU"),
    },
  });
  const others = liveTable(byId("others"), OTHERS(openLogs), { key: (row) => row.name, empty: "No other service.", note: workerNote });
  const planner = plannerPanel.install(byId("planner"));
  return (status) => {
    problems(byId("problems"), status.problems);
    gpus(status);
    models(modelRows(status));
    workers(status.workers);
    others(status.others);
    planner(status.planner);
  };
}
