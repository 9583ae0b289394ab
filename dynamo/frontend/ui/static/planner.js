// The planner: its state, its last decisions, and its settings with a form that changes them.

import { age, badge, counted, make, set, setText } from "./dom.js";
import { act, getJson, headers, refusal } from "./server.js";

const PATH = "v1/planner";
const READ_MS = 3000;

// The fields that a state has: mode load has no targets.
function fieldsOf(state) {
  const rows = [
    ["ttft_ms", "TTFT target, ms", state.ttft_ms],
    ["itl_ms", "ITL target, ms", state.itl_ms],
    ["max_gpu_budget", "GPUs at most", state.max_gpu_budget],
    ["min_gpu_budget", "GPUs that each pool keeps", state.min_gpu_budget],
    ...Object.entries(state.minima).map(([name, least]) => [`minima ${name}`, `Workers kept of ${name}`, least, name]),
  ];
  return rows.filter((one) => one[2] != null).map(([key, label, now, service]) => ({ key, label, now: String(now), service }));
}

function words(state) {
  const targets = state.ttft_ms == null ? [] : [`TTFT ${state.ttft_ms} ms`, `ITL ${state.itl_ms} ms`];
  const minima = Object.entries(state.minima).map(([name, least]) => `${name} keeps ${least}`);
  return [...targets, `at most ${counted(state.max_gpu_budget, "GPU")}`, `each pool keeps ${counted(state.min_gpu_budget, "GPU")}`, ...minima].join(" · ");
}

// What is no number goes out as it was typed: the planner's API says what it takes.
function typed(text) {
  const value = text.trim() ? Number(text) : NaN;
  return Number.isFinite(value) ? value : text;
}

// A box that is being edited keeps its text; what the planner has now is shown beside it.
class Field {
  constructor({ key, label, service }) {
    this.service = service;
    this.key = key;
    this.now = "";
    this.edited = false;
    this.note = make("span", { class: "now" });
    this.input = make("input", { type: "text", inputMode: "decimal", autocomplete: "off", spellcheck: false });
    if (service !== undefined) this.input.placeholder = "as in the graph";
    this.node = make("label", {}, label, this.input, this.note);
    this.input.addEventListener("input", () => {
      this.edited = this.input.value !== this.now;
      this.show();
    });
    this.input.addEventListener("blur", () => this.show());
  }

  show(now = this.now) {
    this.now = now;
    if (this.input.value === now) this.edited = false;
    if (!this.edited && document.activeElement !== this.input) set(this.input, "value", now);
    setText(this.note, this.input.value === now ? "" : `now ${now}`);
  }

  reset() {
    this.edited = false;
    set(this.input, "value", this.now);
    this.show();
  }
}

function changeOf(fields) {
  const change = {};
  for (const { key, service, input } of fields) {
    if (service === undefined) change[key] = typed(input.value);
    else (change.minima ??= {})[service] = input.value.trim() ? typed(input.value) : null;
  }
  return change;
}

