// Elements, formats and tables. All text goes through textContent: names, prompts and logs come
// from outside. Nodes are kept between samples, so that focus and selection stay.

export function byId(id) {
  return document.getElementById(id);
}

export function make(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (name === "class") node.className = value;
    else if (name === "data") Object.assign(node.dataset, value);
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name in node && name !== "list") node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

export function setText(node, value) {
  const text = value ?? "";
  if (node.textContent !== text) node.textContent = text;
}

// Writes only what differs: a write of the same value still costs a style recalculation.
export function set(node, name, value) {
  if (node[name] !== value) node[name] = value;
}

function toggle(node, name, on) {
  if (node.classList.contains(name) !== on) node.classList.toggle(name, on);
}

export const NONE = "–";

export function bytes(count) {
  if (count == null) return NONE;
  const gib = count / 2 ** 30;
  if (gib >= 1) return `${gib >= 100 ? gib.toFixed(0) : gib.toFixed(1)} GiB`;
  return `${Math.round(count / 2 ** 20)} MiB`;
}

export function seconds(value) {
  if (value == null) return NONE;
  if (value < 0.001) return `${(value * 1e6).toFixed(0)} µs`;
  if (value < 0.01) return `${(value * 1e3).toFixed(1)} ms`;
  if (value < 1) return `${Math.round(value * 1e3)} ms`;
  if (value < 60) return `${value.toFixed(value < 10 ? 2 : 1)} s`;
  return age(value);
}

export function age(value) {
  if (value == null) return NONE;
  if (value < 60) return `${Math.floor(value)} s`;
  if (value < 3600) return `${Math.floor(value / 60)} min ${Math.floor(value % 60)} s`;
  if (value < 86400) return `${Math.floor(value / 3600)} h ${Math.floor((value % 3600) / 60)} min`;
  return `${Math.floor(value / 86400)} d ${Math.floor((value % 86400) / 3600)} h`;
}

export function percent(share) {
  return share == null ? NONE : `${Math.round(share * 100)} %`;
}

export function rate(value) {
  if (value == null) return NONE;
  return value >= 100 || value === 0 ? Math.round(value).toLocaleString("en-US") : value.toFixed(1);
}

export function count(value) {
  return value == null ? NONE : value.toLocaleString("en-US");
}

// "1 token", "1,024 tokens".
export function counted(value, noun) {
  return `${count(value)} ${noun}${value === 1 ? "" : "s"}`;
}

// Orders names: Worker_2 before Worker_10.
export const natural = new Intl.Collator("en", { numeric: true }).compare;

export function clock(at_s) {
  return new Date(at_s * 1000).toLocaleTimeString("en-GB");
}

// -- small parts

// Sets the options, each a text or [value, label], if they changed, and keeps the choice; returns
// whether another one is chosen now.
export function fillSelect(select, options, wanted = select.value) {
  const before = select.value;
  const pairs = options.map((one) => (Array.isArray(one) ? one : [one, one]));
  const present = [...select.options].map((one) => [one.value, one.textContent]);
  if (JSON.stringify(present) !== JSON.stringify(pairs)) {
    select.replaceChildren(...pairs.map(([value, label]) => make("option", { value }, label)));
    const values = pairs.map(([value]) => value);
    select.value = [wanted, before].find((one) => values.includes(one)) ?? values[0] ?? "";
  }
  return select.value !== before;
}

export function badge(node, state, text = state) {
  const name = `badge ${state}`;
  if (node.className !== name) node.className = name;
  setText(node, text);
}

export function bar(node, share, text) {
  if (!node.firstChild) {
    node.append(make("span", { class: "track" }, make("span", { class: "fill" })), make("span"));
  }
  const fill = node.firstChild.firstChild;
  set(node.firstChild, "hidden", share == null);
  const width = `${Math.round(1000 * Math.min(1, Math.max(0, share ?? 0))) / 10}%`;
  if (fill.style.width !== width) fill.style.width = width;
  toggle(fill, "high", share > 0.9);
  setText(node.lastChild, text);
}

export async function copy(text, button) {
  let done = true;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // Plain http on another host than localhost has no clipboard.
    const area = make("textarea", { value: text, class: "hidden" });
    document.body.append(area);
    area.select();
    done = document.execCommand("copy");
    area.remove();
  }
  const before = button.dataset.label ?? button.textContent;
  button.dataset.label = before;
  setText(button, done ? "Copied" : "Press Ctrl+C");
  setTimeout(() => setText(button, before), 1200);
}

