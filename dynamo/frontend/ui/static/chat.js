// A conversation with a model, streamed from /v1/chat/completions.

import { byId, make, setText, seconds } from "./dom.js";
import { events, headers, refusal } from "./server.js";
import { fillSelect } from "./logs.js";

export function install() {
  const log = byId("chat-log");
  const form = byId("chat-form");
  const text = byId("chat-text");
  const send = byId("chat-send");
  const stop = byId("chat-stop");
  const stats = byId("chat-stats");
  let messages = [];
  let abort = null;

  function bubble(role, content = "") {
    const words = document.createTextNode(content);
    const body = make("div", { class: "body" }, words);
    const node = make("div", { class: `message ${role}` }, make("div", { class: "who" }, role), body);
    log.append(node);
    log.scrollTop = log.scrollHeight;
    return { node, body, text: words, thoughts: null };
  }

  function think(shown) {
    if (!shown.thoughts) {
      shown.thoughts = document.createTextNode("");
      const body = make("div", { class: "thoughts" }, shown.thoughts);
      shown.body.before(make("details", { open: true }, make("summary", {}, "Reasoning"), body));
    }
    return shown.thoughts;
  }

  function told(run, done) {
    const elapsed = (performance.now() - run.first) / 1000;
    const tokens = run.usage?.completion_tokens ?? run.chunks;
    const parts = [`TTFT ${seconds((run.first - run.start) / 1000)}`, `${tokens} tokens`];
    if (tokens > 1 && elapsed > 0) parts.push(`${((tokens - 1) / elapsed).toFixed(1)} tokens/s`);
    if (done && run.finish && run.finish !== "stop") parts.push(`ended: ${run.finish}`);
    setText(stats, parts.join(" · "));
  }

  function onChunk(chunk, run, shown) {
    if (chunk.error) throw new Error(chunk.error.message ?? "the request failed");
    run.usage = chunk.usage ?? run.usage;
    const choice = chunk.choices?.[0];
    if (!choice) return;
    run.finish = choice.finish_reason ?? run.finish;
    const { content, reasoning_content: thought } = choice.delta ?? {};
    if (!content && !thought) return;
    run.first ||= performance.now();
    run.chunks += 1;
    run.answer += content ?? "";
    run.thoughts += thought ?? "";
    // One layout for each frame, not for each token: a long answer would freeze the page.
    run.frame ||= requestAnimationFrame(() => show(run, shown));
  }

  function show(run, shown) {
    run.frame = 0;
    const below = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
    if (run.thoughts.length > run.thought) {
      think(shown).appendData(run.thoughts.slice(run.thought));
      run.thought = run.thoughts.length;
    }
    if (run.answer.length > run.shown) {
      shown.text.appendData(run.answer.slice(run.shown));
      run.shown = run.answer.length;
    }
    if (below) log.scrollTop = log.scrollHeight;
    told(run, false);
  }

  async function stream(run, shown) {
    const body = { model: byId("chat-model").value, messages: run.messages, stream: true, stream_options: { include_usage: true } };
    const most = byId("chat-tokens").valueAsNumber;
    if (most > 0) body.max_tokens = most;
    const response = await fetch("v1/chat/completions", {
      method: "POST",
      headers: headers({ "content-type": "application/json" }),
      body: JSON.stringify(body),
      signal: abort.signal,
    });
    if (!response.ok) throw await refusal(response);
    for await (const event of events(response)) {
      if (event.data && event.data !== "[DONE]") onChunk(JSON.parse(event.data), run, shown);
    }
  }

  function end(run, shown) {
    cancelAnimationFrame(run.frame);
    if (run.first) show(run, shown);
  }

  async function ask() {
    const question = text.value.trim();
    if (!question || abort) return;
    text.value = "";
    messages.push({ role: "user", content: question });
    const asked = bubble("user", question);
    const shown = bubble("assistant");
    // The conversation of this answer: "New chat" begins another one before it has ended.
    const run = {
      messages, start: performance.now(), first: 0, chunks: 0, usage: null, finish: "",
      answer: "", shown: 0, thoughts: "", thought: 0, frame: 0,
    };
    abort = new AbortController();
    send.disabled = true;
    stop.disabled = false;
    setText(stats, "waiting for the first token");
    try {
      await stream(run, shown);
      end(run, shown);
      if (run.first) told(run, true);
      else setText(stats, "the answer is empty");
    } catch (error) {
      end(run, shown);
      const stopped = error.name === "AbortError";
      shown.node.append(make("div", { class: stopped ? "dim" : "error" }, stopped ? "stopped" : error.message));
      if (!run.first) setText(stats, stopped ? "stopped" : "failed");
    }
    if (run.answer) run.messages.push({ role: "assistant", content: run.answer });
    else {
      run.messages.pop();
      asked.node.append(make("div", { class: "dim" }, "not answered, and not part of the conversation"));
      if (run.messages === messages) text.value ||= question;
    }
    if (run.messages !== messages) setText(stats, "");
    abort = null;
    send.disabled = false;
    stop.disabled = true;
  }

  form.addEventListener("submit", (event) => {
    event.preventDefault();
    ask();
  });
  text.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      ask();
    }
  });
  stop.addEventListener("click", () => abort?.abort());
  byId("chat-clear").addEventListener("click", () => {
    abort?.abort();
    messages = [];
    log.replaceChildren();
    setText(stats, "");
    text.focus();
  });

  return (models) => fillSelect(byId("chat-model"), models);
}
