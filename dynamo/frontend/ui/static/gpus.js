// The GPUs: who holds their memory, what sleeps there, and what a load of a model would take.

import { age, bar, byId, bytes, liveTable, make, NONE, percent, set, setText } from "./dom.js";

const COLORS = 6;
const HIDDEN_BYTES = 2 ** 28; // the driver itself holds some memory

// The parts of a GPU's memory, by worker or foreign process; `size` is null if it is not known.
function parts(gpu, workers, colors) {
  const byName = new Map(workers.map((one) => [one.name, one]));
  const found = new Map();
  const add = (name, size, more) => {
    const worker = byName.get(name);
    const before = found.get(name);
    const kind = worker?.state === "asleep" ? "asleep" : worker ? `m${(colors.get(worker.model) ?? 0) % COLORS}` : "foreign";
    found.set(name, { name, kind, model: worker?.model ?? "", size, ...more, ...(before && { size: before.size + size }) });
  };
  for (const one of gpu.holders ?? []) {
    if (one.worker) add(one.worker, one.used_bytes);
    else add(`pid ${one.pid}`, one.used_bytes, { model: one.name || "process", note: "not ours" });
  }
  const sleeping = workers.filter((one) => one.state === "asleep" && one.gpus?.includes(gpu.gpu)).map((one) => one.name);
  for (const name of [...(gpu.workers ?? []), ...sleeping]) if (!found.has(name)) add(name, null);
  const told = [...found.values()].reduce((sum, one) => sum + (one.size ?? 0), 0);
  const rest = (gpu.used_bytes ?? 0) - told;
  if (rest > HIDDEN_BYTES) add("rest", rest, { model: "others", name: "", note: "not visible here" });
  const last = (one) => one.kind === "foreign";
  return [...found.values()].sort((one, other) => last(one) - last(other) || (other.size ?? 0) - (one.size ?? 0));
}

function changed(node, value) {
  const text = JSON.stringify(value);
  if (node.dataset.shown === text) return false;
  node.dataset.shown = text;
  return true;
}

function memory(cell, row) {
  if (!cell.firstChild) cell.append(make("span", { class: "track stack" }), make("span"));
  const [track, label] = cell.children;
  const known = row.used_bytes != null && row.total_bytes;
  set(track, "hidden", !known);
  setText(label, known ? `${bytes(row.used_bytes)} of ${bytes(row.total_bytes)}` : NONE);
  const shares = known ? row.parts.filter((one) => one.size).map((one) => [one.kind, (100 * one.size) / row.total_bytes]) : [];
  if (!changed(track, shares)) return;
  track.replaceChildren(...shares.map(([kind, width]) => {
    const piece = make("span", { class: `piece ${kind}` });
    piece.style.width = `${width}%`;
    return piece;
  }));
}

function holders(cell, row) {
  const shown = row.parts.map((one) => [one.kind, one.model, one.name, one.note ?? "", one.size == null ? "" : bytes(one.size)]);
  if (changed(cell, shown)) {
    cell.replaceChildren(...shown.map(([kind, model, name, note, size]) => make("span", { class: "holder" },
      make("i", { class: `piece ${kind}` }), make("b", {}, model || name),
      ...[model && name, kind === "asleep" && "asleep", note, size].filter(Boolean).flatMap((one) => [" ", make("span", {}, one)]))));
    if (!shown.length) cell.append(make("span", { class: "holder" }, "free"));
  }
}

const COLUMNS = [
  { label: "GPU", class: "name", text: (row) => `${row.gpu}  ${(row.name ?? "").replace("NVIDIA ", "")}`.trim() },
  { label: "Memory", class: "meter wide", optional: true, fill: memory },
  { label: "Held by", class: "holders", fill: holders },
  { label: "Load", class: "meter", optional: true, fill: (cell, row) => bar(cell, row.utilization, percent(row.utilization)) },
  { label: "Power", class: "num", optional: true, text: watts },
  { label: "Temp", class: "num", optional: true, text: (row) => (row.celsius == null ? NONE : `${row.celsius} °C`) },
];

function watts(row) {
  if (row.watts == null) return NONE;
  return `${Math.round(row.watts)}${row.limit_watts ? ` of ${Math.round(row.limit_watts)}` : ""} W`;
}

function summary(gpus) {
  const sum = (field) => gpus.reduce((total, one) => total + (one[field] ?? 0), 0);
  if (!gpus.length) return "";
  const texts = [`${gpus.length} GPU${gpus.length > 1 ? "s" : ""}`];
  if (sum("total_bytes")) texts.push(`${bytes(sum("used_bytes"))} of ${bytes(sum("total_bytes"))}`);
  else texts.push("no driver: shown are the GPUs of the graph");
  if (sum("watts")) texts.push(`${Math.round(sum("watts"))} W`);
  return texts.join(" · ");
}

// -- what a load would do

function named(names, status) {
  return names.map((name) => {
    const worker = status.workers.find((one) => one.name === name);
    const model = status.models.find((one) => one.model === worker?.model);
    const idle_s = model?.figures?.idle_s;
    const idle = model?.figures?.in_flight || idle_s < 1 ? "busy" : idle_s == null ? "" : `idle ${age(idle_s)}`;
    const told = [worker?.model, idle].filter(Boolean).join(", ");
    return told ? `${name} (${told})` : name;
  }).join(", ");
}

// A sentence without its subject for each service that a load starts.
export function loadTexts(model, status) {
  return (model.load ?? []).map((one) => [
    one.text + (one.gpus?.length ? ` on GPU ${one.gpus.join(" ")}` : ""),
    one.removes?.length ? `removes the sleeping ${named(one.removes, status)}` : "",
    one.keeps_asleep?.length ? `${named(one.keeps_asleep, status)} cannot wake then` : "",
    one.blocked_by?.length ? `GPUs are held by ${named(one.blocked_by, status)}` : "",
  ].filter(Boolean).join("; "));
}

function loads(list, status) {
  const rows = status.models.map((one) => [one.model, loadTexts(one, status).join("; ")]).filter(([, text]) => text);
  if (!changed(list, rows)) return;
  list.hidden = !rows.length;
  list.replaceChildren(...rows.map(([model, text]) => make("li", {}, "A load of ", make("b", {}, model), ` ${text}`)));
}

export function install() {
  const cards = liveTable(byId("gpus"), COLUMNS, {
    key: (row) => row.gpu, empty: "No NVIDIA GPU, or no driver: dynamo doctor says which.",
  });
  return (status) => {
    const colors = new Map(status.models.map((one, index) => [one.model, index]));
    cards(status.gpus.map((one) => ({ ...one, parts: parts(one, status.workers, colors) })));
    setText(byId("gpu-summary"), summary(status.gpus));
    loads(byId("loads"), status);
  };
}