export function command(text) {
  const button = make("button", { type: "button", class: "quiet", title: "Copy the command" }, "Copy");
  button.addEventListener("click", () => copy(text, button));
  return make("span", { class: "command" }, make("code", {}, text), button);
}

// A sentence with commands: in backticks, or ours after a colon.
export function sentence(text) {
  const parts = text.replace(/(?<=: )dynamo [a-z]+[\w ./:=-]*(?=;|$)/g, "`$&`").split("`");
  const nodes = parts.map((part, index) =>
    index % 2 && index < parts.length - 1 ? command(part) : document.createTextNode(part));
  return make("span", {}, ...nodes);
}

// -- tables

// `columns`: {label, class, fill(cell, row)} or {label, class, text(row)}. `key(row)` identifies a
// row. `note(cell, row)` fills a second line and returns whether it is shown. A column that is
// `optional` is hidden while no row has a value in it. With `onSort(column)`, the label of a column
// that has `sort` is a button. Rows of which `group(row)` of an update is the same, and that follow
// each other, have a heading.
export function liveTable(table, columns, { key, empty, note, onSort }) {
  const head = make("tr", {}, ...columns.map((one) =>
    make("th", { scope: "col", class: one.class ?? "" }, onSort && one.sort
      ? make("button", { type: "button", class: "sort", onclick: () => onSort(one) }, one.label)
      : one.label)));
  const nothing = make("td", { class: "empty", colSpan: columns.length }, empty);
  const blank = make("tbody", { hidden: true }, make("tr", {}, nothing));
  const rows = new Map();
  const heads = new Map();
  table.append(make("thead", {}, head), blank);

  function build() {
    const cells = columns.map((one) =>
      make("td", { class: one.class ?? "", data: { label: one.label } }));
    const body = make("tbody", {}, make("tr", {}, ...cells));
    const entry = { body, cells, note: null };
    if (note) {
      entry.note = make("td", { class: "note", colSpan: columns.length });
      body.append(make("tr", { class: "note", hidden: true }, entry.note));
    }
    return entry;
  }

  function hideEmptyColumns() {
    columns.forEach((one, index) => {
      if (!one.optional) return;
      const cells = [...rows.values()].map((entry) => entry.cells[index]);
      const empty = cells.every((cell) => cell.textContent === NONE);
      for (const cell of [head.children[index], ...cells]) set(cell, "hidden", empty);
    });
  }

  function heading(name, text) {
    let entry = heads.get(name);
    if (!entry) {
      const cell = make("th", { colSpan: columns.length, scope: "rowgroup" });
      heads.set(name, entry = { body: make("tbody", { class: "group" }, make("tr", {}, cell)), cell });
    }
    setText(entry.cell, text);
    return entry.body;
  }

  // A node that is moved loses the focus.
  function place(body, before) {
    if (before.nextSibling !== body) before.after(body);
    return body;
  }

  return function update(items, { group, empty: why = empty } = {}) {
    const active = document.activeElement;
    const left = new Set(rows.keys());
    const idle = new Set(heads.keys());
    let [before, last] = [table.tHead, null];
    for (const item of items) {
      const name = key(item);
      const found = group?.(item);
      if (found && found.name !== last) {
        last = found.name;
        idle.delete(last);
        before = place(heading(last, found.text), before);
      }
      let entry = rows.get(name);
      if (!entry) rows.set(name, entry = build());
      left.delete(name);
      columns.forEach((one, index) => {
        const cell = entry.cells[index];
        if (one.fill) one.fill(cell, item);
        else setText(cell, one.text(item));
        toggle(cell, "none", cell.textContent === NONE);
      });
      if (note) set(entry.note.parentNode, "hidden", !note(entry.note, item));
      before = place(entry.body, before);
    }
    for (const name of left) {
      rows.get(name).body.remove();
      rows.delete(name);
    }
    for (const name of idle) {
      heads.get(name).body.remove();
      heads.delete(name);
    }
    if (active !== document.activeElement && table.contains(active)) active.focus({ preventScroll: true });
    hideEmptyColumns();
    setText(nothing, why);
    set(blank, "hidden", items.length > 0);
    if (!blank.isConnected) table.append(blank);
  };
}

// Why something is not ready, and what to do: for the second line of a row.
export function causeNote(cell, row) {
  const text = `${row.cause ?? ""}\n${row.remedy ?? ""}`;
  if (cell.dataset.text !== text) {
    cell.dataset.text = text;
    cell.replaceChildren();
    if (row.cause) cell.append(make("span", {}, row.cause));
    if (row.remedy) cell.append(command(row.remedy));
  }
  return Boolean(row.cause || row.remedy);
}
