// Models, workers, GPUs, the planner.

import { age, badge, bar, byId, bytes, causeNote, count, liveTable, make, NONE, percent, rate, seconds, sentence, setText } from "./dom.js";
import { act, confirmed } from "./server.js";

const WARNINGS = {
  drain: "It finishes its running requests, then exits and is not started again.",
  restart: "It is replaced. If it is the only one, requests wait until the new one serves.",
  unload: "Its workers finish their requests and release their GPUs.",
};

function action(name, target, disabled = false) {
  const label = name[0].toUpperCase() + name.slice(1).replace("_planner", "");
  const button = make("button", { type: "button", disabled, "aria-label": `${label} ${target}` }, label);
  button.addEventListener("click", async () => {
    const warning = WARNINGS[name];
    if (warning && !(await confirmed(`${label} ${target}?`, warning, label))) return;
    button.disabled = true;
    await act(name, target);
    button.disabled = false;
  });
  return button;
}

// Buttons are made again only if the set of them changes.
function actions(cell, target, names, more = []) {
  const wanted = names.join();
  if (cell.dataset.wanted === wanted) return;
  cell.dataset.wanted = wanted;
  cell.replaceChildren(...more, ...names.map((name) => action(name, target)));
}

function stateCell(cell, row) {
  if (!cell.firstChild) cell.append(make("span"), make("progress", { max: 1 }));
  const [label, progress] = cell.children;
  const loading = row.state === "loading";
  const share = loading && row.progress != null ? ` ${percent(row.progress)}` : "";
  badge(label, row.state, (row.state === "zero" ? "no worker" : row.state) + share);
  progress.hidden = !share;
  if (share) progress.value = row.progress;
}

function titled(cell, text, title) {
  setText(cell, text);
  if (cell.title !== title) cell.title = title;
}

const gpus = (row) => row.gpus?.join(" ") || NONE;

