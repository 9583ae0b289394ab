// The conversations that this browser keeps, in IndexedDB: heads for the list, bodies with the turns.
// Tabs share them. `revision` finds a change by another tab, and a channel announces each change.

const MOST = 100;
const MOST_CHARACTERS = 50e6;
const STORES = ["heads", "bodies"];

export class ConversationStore {
  constructor(onChange) {
    this.opening = null;
    this.saving = Promise.resolve();
    this.channel = new BroadcastChannel("dynamo-chat");
    this.channel.addEventListener("message", (event) => onChange(event.data.id));
  }

  // Of one key's name, the newest first. Rejects if the browser has no storage for the page.
  async list(owner) {
    const heads = await this.run("readonly", (heads) => heads.getAll());
    return heads.filter((one) => one.owner === owner).sort(newest);
  }

  async read(id) {
    return this.run("readonly", (heads, bodies) => bodies.get(id));
  }

  // Returns "saved"; "copied" if another tab has changed it: then this one has a new id; "deleted" if
  // another tab has deleted it; or the error.
  save(conversation) {
    this.saving = this.saving.then(() => this.write(conversation)).catch((error) => error);
    return this.saving;
  }

  async write(conversation) {
    let outcome = "saved";
    const removed = [];
    const body = structuredClone(conversation);
    await this.run("readwrite", (heads, bodies) => {
      const request = bodies.get(body.id);
      request.onsuccess = () => {
        const known = request.result;
        if (!known && body.revision) {
          outcome = "deleted";
          return;
        }
        if (known && known.revision !== body.revision) {
          outcome = "copied";
          Object.assign(body, { id: newId(), revision: 0, title: `${body.title} (copy)` });
        }
        body.revision += 1;
        body.size = characters(body);
        const { id, owner, title, changed, size } = body;
        bodies.put(body);
        heads.put({ id, owner, title, changed, size });
        const all = heads.getAll();
        all.onsuccess = () => {
          for (const id of beyond(all.result, body.id)) {
            heads.delete(id);
            bodies.delete(id);
            removed.push(id);
          }
        };
      };
    });
    if (outcome === "deleted") return outcome;
    const { id, revision, title, size } = body;
    Object.assign(conversation, { id, revision, title, size });
    for (const one of [id, ...removed]) this.channel.postMessage({ id: one });
    return outcome;
  }

  async remove(ids) {
    await this.saving;
    await this.run("readwrite", (heads, bodies) => {
      for (const id of ids) {
        heads.delete(id);
        bodies.delete(id);
      }
    });
    for (const id of ids) this.channel.postMessage({ id });
  }

  async run(mode, work) {
    this.opening ||= open();
    this.opening.catch(() => { this.opening = null; });
    const database = await this.opening;
    return new Promise((resolve, reject) => {
      const transaction = database.transaction(STORES, mode);
      const request = work(transaction.objectStore("heads"), transaction.objectStore("bodies"));
      transaction.oncomplete = () => resolve(request?.result);
      transaction.onabort = () => reject(transaction.error ?? new Error("the browser's storage is full"));
    });
  }
}

// An id without crypto.randomUUID, which pages of other hosts over plain http don't have.
export function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  bytes[6] = (bytes[6] & 15) | 64;
  bytes[8] = (bytes[8] & 63) | 128;
  const digits = [...bytes].map((one) => one.toString(16).padStart(2, "0")).join("");
  return digits.replace(/^(.{8})(.{4})(.{4})(.{4})/, "$1-$2-$3-$4-");
}

function open() {
  return new Promise((resolve, reject) => {
    const request = indexedDB.open("dynamo-chat", 1);
    request.onupgradeneeded = () => {
      for (const name of STORES) request.result.createObjectStore(name, { keyPath: "id" });
    };
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

function characters(value) {
  if (typeof value === "string") return value.length;
  if (value === null || typeof value !== "object") return 8;
  return Object.values(value).reduce((sum, one) => sum + characters(one), 0);
}

function newest(one, other) {
  return other.changed - one.changed;
}

// The ids of the oldest, as many as are over the bounds, but not `kept`.
function beyond(heads, kept) {
  let sum = 0;
  const first = heads.filter((one) => one.id === kept);
  const others = heads.filter((one) => one.id !== kept).sort(newest);
  return [...first, ...others].filter((head, index) => {
    sum += head.size;
    return index && (index >= MOST || sum > MOST_CHARACTERS);
  }).map((one) => one.id);
}