function settingsForm() {
  const summary = make("summary");
  const boxes = make("div", { class: "fields" });
  const hint = make("p", { class: "dim" }, "Applied with the next decision. They last as long as the deployment; an empty box for a service's workers is what its graph says.");
  const undo = make("button", { type: "button" }, "Undo");
  const error = make("p", { class: "error", role: "alert" });
  const done = make("span", { class: "dim", role: "status" });
  const form = make("form", { noValidate: true, "aria-label": "Change the planner" }, boxes, hint,
    make("div", { class: "row" }, make("button", { class: "primary" }, "Apply"), undo, done), error);
  const node = make("details", { hidden: true }, summary, form);
  const unread = make("p", { class: "dim", hidden: true });
  const fields = new Map();
  let [readAt, reading, sent, sending] = [-Infinity, false, 0, false];

  function show(state) {
    const wanted = fieldsOf(state);
    const keys = new Set(wanted.map((one) => one.key));
    for (const [key, field] of fields) {
      if (keys.has(key)) continue;
      field.node.remove();
      fields.delete(key);
    }
    wanted.forEach((one, index) => {
      let field = fields.get(one.key);
      if (!field) fields.set(one.key, field = new Field(one));
      // A node that is moved loses the focus: only new ones are placed.
      if (field.node.parentNode !== boxes) boxes.insertBefore(field.node, boxes.children[index] ?? null);
      field.show(one.now);
    });
    setText(summary, words(state));
    set(node, "hidden", false);
  }

  // An answer that was asked for before a change is older than the answer to the change.
  async function read() {
    if (reading || sending || performance.now() - readAt < READ_MS) return;
    const before = sent;
    [reading, readAt] = [true, performance.now()];
    try {
      const state = await getJson(PATH);
      if (before === sent) show(state);
      setText(unread, "");
    } catch (problem) {
      setText(unread, `The settings cannot be read: ${problem.message}`);
    }
    set(unread, "hidden", !unread.textContent);
    reading = false;
  }

  async function apply(event) {
    event.preventDefault();
    if (sending) return;
    const edited = [...fields.values()].filter((one) => one.edited);
    setText(error, "");
    setText(done, edited.length ? "" : "Nothing is changed.");
    if (!edited.length) return;
    const texts = edited.map((one) => one.input.value);
    sending = true;
    try {
      const body = JSON.stringify(changeOf(edited));
      const response = await fetch(PATH, { method: "POST", headers: headers({ "content-type": "application/json" }), body });
      if (!response.ok) throw await refusal(response);
      sent += 1;
      const state = await response.json();
      edited.forEach((one, index) => {
        if (one.input.value === texts[index]) one.edited = false;
      });
      show(state);
      for (const one of edited) if (!one.edited) one.reset();
      setText(done, "Applied.");
    } catch (problem) {
      setText(error, problem.message);
    }
    sending = false;
  }

  form.addEventListener("submit", apply);
  form.addEventListener("input", () => setText(done, ""));
  undo.addEventListener("click", () => {
    for (const one of fields.values()) one.reset();
    setText(error, "");
    setText(done, "");
  });

  // Without a planner the form stays while it is used: the edits are for the next one.
  function hide() {
    set(node, "hidden", !form.contains(document.activeElement) && ![...fields.values()].some((one) => one.edited));
    set(unread, "hidden", true);
    readAt = -Infinity;
  }

  return { nodes: [node, unread], read, hide };
}

function pauseButton() {
  const button = make("button", { type: "button" });
  let [paused, busy] = [false, false];
  button.addEventListener("click", async () => {
    if (busy) return;
    busy = true;
    await act(paused ? "resume_planner" : "pause_planner", "planner");
    busy = false;
  });
  return {
    node: button,
    show(state) {
      paused = state === "paused";
      const label = paused ? "Resume" : "Pause";
      setText(button, label);
      set(button, "ariaLabel", `${label} planner`);
    },
  };
}

// The nodes stay, so that the keyboard's focus does while the time runs.
export function install(node) {
  const none = make("p", { class: "dim" }, "No planner in this deployment: the number of workers stays as it is.");
  const [state, mode, next] = [make("span"), make("span"), make("span", { class: "dim" })];
  const pause = pauseButton();
  const head = make("p", {}, make("b", {}, "Planner "), state, " ", mode, " ", next, make("span", { class: "acts" }, pause.node));
  const settings = settingsForm();
  const list = make("ul");
  const empty = make("p", { class: "dim" }, "No decision yet.");
  node.replaceChildren(none, head, ...settings.nodes, list, empty);
  return (summary) => {
    const decisions = summary?.decisions ?? [];
    set(none, "hidden", Boolean(summary));
    set(head, "hidden", !summary);
    set(list, "hidden", !decisions.length);
    set(empty, "hidden", !summary || decisions.length > 0);
    if (!summary) {
      settings.hide();
      return;
    }
    if (node.offsetParent) settings.read();
    badge(state, summary.state);
    setText(mode, summary.mode);
    setText(next, summary.next_s == null ? "" : `next decision in ${age(summary.next_s)}`);
    pause.show(summary.state);
    const text = decisions.join("\n");
    if (list.dataset.text === text) return;
    list.dataset.text = text;
    list.replaceChildren(...decisions.map((one) => make("li", {}, one)));
  };
}