const MODELS = [
  { label: "Model", class: "name", text: (row) => row.model },
  { label: "State", fill: stateCell },
  { label: "Workers", class: "num", text: (row) => `${row.ready ?? 0} / ${row.wanted ?? 0}` },
  { label: "GPUs", class: "num", optional: true, text: gpus },
  { label: "VRAM", class: "num", optional: true, text: (row) => bytes(row.vram_bytes) },
  { label: "Tokens/s", class: "num", text: (row) => rate(row.figures && (row.figures.output_tokens_per_s ?? 0)) },
  { label: "TTFT p50", class: "num", text: (row) => seconds(row.figures?.ttft_p50_s) },
  { label: "TTFT p99", class: "num", text: (row) => seconds(row.figures?.ttft_p99_s) },
  { label: "Running", class: "num", text: (row) => count(row.figures && (row.figures.in_flight ?? 0)) },
  { label: "Queued", class: "num", text: (row) => count(row.figures && (row.figures.queued ?? 0)) },
  { label: "Cache hits", class: "num", text: (row) => percent(row.figures?.hit_rate) },
  { label: "Unloads in", class: "num", optional: true, text: (row) => (row.idle_until_s == null ? NONE : age(row.idle_until_s)) },
  {
    label: "Actions",
    class: "acts",
    fill: (cell, row) => actions(cell, row.model, row.ready || row.state === "loading" ? ["unload"] : ["load"]),
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
    { label: "Worker", class: "name", fill: (cell, row) => titled(cell, row.name, row.worker ? `worker ${row.worker}` : "") },
    { label: "Model", text: (row) => (row.model || NONE) + (row.pool ? ` · ${row.pool}` : "") },
    { label: "State", fill: stateCell },
    { label: "PID", class: "num", text: (row) => row.pids?.join(" ") || NONE },
    { label: "GPUs", class: "num", optional: true, text: gpus },
    { label: "VRAM", class: "num", optional: true, text: (row) => bytes(row.vram_bytes) },
    { label: "Running", class: "num", text: (row) => count(row.in_flight) },
    { label: "KV use", class: "meter", fill: (cell, row) => bar(cell, row.kv_use, percent(row.kv_use)) },
    { label: "Restarts", class: "num", fill: (cell, row) => titled(cell, count(row.restarts ?? 0), row.last_exit ? `last exit: ${row.last_exit}` : "") },
    { label: "Up", class: "num", text: (row) => age(row.uptime_s) },
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

const GPUS = [
  { label: "GPU", class: "name", text: (row) => `${row.gpu}  ${row.name ?? ""}`.trim() },
  { label: "Load", class: "meter", fill: (cell, row) => bar(cell, row.utilization, percent(row.utilization)) },
  {
    label: "Memory",
    class: "meter wide",
    fill: (cell, row) => {
      const known = row.used_bytes != null && row.total_bytes;
      bar(cell, known ? row.used_bytes / row.total_bytes : null, known ? `${bytes(row.used_bytes)} of ${bytes(row.total_bytes)}` : NONE);
    },
  },
  { label: "Power", class: "num", text: (row) => (row.watts == null ? NONE : `${Math.round(row.watts)} W`) },
  { label: "Temp", class: "num", text: (row) => (row.celsius == null ? NONE : `${row.celsius} °C`) },
];

// The holders of the memory: workers by name, foreign processes by pid.
function holders(cell, row) {
  const told = (row.holders ?? []).map((one) => [
    one.worker ? one.worker : `${one.name || "process"} (pid ${one.pid}, not ours)`,
    bytes(one.used_bytes),
    one.worker ? "" : "foreign",
  ]);
  const text = JSON.stringify(told);
  if (cell.dataset.text !== text) {
    cell.dataset.text = text;
    cell.replaceChildren(...told.map(([name, size, kind]) =>
      make("span", { class: `holder ${kind}` }, name, " ", make("b", {}, size))));
  }
  return told.length > 0;
}

const OTHERS = (openLogs) => [
  { label: "Service", class: "name", text: (row) => row.name },
  { label: "State", fill: stateCell },
  { label: "PID", class: "num", text: (row) => row.pids?.join(" ") || NONE },
  { label: "Up", class: "num", text: (row) => age(row.uptime_s) },
  { label: "Actions", class: "acts", fill: (cell, row) => actions(cell, row.name, ["restart"], [logsButton(row.name, openLogs)]) },
];

// The nodes stay, so that a button keeps the keyboard's focus while the time runs.
function plannerPanel(node) {
  const none = make("p", { class: "dim" }, "No planner in this deployment: the number of workers stays as it is.");
  const [state, mode, next, acts] = [make("span"), make("span"), make("span", { class: "dim" }), make("span", { class: "acts" })];
  const head = make("p", {}, make("b", {}, "Planner "), state, " ", mode, " ", next, acts);
  const list = make("ul");
  const empty = make("p", { class: "dim" }, "No decision yet.");
  node.replaceChildren(none, head, list, empty);
  return (summary) => {
    const decisions = summary?.decisions ?? [];
    none.hidden = Boolean(summary);
    head.hidden = !summary;
    list.hidden = !decisions.length;
    empty.hidden = !summary || decisions.length > 0;
    if (!summary) return;
    badge(state, summary.state);
    setText(mode, summary.mode);
    setText(next, summary.next_s == null ? "" : `next decision in ${age(summary.next_s)}`);
    actions(acts, "planner", [summary.state === "paused" ? "resume_planner" : "pause_planner"]);
    const text = decisions.join("\n");
    if (list.dataset.text === text) return;
    list.dataset.text = text;
    list.replaceChildren(...decisions.map((one) => make("li", {}, one)));
  };
}

function problems(list, texts) {
  const text = texts.join("\n");
  if (list.dataset.text === text) return;
  list.dataset.text = text;
  list.hidden = !texts.length;
  list.replaceChildren(...texts.map((one) => make("li", {}, sentence(one))));
}

export function install(openLogs) {
  const models = liveTable(byId("models"), MODELS, {
    key: (row) => row.model, empty: "No model yet. A worker registers its model when it has loaded it.", note: causeNote,
  });
  const workers = liveTable(byId("workers"), workerColumns(openLogs), {
    key: (row) => row.name, empty: "No worker.", note: workerNote,
  });
  const cards = liveTable(byId("gpus"), GPUS, {
    key: (row) => row.gpu, empty: "No NVIDIA GPU, or no driver: dynamo doctor says which.", note: holders,
  });
  const others = liveTable(byId("others"), OTHERS(openLogs), { key: (row) => row.name, empty: "No other service.", note: workerNote });
  const planner = plannerPanel(byId("planner"));
  return (status) => {
    problems(byId("problems"), status.problems);
    models(status.models);
    workers(status.workers);
    cards(status.gpus);
    others(status.others);
    planner(status.planner);
  };
}
