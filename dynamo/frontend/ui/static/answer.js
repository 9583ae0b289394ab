// An answer on the page, drawn at most once a frame while it arrives.

import { isEmpty } from "./completion.js";
import { counted, make, seconds, setText } from "./dom.js";
import { MarkdownView } from "./markdown.js";

const QUICK_MS = 8;
const SHARE = 4; // of the time goes to drawing: one part
const LONGEST_PAUSE_MS = 500;

// Calls `draw` in the next frame after a request. A slow drawing, as of a list of thousands of lines,
// makes a pause, so that the page answers to its reader.
export class Frames {
  constructor(draw) {
    this.draw = draw;
    this.frame = 0;
    this.timer = 0;
  }

  request() {
    if (!this.frame && !this.timer) this.frame = requestAnimationFrame(() => this.run());
  }

  run() {
    this.frame = 0;
    const begin = performance.now();
    this.draw();
    const took = performance.now() - begin;
    if (took < QUICK_MS) return;
    this.timer = setTimeout(() => {
      this.timer = 0;
      this.request();
    }, Math.min(took * SHARE, LONGEST_PAUSE_MS));
  }

  end() {
    cancelAnimationFrame(this.frame);
    clearTimeout(this.timer);
    this.frame = this.timer = 0;
  }
}

export class AnswerView {
  constructor(answer) {
    this.answer = answer;
    this.thoughts = null;
    this.calls = [];
    this.drawn = "";
    const body = make("div", { class: "body" });
    this.markdown = new MarkdownView(body);
    this.after = make("div");
    this.note = make("p", { class: "dim", hidden: true });
    this.stats = make("span", { class: "dim stats" });
    this.acts = make("span", { class: "row" });
    const foot = make("div", { class: "row foot" }, this.stats, make("span", { class: "grow" }), this.acts);
    this.body = body;
    this.node = make("div", { class: "message assistant" }, make("div", { class: "who" }, answer.model), body, this.after, this.note, foot);
    this.draw();
  }

  draw() {
    const { answer } = this;
    const isComplete = answer.state !== "running";
    if (answer.thoughts) this.drawThoughts(isComplete);
    if (answer.text !== this.drawn || isComplete) this.markdown.update(this.drawn = answer.text, isComplete);
    answer.calls.forEach((call, index) => this.drawCall(call, index, isComplete));
    setText(this.stats, describe(answer));
    this.note.hidden = !answer.note;
    this.note.className = answer.state === "failed" ? "error" : "dim";
    setText(this.note, answer.note);
  }

  drawThoughts(isComplete) {
    const { answer } = this;
    if (!this.thoughts) {
      const text = document.createTextNode("");
      const summary = make("summary");
      this.thoughts = { text, summary };
      this.body.before(make("details", { class: "fold" }, summary, make("div", { class: "thoughts" }, text)));
    }
    const { text, summary } = this.thoughts;
    text.appendData(answer.thoughts.slice(text.length));
    setText(summary, isComplete || !isEmpty(answer) ? "Reasoning" : "Reasoning …");
  }

  drawCall(call, index, isComplete) {
    if (!call) return;
    if (!this.calls[index]) {
      const name = make("summary");
      const given = make("code");
      const pre = make("pre", { tabIndex: 0, role: "region", "aria-label": "Arguments" }, given);
      this.after.append(make("details", { class: "fold" }, name, pre));
      this.calls[index] = { name, given };
    }
    const { name, given } = this.calls[index];
    setText(name, `Tool call: ${call.name}`);
    setText(given, isComplete ? indented(call.arguments) : call.arguments);
  }
}

function indented(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

export function describe({ ttft_s: ttft, tokens, decode_s: decode, state }) {
  if (ttft === null) return state === "running" ? "waiting for the first token" : "";
  const parts = [`TTFT ${seconds(ttft)}`, counted(tokens, "token")];
  if (tokens > 1 && decode > 0) parts.push(`${((tokens - 1) / decode).toFixed(1)} tokens/s`);
  return parts.join(" · ");
}
