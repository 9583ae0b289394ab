// The models on this machine's disks, and on the Hub: find, download, serve, delete.

import { byId, count, liveTable, make, NONE, sentence, setText } from "./dom.js";
import { act, confirmed, getJson } from "./server.js";

const DAY_S = 86400;
const OPEN = "dynamo-disk-open";

// As dynamo list prints it.
function size(value) {
  return value >= 1e8 ? `${(value / 1e9).toFixed(1)} GB` : `${(value / 1e6).toFixed(1)} MB`;
}

function ago(at_s) {
  if (!at_s) return NONE;
  const days = Math.floor((Date.now() / 1000 - at_s) / DAY_S);
  return days < 1 ? "today" : `${days} day${days > 1 ? "s" : ""} ago`;
}

const ASKED = {
  delete_model: (row) => [`Delete ${row.name}?`, `${size(row.size_bytes)} of ${row.store} are deleted from this disk.`, "Delete"],
};

function button(action, label, row, after) {
  const node = make("button", { type: "button", "aria-label": `${label} ${row.name}` }, label);
  node.addEventListener("click", async () => {
    if (ASKED[action] && !(await confirmed(...ASKED[action](row)))) return;
    node.disabled = true;
    await act(action, row.name);
    node.disabled = false;
    after();
  });
  return node;
}

function buttons(cell, row, wanted, after) {
  const text = JSON.stringify([row.name, ...wanted, row.size_bytes]);
  if (cell.dataset.wanted === text) return;
  cell.dataset.wanted = text;
  cell.replaceChildren(...wanted.map(([action, label]) => button(action, label, row, after)));
}

function diskActions(row) {
  const free = !row.served_by?.length;
  const complete = row.is_complete !== false;
  return [
    ...(complete && row.formats?.length && free ? [["add_model", "Add"]] : []),
    ...(complete || row.store !== "Hugging Face" ? [] : [["pull", "Resume"]]),
    ...(free && row.store !== "path" ? [["delete_model", "Delete"]] : []),
  ];
}

function diskColumns(after) {
  return [
    { label: "Model", class: "name", text: (row) => row.name },
    { label: "Store", text: (row) => row.store },
    { label: "Format", text: (row) => (row.formats?.join(", ") || "no weights") + (row.is_complete === false ? ", incomplete" : "") },
    { label: "Size", class: "num", text: (row) => size(row.size_bytes) },
    { label: "Last used", class: "num", text: (row) => ago(row.used_at_s) },
    { label: "Served by", text: (row) => row.served_by?.join(", ") || NONE },
    { label: "Actions", class: "acts", fill: (cell, row) => buttons(cell, row, diskActions(row), after) },
  ];
}

function hubColumns(after) {
  return [
    { label: "On the Hub", class: "name", text: (row) => row.name },
    { label: "Task", text: (row) => row.task || NONE },
    { label: "Downloads", class: "num", text: (row) => (row.typed ? NONE : count(row.downloads)) },
    { label: "Access", text: (row) => (row.is_gated ? "gated: accept its licence first" : row.typed ? "as typed" : "open") },
    { label: "Actions", class: "acts", fill: (cell, row) => buttons(cell, row, row.here ? [] : [["pull", "Download"]], after) },
  ];
}

