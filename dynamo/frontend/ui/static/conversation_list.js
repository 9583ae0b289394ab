// The list of the conversations that this browser keeps.

import { ConversationStore } from "./conversations.js";
import { byId, counted, make, setText } from "./dom.js";
import { confirmed } from "./server.js";

const NARROW = "(max-width: 820px)";

// `open(id)` shows one, and `isOpen(id)` says whether it is shown. `onDelete()` is called when that
// one was deleted here, `onChange(id)` when another tab has changed or deleted one.
export class ConversationList {
  constructor({ open, isOpen, onDelete, onChange, say }) {
    Object.assign(this, { open, isOpen, onDelete, say });
    this.owner = null;
    this.items = new Map();
    this.store = new ConversationStore((id) => {
      this.refresh();
      onChange(id);
    });
    byId("chat-kept").open = !matchMedia(NARROW).matches;
    byId("chat-forget").addEventListener("click", () => this.forgetAll());
  }

  show(owner) {
    this.owner = owner;
    this.refresh();
  }

  async read(id) {
    try {
      return await this.store.read(id);
    } catch (error) {
      this.say(`can't be read from this browser: ${error.message}`);
      return undefined;
    }
  }

  async save(conversation) {
    const outcome = await this.store.save(conversation);
    this.refresh();
    return outcome;
  }

  // Of a conversation without turns, which may be kept or still be written.
  async forget(conversation) {
    await this.store.saving;
    if (conversation.turns.length) return; // asked again
    conversation.revision = 0;
    await this.remove([conversation.id]);
  }

  async remove(ids) {
    try {
      await this.store.remove(ids);
    } catch (error) {
      this.say(`can't be deleted from this browser: ${error.message}`);
    }
    await this.refresh();
  }

  async forgetAll() {
    if (!await confirmed(`Delete ${counted(this.items.size, "conversation")}?`, "They are kept in this browser alone and can't be restored.", "Delete")) return;
    await this.delete([...this.items.keys()]);
  }

  async forgetOne(id, title) {
    if (!await confirmed("Delete the conversation?", title, "Delete")) return;
    await this.delete([id]);
  }

  async delete(ids) {
    await this.remove(ids);
    if (ids.some(this.isOpen)) this.onDelete();
  }

  async refresh() {
    let heads = [];
    try {
      if (this.owner !== null) heads = await this.store.list(this.owner);
    } catch {
      // Without storage there is nothing to list; saving says so.
    }
    const left = new Set(this.items.keys());
    heads.forEach((head, index) => {
      left.delete(head.id);
      const item = this.items.get(head.id) ?? this.add(head);
      setText(item.firstChild, head.title);
      item.firstChild.title = head.title;
      const place = byId("chat-list").children[index];
      if (place !== item) byId("chat-list").insertBefore(item, place ?? null);
    });
    for (const id of left) {
      this.items.get(id).remove();
      this.items.delete(id);
    }
    setText(byId("chat-count"), `Conversations (${heads.length})`);
    byId("chat-forget").hidden = !heads.length;
    this.mark();
  }

  add({ id, title }) {
    const open = make("button", { type: "button", class: "link", onclick: () => this.open(id) });
    const remove = make("button", { type: "button", class: "quiet", "aria-label": `Delete the conversation ${title}`, onclick: () => this.forgetOne(id, title) }, "×");
    const item = make("li", {}, open, remove);
    this.items.set(id, item);
    return item;
  }

  mark() {
    for (const [id, item] of this.items) {
      if (this.isOpen(id)) item.firstChild.setAttribute("aria-current", "true");
      else item.firstChild.removeAttribute("aria-current");
    }
  }
}
