// A question to /v1/chat/completions: its body from a conversation, and the answer as it arrives.

import { newId } from "./conversations.js";
import { events, headers, refusal } from "./server.js";

const LOST = "the connection to the frontend was lost; is it running? See: dynamo ps";
const NUMBERS = ["temperature", "top_p", "seed", "max_tokens"];

// `state` is running, done, stopped or failed; `note` says why it ended early.
export function newAnswer(model) {
  return { model, text: "", thoughts: "", calls: [], id: newId(), state: "running", note: "", ttft_s: null, tokens: 0, decode_s: 0 };
}

export function isEmpty(answer) {
  return !answer.text && !answer.calls.length;
}

// The body of the question of the last turn to the model of `column`. Raises an Error that names the
// field for a setting that can't be sent.
export function bodyOf(conversation, column) {
  const { settings, turns } = conversation;
  const body = { model: turns.at(-1).answers[column].model, messages: messages(conversation, column), stream: true };
  body.stream_options = { include_usage: true };
  for (const name of NUMBERS) if (settings[name] !== "") body[name] = Number(settings[name]);
  const stop = settings.stop.split("\n").filter(Boolean);
  if (stop.length) body.stop = stop;
  if (settings.tools.trim()) body.tools = parseTools(settings.tools);
  return body;
}

export function parseTools(text) {
  try {
    const tools = JSON.parse(text);
    if (Array.isArray(tools)) return tools;
  } catch (error) {
    throw new Error(`Tools: ${error.message}`, { cause: error });
  }
  throw new Error('Tools: expected a list, such as [{"type": "function", "function": {"name": "now"}}]');
}

function messages({ settings, turns }, column) {
  const found = settings.system.trim() ? [{ role: "system", content: settings.system }] : [];
  turns.forEach((turn, index) => {
    const answer = turn.answers[column] ?? turn.answers[0];
    const isLast = index === turns.length - 1;
    if (!isLast && isEmpty(answer)) return; // this model has not answered it
    found.push(...asked(turn));
    if (!isLast) found.push(...answered(answer, turns[index + 1].results));
  });
  return found;
}

function asked({ text, images, results }) {
  if (results) return results.map(({ id, text: content }) => ({ role: "tool", tool_call_id: id, content }));
  if (!images.length) return [{ role: "user", content: text }];
  const parts = images.map(({ url }) => ({ type: "image_url", image_url: { url } }));
  return [{ role: "user", content: [...parts, { type: "text", text }] }];
}

// Calls without results are left out: chat templates expect both.
function answered({ text, calls }, results) {
  if (!results) return text ? [{ role: "assistant", content: text }] : [];
  const tool_calls = calls.map(({ id, name, arguments: given }) => ({ id, type: "function", function: { name, arguments: given } }));
  return [{ role: "assistant", content: text || null, tool_calls }];
}

// Names the failure that browsers call "network error" or "Failed to fetch".
async function lost(promise) {
  try {
    return await promise;
  } catch (error) {
    throw error instanceof TypeError ? new Error(LOST, { cause: error }) : error;
  }
}

// Fills `answer`, and calls `onChange` after each part. Throws what ended it early.
export async function receive(answer, body, signal, onChange) {
  const begin = performance.now();
  let first = 0;
  const response = await lost(fetch("v1/chat/completions", {
    method: "POST",
    headers: headers({ "content-type": "application/json", "x-request-id": answer.id }),
    body: JSON.stringify(body),
    signal,
  }));
  if (!response.ok) throw await refusal(response);
  let isComplete = false;
  const parts = events(response);
  for (;;) {
    const { value: event, done } = await lost(parts.next());
    if (done) break;
    isComplete ||= event.data === "[DONE]";
    if (!event.data || event.data === "[DONE]") continue;
    const chunk = JSON.parse(event.data);
    if (chunk.error) throw new Error(chunk.error.message ?? "the request failed");
    const choice = chunk.choices?.[0];
    if (choice && add(answer, choice)) {
      first ||= performance.now();
      answer.ttft_s = (first - begin) / 1000;
      answer.tokens += 1;
    }
    if (first) answer.decode_s = (performance.now() - first) / 1000;
    isComplete ||= Boolean(choice?.finish_reason);
    if (chunk.usage) answer.tokens = chunk.usage.completion_tokens;
    onChange();
  }
  if (!isComplete) throw new Error(LOST);
}

function add(answer, { delta = {}, finish_reason: reason }) {
  if (reason === "length") answer.note = "ended at the limit of tokens";
  else if (reason && reason !== "stop" && reason !== "tool_calls") answer.note = `ended: ${reason}`;
  const thought = delta.reasoning_content ?? delta.reasoning;
  for (const part of delta.tool_calls ?? []) {
    const call = answer.calls[part.index ?? 0] ??= { id: "", name: "", arguments: "" };
    call.id ||= part.id ?? "";
    call.name ||= part.function?.name ?? "";
    call.arguments += part.function?.arguments ?? "";
  }
  answer.text += delta.content ?? "";
  answer.thoughts += thought ?? "";
  return Boolean(delta.content || thought || delta.tool_calls?.length);
}