// The last download: running, or how it ended until it is dismissed.
function downloadLine(node, after) {
  const text = make("span", { role: "status" });
  const track = make("progress", { max: 1, "aria-label": "Progress of the download" });
  const acts = make("span", { class: "acts" });
  node.append(text, track, acts);
  let dismissed = "";
  return (one) => {
    const id = `${one.name} ${one.state} ${one.message ?? ""}`;
    node.hidden = id === dismissed;
    const running = one.state === "running";
    const share = one.total_bytes ? (one.done_bytes ?? 0) / one.total_bytes : 0;
    track.hidden = !running;
    if (track.value !== share) track.value = share;
    const left_s = one.bytes_per_s ? (one.total_bytes - one.done_bytes) / one.bytes_per_s : null;
    const rest = left_s == null ? "" : ` · ${size(one.bytes_per_s)}/s · ${left_s < 90 ? `${Math.ceil(left_s)} s` : `${Math.ceil(left_s / 60)} min`} left`;
    const of = one.total_bytes ? `${Math.floor(share * 100)} % of ${size(one.total_bytes)}${rest}` : "asking the Hub";
    const state = {
      running: `Downloading ${one.name}: ${of}`,
      done: `Downloaded ${one.name}.`,
      cancelled: `The download of ${one.name} was cancelled; files that are complete are kept.`,
    }[one.state];
    const shown = state ?? one.message ?? "";
    if (text.dataset.shown !== shown) {
      text.dataset.shown = shown;
      text.replaceChildren(state ?? sentence(shown));
    }
    if (acts.dataset.for === id) return;
    acts.dataset.for = id;
    const wanted = { running: [["cancel_pull", "Cancel"]], done: [["add_model", "Add"]] }[one.state] ?? [["pull", "Resume"]];
    const close = make("button", { type: "button", class: "quiet", "aria-label": "Dismiss the download" }, "×");
    close.addEventListener("click", () => {
      dismissed = id;
      node.hidden = true;
    });
    acts.replaceChildren(...wanted.map(([action, label]) => button(action, label, one, after)), ...(running ? [] : [close]));
    after();
  };
}

export function install() {
  const details = byId("disk");
  const find = byId("hub-text");
  let [models, hits, busy] = [[], [], false];
  const disk = liveTable(byId("disk-rows"), diskColumns(refresh), { key: (row) => `${row.store} ${row.name}`, empty: "No model on this disk." });
  const hub = liveTable(byId("hub-rows"), hubColumns(refresh), { key: (row) => row.name, empty: "None on the Hub." });

  function show() {
    const text = find.value.trim().toLowerCase();
    const rows = models.filter((one) => one.name.toLowerCase().includes(text));
    disk(rows, { empty: models.length ? "None on this disk." : undefined });
    const here = new Set(models.filter((one) => one.is_complete !== false && one.formats?.length).map((one) => one.name));
    hub(hits.map((one) => ({ ...one, here: here.has(one.name) })));
  }

  async function refresh() {
    if (!details.open || busy) return;
    busy = true;
    try {
      const found = await getJson("ui/models");
      models = found.models;
      setText(byId("disk-summary"), `${size(models.reduce((sum, one) => sum + one.size_bytes, 0))} in ${models.length}; ${size(found.free_bytes)} free`);
      show();
    } catch (error) {
      setText(byId("hub-state"), error.message);
    }
    busy = false;
  }

  async function search(event) {
    event.preventDefault();
    const text = find.value.trim();
    if (!text) return;
    setText(byId("hub-state"), "asking the Hub …");
    try {
      hits = (await getJson(`ui/models/hub?find=${encodeURIComponent(text)}`)).models;
      if (/^[\w.-]+\/[\w.:/-]+$/.test(text) && !hits.some((one) => one.name === text)) hits.unshift({ name: text, typed: true });
      setText(byId("hub-state"), `${hits.length} found`);
      byId("hub-rows").hidden = false;
    } catch (error) {
      setText(byId("hub-state"), error.message);
    }
    show();
  }

  byId("hub-form").addEventListener("submit", search);
  find.addEventListener("input", show);
  details.open = sessionStorage.getItem(OPEN) === "1";
  details.addEventListener("toggle", () => {
    sessionStorage.setItem(OPEN, details.open ? "1" : "");
    refresh();
  });
  const progress = downloadLine(byId("download"), refresh);

  // A restarted frontend has no download: it ended with the old one.
  function connected() {
    byId("download").hidden = true;
    refresh();
  }

  return { refresh, connected, progress };
}
