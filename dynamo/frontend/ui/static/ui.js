// The page: tabs, theme, key, and the stream of samples that every section shows.

import * as charts from "./charts.js";
import * as chatPane from "./chat.js";
import * as connectPane from "./connect.js";
import * as diskPane from "./disk.js";
import { badge, byId, setText } from "./dom.js";
import * as events from "./events.js";
import * as logsPane from "./logs.js";
import * as overviewPane from "./overview.js";
import * as requestsPane from "./requests.js";
import * as routingPane from "./routing.js";
import { apiKey, getJson, setApiKey, Stream, toast } from "./server.js";

const TABS = ["overview", "requests", "routing", "logs", "chat", "connect"];
const FEEDS = ["requests", "routing"];
const THEMES = ["auto", "light", "dark"];
const MODELS_MS = 5000;

let about = { keys: false, role: "", name: "", rest: "" };
let retry = 0;
let linked = "";

const logs = logsPane.install();
const chat = chatPane.install(() => start());
const connect = connectPane.install();
const disk = diskPane.install();
const overview = overviewPane.install(openLogs);
const requests = requestsPane.install();
const routing = routingPane.install();
charts.install();

// -- tabs: the hash of the address names the section, and a request: #requests/ID

// What the role of the key may see; without one, the form alone.
function tabs() {
  return { operator: TABS, user: ["chat", "connect"] }[about.role] ?? [];
}

function currentTab() {
  const name = location.hash.slice(1).split("/")[0];
  return tabs().includes(name) ? name : tabs()[0];
}

function showTab() {
  const current = currentTab();
  for (const name of TABS) {
    const tab = byId(`tab-${name}`);
    tab.setAttribute("aria-selected", String(name === current));
    tab.tabIndex = name === current ? 0 : -1;
    tab.hidden = !tabs().includes(name);
    byId(name).hidden = name !== current;
  }
  byId("tabs").hidden = !current;
  byId("sign-in").hidden = about.role !== "none";
  logs.show(current === "logs");
  chat.show(current === "chat");
  const id = current === "requests" ? location.hash.split("/")[1] ?? "" : "";
  if (id !== linked) requests.reveal(linked = id);
  if (stream.path !== null && stream.path !== streamPath()) stream.open(streamPath());
}

// The section is named to the frontend, which sends more for some of them.
function streamPath() {
  return FEEDS.includes(currentTab()) ? `ui/events?show=${currentTab()}` : "ui/events";
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
  const names = tabs();
  const at = names.indexOf(currentTab());
  const next = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: -1 }[event.key];
  if (next === undefined) return;
  event.preventDefault();
  const name = names.at(next % names.length);
  location.hash = name;
  byId(`tab-${name}`).focus();
});
window.addEventListener("hashchange", showTab);
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  byId("main").focus();
});

// -- theme

function theme() {
  return document.documentElement.dataset.theme ?? "auto";
}

function showTheme() {
  setText(byId("theme"), { auto: "Colors: system", light: "Colors: light", dark: "Colors: dark" }[theme()]);
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

byId("sign-out").addEventListener("click", () => {
  stream.close();
  setApiKey("");
  setText(byId("key-error"), "");
  start();
});
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setApiKey(byId("key").value.trim());
  byId("key").value = "";
  start();
});

function showRole() {
  const { keys, role, name } = about;
  const signedIn = keys && role !== "none";
  setText(byId("who"), role === "user" || signedIn ? [name, role].filter(Boolean).join(" · ") : "");
  byId("role-note").hidden = role !== "user";
  setText(byId("role-note"), `${keys ? "This key" : "This browser"} may use Chat and Connect. The rest of this page is ${about.rest}.`);
  byId("sign-out").hidden = !signedIn;
  if (role !== "operator") for (const id of ["namespace", "deployment", "recording"]) setText(byId(id), "");
  byId("problems").hidden ||= role !== "operator";
  chat.signIn(about);
  showTab();
}

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
  requests.note(status);
  badge(byId("recording"), "failed", status.records_content ? "content is recorded" : "");
  logs.update(status);
  const names = [...status.models].sort(readyFirst).map((one) => one.model);
  chat.update(names);
  connect(names, about.keys);
}

function onState(current, text) {
  state = current;
  if (state === "live") {
    sampledAt = performance.now();
    disk.connected();
  } else document.title = `(${state}) Dynamo`;
  badge(byId("live"), state === "live" ? "ready" : "failed", state === "live" ? "live" : text);
  document.body.classList.toggle("stale", state !== "live");
  if (state === "live" && currentTab() === "requests") requests.load();
  if (state === "refused") again(); // the key was withdrawn, or its role has changed
}

// With a user's key there are no samples: the models are read again from time to time.
async function showModels() {
  try {
    const names = (await getJson("v1/models")).data.map((one) => one.id);
    chat.update(names);
    connect(names, about.keys);
    badge(byId("live"), "ready", names.length ? "connected" : "connected; no model is served yet");
  } catch (error) {
    if (error.status === 401) start();
    else badge(byId("live"), "failed", error.message);
  }
}

// The role of the key may change, too.
setInterval(() => {
  if (about.role === "user" && !document.hidden) start();
}, MODELS_MS);

function readyFirst(one, other) {
  return (other.state === "ready") - (one.state === "ready") || one.model.localeCompare(other.model);
}

function onEvent(name, data) {
  if (name === "status") show(data);
  else if (name === "requests") requests.add(data);
  else if (name === "routing") routing(data);
  else if (name === "events") events.add(data.events, data.all);
  else if (name === "download") disk.progress(data);
  else if (name === "outcome") {
    toast(data.text, data.failed ? "failed" : "ready");
    disk.refresh();
  }
}

const stream = new Stream(onEvent, onState);

function again() {
  clearTimeout(retry);
  retry = setTimeout(start, 1000);
}

async function start() {
  clearTimeout(retry);
  try {
    about = await getJson("ui/about.json");
  } catch (error) {
    onState("down", error.message);
    again();
    return;
  }
  showRole();
  if (about.role === "operator") {
    stream.open(streamPath());
    return;
  }
  stream.close();
  state = "";
  document.title = "Dynamo";
  document.body.classList.remove("stale");
  if (about.role === "user") {
    showModels();
    return;
  }
  badge(byId("live"), "stopped", "not signed in");
  setText(byId("key-error"), apiKey() ? "This API key is not valid here." : "");
  setApiKey("");
  byId("key").focus();
}

start();
