// Requests to the frontend: the key, actions, server-sent events.

import { byId, make } from "./dom.js";

const KEY = "dynamo-key";
const listeners = new Set();

export function apiKey() {
  return sessionStorage.getItem(KEY) ?? "";
}

export function setApiKey(value) {
  if (value) sessionStorage.setItem(KEY, value);
  else sessionStorage.removeItem(KEY);
  for (const one of listeners) one();
}

export function onKey(listener) {
  listeners.add(listener);
}

export function headers(more = {}) {
  const key = apiKey();
  return key ? { authorization: `Bearer ${key}`, ...more } : more;
}

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export async function refusal(response) {
  const text = await response.text();
  let message = text;
  try {
    const body = JSON.parse(text);
    message = body.error?.message ?? body.message ?? text;
  } catch {
    // Not JSON: shown as it is.
  }
  return new Refused(response.status, message || `HTTP status ${response.status}`);
}

export async function getJson(path, withKey = true) {
  const response = await fetch(path, { headers: withKey ? headers() : {}, cache: "no-store" });
  if (!response.ok) throw await refusal(response);
  return response.json();
}

// The records of a table that has the values of each field in a column.
export function recordsOf({ count, columns, texts }) {
  const fields = Object.entries(columns).map(([name, values]) => [name, texts[name] ? values.map((at) => texts[name][at]) : values]);
  return Array.from({ length: count }, (_, row) =>
    Object.fromEntries(fields.map(([name, values]) => [name, values[row]]).filter(([, value]) => value != null)));
}

// -- actions

// Returns whether it was begun; a message says so, or why not.
export async function act(action, name) {
  try {
    const response = await fetch("ui/actions", {
      method: "POST",
      headers: headers({ "content-type": "application/json" }),
      body: JSON.stringify({ action, name }),
    });
    if (!response.ok) throw await refusal(response);
    toast((await response.json()).message);
    return true;
  } catch (error) {
    toast(`${action.replace("_", " ")} ${name}: ${error.message}`, "failed");
    return false;
  }
}

export function toast(text, state = "ready") {
  const close = make("button", { type: "button", class: "quiet", "aria-label": "Dismiss" }, "×");
  const node = make("div", { class: `toast ${state}` }, make("span", {}, text), close);
  close.addEventListener("click", () => node.remove());
  byId("toasts").append(node);
  while (byId("toasts").childElementCount > 4) byId("toasts").firstChild.remove();
  if (state === "ready") setTimeout(() => node.remove(), 8000);
}

export function confirmed(title, text, label) {
  const dialog = byId("confirm");
  byId("confirm-title").textContent = title;
  byId("confirm-text").textContent = text;
  byId("confirm-yes").textContent = label;
  dialog.returnValue = "cancel";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true });
  });
}

// -- server-sent events, by fetch: EventSource sends no key

export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    buffer += value;
    let end;
    while ((end = buffer.indexOf("\n\n")) >= 0) {
      const event = { name: "message", data: "" };
      for (const line of buffer.slice(0, end).split("\n")) {
        if (line.startsWith("event: ")) event.name = line.slice(7);
        else if (line.startsWith("data: ")) event.data += line.slice(6);
      }
      buffer = buffer.slice(end + 2);
      yield event;
    }
  }
}

// A stream that is opened again when it ends, and closed while the page is hidden.
export class Stream {
  constructor(onEvent, onState) {
    this.onEvent = onEvent;
    this.onState = onState;
    this.path = null;
    this.abort = null;
    this.timer = 0;
    document.addEventListener("visibilitychange", () => this.restart());
    onKey(() => this.restart());
  }

  open(path) {
    this.path = path;
    this.restart();
  }

  close() {
    this.open(null);
  }

  restart() {
    clearTimeout(this.timer);
    this.abort?.abort();
    this.abort = null;
    if (this.path !== null && !document.hidden) this.run(this.path, this.abort = new AbortController());
  }

  async run(path, abort) {
    const live = () => this.abort === abort;
    let state = "down";
    let text = "the frontend does not answer; is it running? See: dynamo ps";
    try {
      const response = await fetch(path, { headers: headers(), signal: abort.signal, cache: "no-store" });
      if (!response.ok) {
        const error = await refusal(response);
        [state, text] = [error.status < 500 ? "refused" : "down", error.message];
      } else {
        this.onState("live", "live");
        for await (const event of events(response)) {
          if (!live()) return;
          if (event.name === "end") text = JSON.parse(event.data).message;
          else this.onEvent(event.name, JSON.parse(event.data));
        }
      }
    } catch (error) {
      if (error.name === "AbortError") return;
    }
    if (!live()) return;
    this.onState(state, text);
    if (state === "down") this.timer = setTimeout(() => this.restart(), 1000);
  }
}
