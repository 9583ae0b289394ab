// Settings of clients, with the address and the model filled in and quoted for their format.

import { byId, copy, fillSelect, make, setText } from "./dom.js";
import { getJson } from "./server.js";

const shell = (text) => (/^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`);
const quoted = JSON.stringify; // also TOML's basic strings and Python's literals

const CLIENTS = [
  ["Claude Code", "in a shell", ({ root, model, key, context }) => [
    `export ANTHROPIC_BASE_URL=${shell(root)}`,
    `export ANTHROPIC_AUTH_TOKEN=${shell(key)}`,
    `export ANTHROPIC_MODEL=${shell(model)}`,
    `export ANTHROPIC_DEFAULT_HAIKU_MODEL=${shell(model)}`,
    `export CLAUDE_CODE_SUBAGENT_MODEL=${shell(model)}`,
    ...(context ? [`export CLAUDE_CODE_MAX_CONTEXT_TOKENS=${context}`] : []),
    "export CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1",
    "claude --disallowedTools WebSearch",
  ]],
  ["Codex", "~/.codex/config.toml", ({ base, model, keys, context }) => [
    `model = ${quoted(model)}`,
    'model_provider = "dynamo"',
    ...(context ? [`model_context_window = ${context}`, `model_auto_compact_token_limit = ${Math.floor(context * 0.85)}`] : []),
    "",
    "[model_providers.dynamo]",
    'name = "Dynamo"',
    `base_url = ${quoted(base)}`,
    'wire_api = "responses"',
    ...(keys ? ['env_key = "DYNAMO_API_KEY"'] : []),
  ]],
  ["Open WebUI", "in a shell, on this machine", ({ base, key }) => [
    `export OPENAI_API_BASE_URL=${shell(base)}`,
    `export OPENAI_API_KEY=${shell(key)}`,
    "export ENABLE_OLLAMA_API=false",
    "open-webui serve --port 3000",
  ]],
  ["openai for Python", "pip install openai", ({ base, model, key }) => [
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url=${quoted(base)}, api_key=${quoted(key)})`,
    "stream = client.chat.completions.create(",
    `    model=${quoted(model)},`,
    '    messages=[{"role": "user", "content": "Hello"}],',
    "    stream=True,",
    ")",
    "for chunk in stream:",
    "    if chunk.choices:",
    '        print(chunk.choices[0].delta.content or "", end="", flush=True)',
  ]],
  ["curl", "in a shell", ({ base, model, key, keys }) => [
    `curl -N ${shell(`${base}/chat/completions`)} \\`,
    ...(keys ? [`  -H ${shell(`Authorization: Bearer ${key}`)} \\`] : []),
    "  -H 'Content-Type: application/json' \\",
    `  -d ${shell(JSON.stringify({ model, messages: [{ role: "user", content: "Hello" }], stream: true }))}`,
  ]],
];

export function install() {
  const root = location.href.replace(/\/ui([?#].*)?$/, "");
  const base = `${root}/v1`;
  const select = byId("connect-model");
  let keys = false;
  let reading = false;
  let contexts = new Map(); // model → tokens
  const blocks = CLIENTS.map(([name, where, lines]) => {
    const pre = make("pre", { tabIndex: 0, "aria-label": `Settings for ${name}` });
    const button = make("button", { type: "button", "aria-label": `Copy the settings for ${name}` }, "Copy");
    button.addEventListener("click", () => copy(pre.textContent, button));
    const head = make("div", { class: "row" }, make("h3", {}, name), make("span", { class: "dim" }, where), make("span", { class: "grow" }), button);
    byId("snippets").append(make("div", { class: "snippet" }, head, pre));
    return [pre, lines];
  });

  function draw() {
    const model = select.value || "MODEL";
    const given = { root, base, model, key: keys ? "YOUR_KEY" : "dynamo", keys, context: contexts.get(model) };
    for (const [pre, lines] of blocks) setText(pre, lines(given).join("\n"));
  }

  async function readContexts() {
    reading = true;
    try {
      contexts = new Map((await getJson("v1/models")).data.map((one) => [one.id, one.context_window]));
      draw();
    } catch {
      // Tried again with the next sample; until then the settings do without.
    } finally {
      reading = false;
    }
  }

  setText(byId("connect-url"), base);
  select.addEventListener("change", draw);
  draw();
  return (models, needsKeys) => {
    keys = needsKeys;
    const local = /^(localhost|127\.|\[::1\])/.test(location.host);
    setText(byId("connect-note"), [
      keys ? "Each client needs an API key: dynamo key add NAME." : "No key is needed; clients that insist on one may send any text.",
      local ? "This address works on this machine only; docs/security.md says how to open it to others." : "",
    ].join(" "));
    fillSelect(select, models);
    draw();
    if (!reading && models.some((model) => !contexts.has(model))) readContexts(); // one that loads is not listed yet
  };
}
