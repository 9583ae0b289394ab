// Recorded bodies of a request, and the same request to another model. Bodies exist only while an
// operator records them: dynamo record --content.

import { make, seconds, setText } from "./dom.js";
import { events, getJson, headers, refusal } from "./server.js";

let recording = false;
let models = [];

export function noteRecording(status) {
  recording = Boolean(status.records_content);
  models = status.models.filter((one) => one.ready).map((one) => one.model);
}

export function isRecorded() {
  return recording;
}

// The text of an answer, or of a piece of a stream, of any of the APIs.
function textOf(data) {
  if (data?.type === "response.output_text.delta") return data.delta;
  if (data?.type?.startsWith("response.")) return "";
  const choice = data?.choices?.[0];
  const message = choice?.delta ?? choice?.message ?? choice;
  const parts = [...(data?.output ?? []), data ?? {}].flatMap((one) => Array.isArray(one.content) ? one.content : []);
  return message?.content ?? message?.text ?? data?.delta?.text ?? parts.map((one) => one.text ?? "").join("");
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}

function recordedAnswer(text) {
  if (!/^(data|event):/.test(text)) return textOf(parsed(text)) || text;
  return text.split("\n").filter((line) => line.startsWith("data:")).map((line) => textOf(parsed(line.slice(5))) ?? "").join("");
}

async function send(path, body, node, state, signal) {
  const begun = performance.now();
  const response = await fetch(path.slice(1), {
    method: "POST", headers: headers({ "content-type": "application/json" }), body: JSON.stringify(body), signal,
  });
  if (!response.ok) throw await refusal(response);
  if (response.headers.get("content-type").startsWith("text/event-stream")) {
    for await (const event of events(response)) node.append(textOf(parsed(event.data)) ?? "");
  } else {
    const text = await response.text();
    setText(node, textOf(parsed(text)) || text);
  }
  setText(state, `answered in ${seconds((performance.now() - begun) / 1000)}`);
}

function replay(found) {
  const body = parsed(found.body);
  if (body === null || typeof body !== "object") return [];
  const others = models.filter((name) => name !== found.model);
  const select = make("select", { "aria-label": "Model of the replay" },
    ...[...others, found.model].map((name) => make("option", {}, name)));
  const answer = make("pre", { class: "recorded", tabIndex: 0, role: "region", "aria-label": "Answer of the replay", hidden: true });
  const state = make("span", { class: "dim", role: "status" });
  const button = make("button", { type: "button" }, "Replay");
  let abort = null;
  button.addEventListener("click", async () => {
    if (abort) {
      abort.abort();
      return;
    }
    abort = new AbortController();
    answer.hidden = false;
    setText(answer, "");
    setText(state, "waiting for the answer");
    setText(button, "Stop");
    try {
      await send(found.path, { ...body, model: select.value }, answer, state, abort.signal);
    } catch (error) {
      setText(state, error.name === "AbortError" ? "stopped" : error.message);
    }
    abort = null;
    setText(button, "Replay");
  });
  return [make("div", { class: "row" }, make("span", {}, "The same request to "), select, button, state), answer];
}

function shown(label, text) {
  return [make("h3", {}, label), make("pre", { class: "recorded", tabIndex: 0, role: "region", "aria-label": label }, text)];
}

// Fills `node` with what is recorded of a request; says so if it is not.
export async function showContent(node, requestId) {
  try {
    const found = await getJson(`ui/content/${encodeURIComponent(requestId)}`);
    const body = parsed(found.body);
    node.replaceChildren(
      ...shown("Body", body === null ? found.body : JSON.stringify(body, null, 1)),
      ...shown("Answer", recordedAnswer(found.response ?? "")),
      ...(found.note ? [make("p", { class: "dim" }, found.note)] : []),
      ...replay(found));
  } catch (error) {
    node.replaceChildren(make("p", { class: "dim" }, error.message));
  }
}
