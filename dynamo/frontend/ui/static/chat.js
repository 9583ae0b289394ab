// Conversations with one model or two, streamed from /v1/chat/completions and kept in this browser.

import { describe, Frames } from "./answer.js";
import { bodyOf, isEmpty, newAnswer, receive } from "./completion.js";
import { ConversationList } from "./conversation_list.js";
import { newId } from "./conversations.js";
import { byId, counted, fillSelect, NONE, setText } from "./dom.js";
import { Attachments } from "./images.js";
import { load } from "./markdown.js";
import { getJson } from "./server.js";
import { TurnLog } from "./turns.js";

const SAVE_MS = 5000;
const SAVED_WHILE_RUNNING = 2e6; // characters: to copy more of them takes too long
const OPEN = "dynamo-chat-open";
const SETTINGS = {
  system: "chat-system", temperature: "chat-temperature", top_p: "chat-top-p", seed: "chat-seed",
  max_tokens: "chat-tokens", stop: "chat-stop-texts", tools: "chat-tools",
};

// `onRefused` is called when the key is not valid any more.
export function install(onRefused) {
  const text = byId("chat-text");
  const selects = [byId("chat-model"), byId("chat-second")];
  let about = { role: "none", name: "" };
  let owner = null; // the name of the key
  let names = [];
  let wanted = ["", NONE];
  let maxImages = new Map();
  let visible = false;
  let loaded = false; // what renders Markdown
  let conversation = fresh();
  let running = null; // the question that is being answered
  let editing = -1; // the turn that the next question replaces

  const say = (what) => setText(byId("chat-stats"), what);
  const attachments = new Attachments(say);
  const log = new TurnLog({
    edit: (turn) => beginEdit(turn),
    regenerate: () => regenerate(),
    results: (results) => ask({ text: "", images: [], results }, conversation.turns.length),
  });
  const list = new ConversationList({
    open, onChange, say, isOpen: (id) => id === conversation.id,
    onDelete: () => begin(),
  });

  function fresh() {
    return { id: newId(), owner, title: "", changed: 0, revision: 0, size: 0, models: wanted, settings: settings(), turns: [] };
  }

  function settings() {
    return Object.fromEntries(Object.entries(SETTINGS).map(([name, id]) => [name, byId(id).value]));
  }

  function draw() {
    log.draw(conversation.turns);
    showButtons();
  }

  function showButtons() {
    log.showButtons(conversation.turns, !running, about.role);
    byId("chat-send").disabled = Boolean(running);
    byId("chat-stop").disabled = !running;
  }

  // -- questions

  function chosen() {
    const [first, second] = selects.map((one) => one.value);
    return names.includes(second) && second !== first ? [first, second] : [first];
  }

  function isReady({ images }) {
    const limit = Math.min(...chosen().map((name) => maxImages.get(name) ?? 0));
    const invalid = Object.values(SETTINGS).map(byId).find((one) => !one.checkValidity());
    if (invalid) {
      byId("chat-settings").open = true;
      invalid.reportValidity();
    } else if (!chosen()[0]) say("No model is served now.");
    else if (images.length > limit) say(limit ? `This model takes at most ${counted(limit, "image")} in a request.` : "A chosen model takes no images: remove them, or choose another model.");
    else return true;
    return false;
  }

  // Asks a question in place of the turns from `from` on. They return if it gets no answer.
  async function ask(question, from) {
    if (running || !isReady(question)) return;
    const turn = { ...question, answers: chosen().map(newAnswer) };
    const run = { conversation, turn, from, abort: new AbortController(), savedAt: performance.now(), refused: false };
    Object.assign(conversation, { settings: settings(), models: selects.map((one) => one.value), changed: Date.now() });
    conversation.title ||= (question.text || "images").slice(0, 80);
    run.replaced = conversation.turns.splice(from, Infinity, turn);
    let bodies;
    try {
      bodies = turn.answers.map((answer, column) => bodyOf(conversation, column));
    } catch (error) {
      conversation.turns.splice(from, Infinity, ...run.replaced);
      say(error.message);
      return;
    }
    running = run;
    run.frames = new Frames(() => drawAnswers(run));
    endEdit();
    text.value = "";
    attachments.set([]);
    if (run.replaced.length) log.draw(conversation.turns);
    else log.add(turn);
    showButtons();
    say("waiting for the first token");
    keep(run.conversation);
    await Promise.all(bodies.map((body, column) => answerOne(run, turn.answers[column], body)));
    finish(run);
  }

  function drawAnswers(run) {
    log.update(run.turn.answers);
    if (byId("chat-stats").textContent.startsWith("waiting") && run.turn.answers.some((one) => one.tokens)) say("answering");
  }

  async function answerOne(run, answer, body) {
    const onPart = () => {
      if (run === running) run.frames.request();
      if (performance.now() - run.savedAt < SAVE_MS || run.conversation.size > SAVED_WHILE_RUNNING) return;
      run.savedAt = performance.now();
      keep(run.conversation);
    };
    try {
      await receive(answer, body, run.abort.signal, onPart);
      answer.state = "done";
      if (isEmpty(answer)) answer.note ||= "the answer is empty";
    } catch (error) {
      const stopped = error.name === "AbortError";
      answer.state = stopped ? "stopped" : "failed";
      answer.note = stopped ? "stopped" : error.message;
      run.refused ||= error.status === 401;
    }
    if (run === running) run.frames.request();
  }

  function finish(run) {
    const { turn, conversation: { turns } } = run;
    const lost = turn.answers.every((one) => isEmpty(one) && !one.thoughts);
    if (lost) turns.splice(turns.indexOf(turn), 1, ...run.replaced);
    if (lost && !turns.length) list.forget(run.conversation);
    else keep(run.conversation);
    if (run !== running) return; // the reader has left it
    running = null;
    run.frames.end();
    drawAnswers(run);
    const note = turn.answers.find((one) => one.state !== "done")?.state;
    say([...new Set([describe(turn.answers[0]), note])].filter(Boolean).join(" · ") || "the answer is empty");
    if (lost) giveBack(run);
    showButtons();
    if (run.refused) onRefused();
  }

  // A question without an answer: it stays on screen, its words return to the box.
  function giveBack({ turn, replaced, from }) {
    const node = log.node.lastChild;
    if (replaced.length) draw();
    log.giveUp(node, "not answered, and not part of the conversation");
    if (turn.results || text.value) return;
    text.value = turn.text;
    attachments.set(turn.images);
    if (replaced.length) beginEdit(conversation.turns[from], false);
  }

  function regenerate() {
    const { text: words, images, results } = conversation.turns.at(-1);
    ask({ text: words, images, results }, conversation.turns.length - 1);
  }

  function beginEdit(turn, fill = true) {
    editing = conversation.turns.indexOf(turn);
    byId("chat-editing").hidden = editing < 0;
    if (!fill || editing < 0) return;
    text.value = turn.text;
    attachments.set(turn.images);
    text.focus();
  }

  function endEdit() {
    editing = -1;
    byId("chat-editing").hidden = true;
  }

  // -- conversations

  async function keep(one) {
    const outcome = await list.save(one);
    if (one !== conversation) return;
    if (outcome === "deleted") begin("This conversation was deleted in another tab.");
    else if (outcome === "copied") say("Another tab has changed this conversation; yours is kept as a copy.");
    else if (outcome !== "saved") say(`not kept in this browser: ${outcome.message}`);
    remember();
  }

  function remember() {
    if (owner !== null && conversation.revision) sessionStorage.setItem(OPEN, conversation.id);
    else sessionStorage.removeItem(OPEN);
    list.mark();
  }

  // Stops the answer that arrives; what there is of it stays in its conversation.
  function leave() {
    const left = running;
    running = null;
    left?.frames.end();
    left?.abort.abort();
    endEdit();
  }

  function show(next) {
    leave();
    conversation = next;
    draw();
    say("");
    remember();
  }

  function begin(why = "") {
    show(fresh());
    say(why);
  }

  async function open(id) {
    const found = await list.read(id);
    if (found?.owner !== owner) return;
    for (const [name, field] of Object.entries(SETTINGS)) byId(field).value = found.settings[name] ?? "";
    wanted = found.models;
    show(ended(found));
    fill(true);
  }

  // Whether more of the same answer has arrived in another tab: it is shown when it is complete.
  function isPart({ turns }) {
    return turns.length === conversation.turns.length && turns.at(-1)?.answers.some((one) => one.state === "running");
  }

  // An answer that has no end in the browser's storage gets one.
  function ended(found) {
    for (const answer of found.turns.flatMap((turn) => turn.answers)) {
      if (answer.state !== "running") continue;
      answer.note = "not complete: its page was closed, or another tab still receives it";
      answer.state = "stopped";
    }
    return found;
  }

  // Another tab has changed or deleted a conversation.
  async function onChange(id) {
    if (id !== conversation.id) return;
    const found = await list.read(id);
    if (id !== conversation.id) return;
    if (!found && conversation.revision) begin("This conversation was deleted in another tab.");
    else if (found && !running && found.revision !== conversation.revision && !isPart(found)) {
      const { turns, revision, title, size } = ended(found);
      Object.assign(conversation, { turns, revision, title, size });
      endEdit();
      draw();
    }
  }

  // -- models

  function fill(force = false) {
    if (force) for (const one of selects) one.replaceChildren();
    fillSelect(selects[0], names, wanted[0]);
    fillSelect(selects[1], [NONE, ...names], wanted[1]);
    selects[1].closest("span").hidden = names.length < 2;
    const gone = wanted.find((one) => one && one !== NONE && !names.includes(one));
    if (gone && names.length && !running) say(`${gone} is not served now.`);
    attachments.allow(Math.min(...chosen().map((name) => maxImages.get(name) ?? 0)));
  }

  async function readModels() {
    try {
      maxImages = new Map((await getJson("v1/models")).data.map((one) => [one.id, one.max_images ?? 0]));
      fill();
    } catch {
      // Read again when the models change, or the section is opened.
    }
  }

  // -- events

  byId("chat-form").addEventListener("submit", (event) => {
    event.preventDefault();
    const words = text.value.trim();
    if (words) ask({ text: words, images: attachments.images }, editing < 0 ? conversation.turns.length : editing);
  });
  text.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      byId("chat-form").requestSubmit();
    } else if (event.key === "Escape") endEdit();
  });
  byId("chat-cancel").addEventListener("click", () => {
    endEdit();
    text.value = "";
    attachments.set([]);
    text.focus();
  });
  byId("chat-stop").addEventListener("click", () => running?.abort.abort());
  byId("chat-clear").addEventListener("click", () => {
    begin();
    text.focus();
  });
  selects.forEach((select, index) => select.addEventListener("change", () => {
    wanted = wanted.with(index, select.value);
    fill();
  }));

  return {
    async show(on) {
      if (visible === on) return;
      visible = on;
      if (!on) return;
      readModels();
      const isNew = !loaded;
      loaded = await load();
      if (running || !isNew) log.scroll();
      else draw();
    },
    update(models) {
      const known = names.join("\n");
      names = models;
      if (names.join("\n") === known) return;
      fill();
      if (visible) readModels();
    },
    // Each key's name has its own conversations; without a key that is valid none are shown.
    async signIn(now) {
      about = now;
      const next = now.role === "none" ? null : now.name;
      if (next === owner) {
        showButtons();
        return;
      }
      const last = sessionStorage.getItem(OPEN);
      owner = next;
      list.show(owner);
      if (owner !== null && conversation.owner === owner) draw();
      else if (owner === null) {
        leave();
        log.clear();
        sessionStorage.removeItem(OPEN);
      } else {
        text.value = "";
        attachments.set([]);
        begin();
        if (last) await open(last);
      }
    },
  };
}
