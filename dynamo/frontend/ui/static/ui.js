// The page: tabs, theme, key, and the stream of samples that every section shows.

import * as charts from "./charts.js";
import * as chatPane from "./chat.js";
import * as connectPane from "./connect.js";
import { badge, byId, setText } from "./dom.js";
import * as logsPane from "./logs.js";
import * as overviewPane from "./overview.js";
import * as requestsPane from "./requests.js";
import { apiKey, getJson, setApiKey, Stream, toast } from "./server.js";

const TABS = ["overview", "requests", "logs", "chat", "connect"];
const THEMES = ["auto", "light", "dark"];

const logs = logsPane.install();
const chat = chatPane.install();
const connect = connectPane.install();
const overview = overviewPane.install(openLogs);
const requests = requestsPane.install();
charts.install();

// -- tabs: the hash of the address names the section

function currentTab() {
  const name = location.hash.slice(1);
  return TABS.includes(name) ? name : TABS[0];
}

function showTab() {
  const current = currentTab();
  for (const name of TABS) {
    const tab = byId(`tab-${name}`);
    tab.setAttribute("aria-selected", String(name === current));
    tab.tabIndex = name === current ? 0 : -1;
    byId(name).hidden = name !== current;
  }
  logs.show(current === "logs");
}

function openLogs(name) {
  logs.choose(name);
  location.hash = "logs";
}

byId("tabs").addEventListener("click", (event) => {
  const tab = event.target.closest("[role=tab]");
  if (tab) location.hash = tab.id.slice("tab-".length);
});
byId("tabs").addEventListener("keydown", (event) => {
  const step = { ArrowRight: 1, ArrowLeft: -1, Home: -TABS.indexOf(currentTab()), End: TABS.length - 1 - TABS.indexOf(currentTab()) }[event.key];
  if (step === undefined) return;
  event.preventDefault();
  const name = TABS[(TABS.indexOf(currentTab()) + step + TABS.length) % TABS.length];
  location.hash = name;
  byId(`tab-${name}`).focus();
});
window.addEventListener("hashchange", showTab);
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  byId("main").focus();
});
showTab();

// -- theme

function theme() {
  return document.documentElement.dataset.theme ?? "auto";
}

function showTheme() {
  const name = theme();
  setText(byId("theme"), name[0].toUpperCase() + name.slice(1));
  byId("theme").setAttribute("aria-label", `Color theme: ${name}`);
}

byId("theme").addEventListener("click", () => {
  const next = THEMES[(THEMES.indexOf(theme()) + 1) % THEMES.length];
  if (next === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = next;
  localStorage.setItem("dynamo-theme", next);
  showTheme();
});
showTheme();

// -- key

function showKeyForm(shown) {
  byId("key-form").hidden = !shown;
  byId("key-open").hidden = shown || !about.keys;
  if (shown) byId("key").focus();
}

byId("key-open").addEventListener("click", () => showKeyForm(true));
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setApiKey(byId("key").value.trim());
  byId("key").value = "";
  showKeyForm(!apiKey());
  start();
});

// -- samples

const WORDS = {
  ready: ["ready", "running"],
  draining: ["draining", "frontend draining"],
  loading: ["loading", "frontend starts"],
  down: ["failed", "frontend down"],
  none: ["stopped", "no frontend"],
};

const STALE_MS = 3000;
let state = "";
let sampledAt = 0;

// A frontend that hangs, or a tunnel that is dead, ends no stream: the samples just stop.
setInterval(() => {
  const silent = performance.now() - sampledAt;
  if (state !== "live" || document.hidden || silent < STALE_MS) return;
  const text = `no sample for ${Math.floor(silent / 1000)} s`;
  badge(byId("live"), "failed", text);
  badge(byId("deployment"), "failed", "no answer");
  document.body.classList.add("stale");
  document.title = `(${text}) Dynamo`;
}, 1000);

function show(status) {
  sampledAt = performance.now();
  if (document.body.classList.contains("stale")) onState("live", "live");
  setText(byId("namespace"), status.namespace);
  document.title = `Dynamo · ${status.namespace}`;
  if (status.state === "running") badge(byId("deployment"), ...(WORDS[status.frontend] ?? ["stopped", status.frontend]));
  else badge(byId("deployment"), "stopped", "no deployment");
  overview(status);
  charts.update(status);
  requests(status);
  logs.update(status);
  const names = [...status.models].sort(readyFirst).map((one) => one.model);
  chat(names);
  connect(names, about.keys);
}

function onState(current, text) {
  state = current;
  if (state === "live") sampledAt = performance.now();
  else document.title = `(${state}) Dynamo`;
  badge(byId("live"), state === "live" ? "ready" : "failed", state === "live" ? "live" : text);
  document.body.classList.toggle("stale", state !== "live");
  if (state === "refused" && about.keys) {
    showKeyForm(true);
    if (apiKey()) showModels();
  }
}

// With a user's key, which may chat but not operate.
async function showModels() {
  try {
    const names = (await getJson("v1/models")).data.map((one) => one.id);
    chat(names);
    connect(names, about.keys);
  } catch {
    // The key is wrong: the state says so already.
  }
}

function readyFirst(one, other) {
  return (other.state === "ready") - (one.state === "ready") || one.model.localeCompare(other.model);
}

function onEvent(name, data) {
  if (name === "status") show(data);
  else if (name === "outcome") toast(data.text, data.failed ? "failed" : "ready");
}

const stream = new Stream(onEvent, onState);
let about = { keys: false };

async function start() {
  try {
    about = await getJson("ui/about.json", false); // a wrong key would be refused
  } catch (error) {
    onState("down", error.message);
    setTimeout(start, 1000);
    return;
  }
  if (about.keys && !apiKey()) {
    onState("refused", "an operator's key is needed");
    return;
  }
  showKeyForm(false);
  stream.open("ui/events");
}

start();
