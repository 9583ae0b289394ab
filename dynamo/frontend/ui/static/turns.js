// The turns of a conversation on the page: a question, and the answer of each model to it.

import { AnswerView } from "./answer.js";
import { byId, copy, make } from "./dom.js";
import { thumbnail } from "./images.js";

const NEAR_PX = 60;
const AT_ONCE_MS = 30;

// `edit(turn)`, `regenerate()` and `results(results)` are called by the buttons.
export class TurnLog {
  constructor({ edit, regenerate, results }) {
    Object.assign(this, { edit, regenerate, results });
    this.node = byId("chat-log");
    this.views = new WeakMap(); // answer → its view
    this.left = []; // turns above those that are drawn
    this.buttonsOf = () => {};
    this.node.addEventListener("click", (event) => {
      const button = event.target.closest(".copy-code");
      if (button) copy(button.closest(".code").querySelector("code").textContent, button);
    });
  }

  // The newest first: a long conversation is drawn in several frames.
  draw(turns) {
    this.node.replaceChildren();
    this.drawAbove(this.left = [...turns]);
    this.scroll();
  }

  drawAbove(left) {
    if (left !== this.left) return; // another conversation is drawn now
    const begin = performance.now();
    this.follow(() => {
      while (left.length && performance.now() - begin < AT_ONCE_MS) this.node.prepend(this.turn(left.pop()));
      this.buttonsOf();
    });
    if (left.length) requestAnimationFrame(() => this.drawAbove(left));
  }

  add(turn) {
    this.node.append(this.turn(turn));
    this.scroll();
  }

  clear() {
    this.draw([]);
  }

  scroll() {
    this.node.scrollTop = this.node.scrollHeight;
  }

  // The end stays in view, unless the reader has scrolled up.
  follow(change) {
    const below = this.node.scrollHeight - this.node.scrollTop - this.node.clientHeight < NEAR_PX;
    change();
    if (below) this.scroll();
  }

  // Shows what has arrived.
  update(answers) {
    this.follow(() => {
      for (const answer of answers) this.views.get(answer).draw();
    });
  }

  // Keeps the last turn on screen, although it is not part of the conversation any more.
  giveUp(node, text) {
    if (node !== this.node.lastChild) this.node.append(node);
    for (const button of node.querySelectorAll("button, a")) button.remove();
    node.append(make("p", { class: "dim" }, text));
    this.scroll();
  }

  // The buttons: those of the last answer, none while an answer arrives.
  showButtons(turns, isIdle, role) {
    this.buttonsOf = () => this.drawButtons(turns, isIdle, role);
    this.follow(this.buttonsOf);
  }

  drawButtons(turns, isIdle, role) {
    turns.forEach((turn, index) => {
      const isLast = isIdle && index === turns.length - 1;
      for (const answer of turn.answers) {
        if (!this.views.has(answer)) continue;
        const { acts, node } = this.views.get(answer);
        const state = [answer.state, isLast, role].join();
        if (acts.dataset.state === state) continue;
        acts.dataset.state = state;
        acts.replaceChildren(...(answer.state === "running" ? [] : this.buttons(answer, isLast, role)));
        node.querySelector(".results")?.remove();
        if (isLast && turn.answers.length === 1 && answer.calls.length) node.lastChild.before(this.resultsForm(answer));
      }
    });
    for (const button of this.node.querySelectorAll(".edit")) button.disabled = !isIdle;
  }

  turn(turn) {
    const who = make("div", { class: "row who" }, make("span", { class: "grow" }, turn.results ? "results of tools" : "you"));
    if (!turn.results) {
      who.append(make("button", { type: "button", class: "quiet edit", "aria-label": "Edit the question", onclick: () => this.edit(turn) }, "Edit"));
    }
    const words = turn.results ? turn.results.map((one) => `${one.name}: ${one.text}`).join("\n") : turn.text;
    const question = make("div", { class: "message user" }, who, make("div", { class: "words" }, words));
    if (turn.images.length) question.append(make("div", { class: "row" }, ...turn.images.map(thumbnail)));
    const answers = turn.answers.map((answer) => {
      const view = new AnswerView(answer);
      this.views.set(answer, view);
      return view.node;
    });
    return make("div", { class: "turn" }, question, make("div", { class: `answers n${answers.length}` }, ...answers));
  }

  buttons(answer, isLast, role) {
    const copied = make("button", { type: "button", class: "quiet", "aria-label": "Copy the answer", onclick: () => copy(answer.text, copied) }, "Copy");
    const again = make("button", { type: "button", class: "quiet", onclick: () => this.regenerate() }, "Regenerate");
    return [...(answer.text ? [copied] : []), ...(isLast ? [again] : []), this.receipt(answer, role)];
  }

  receipt(answer, role) {
    if (role === "operator") return make("a", { href: `#requests/${answer.id}` }, "Receipt");
    const tell = () => {
      answer.note = `Receipts are for operators. The id of this request: ${answer.id}`;
      this.views.get(answer).draw();
    };
    return make("button", { type: "button", class: "quiet", onclick: tell }, "Receipt");
  }

  resultsForm(answer) {
    const boxes = answer.calls.map(({ name }) => make("textarea", { rows: 2, "aria-label": `Result of ${name}`, placeholder: `result of ${name}` }));
    const form = make("form", { class: "results" }, ...boxes, make("button", {}, "Send results"));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.results(answer.calls.map(({ id, name }, index) => ({ id, name, text: boxes[index].value })));
    });
    return form;
  }
}
