// A long table with tools: a filter, an order, groups. What was chosen is kept in the tab.

import { liveTable, make, natural, set, setText } from "./dom.js";

const FEW = 6;

function stored(name) {
  try {
    return JSON.parse(sessionStorage.getItem(name)) ?? {};
  } catch {
    return {};
  }
}

function compare(one, other) {
  if (one == null || other == null) return (one == null) - (other == null);
  return typeof one === "number" ? one - other : natural(one, other);
}

function select(id, label, names, value) {
  const node = make("select", { id }, ...Object.entries(names).map(([key, text]) => make("option", { value: key }, text)));
  node.value = names[value] === undefined ? "" : value;
  return { node, part: make("span", { class: "pairing" }, make("label", { for: id }, label), node) };
}

// `words(row)` is the text that the filter looks in, `states` the states to choose from, `groups`
// has functions of a row by their label, `things` names the rows. The rest is for `liveTable`.
export function toolTable(table, columns, { words, states, groups = {}, things, ...rest }) {
  const id = `list-${table.id}`;
  const choice = { filter: "", state: "", group: "", sort: "", down: false, ...stored(id) };
  const update = liveTable(table, columns, { ...rest, onSort });
  let items = [];

  const filter = make("input", {
    id: `${id}-filter`, type: "search", spellcheck: false, value: choice.filter, placeholder: "name, model, state, GPU",
  });
  const labels = (names) => Object.fromEntries(names.map((one) => [one, one]));
  const sorts = columns.filter((one) => one.sort).map((one) => one.label);
  const state = select(`${id}-state`, "State", { "": "all", ...states }, choice.state);
  const group = select(`${id}-group`, "Group by", { "": "nothing", ...labels(Object.keys(groups)) }, choice.group);
  const order = select(`${id}-sort`, "Order", { "": "as in the graph", ...labels(sorts) }, choice.sort);
  const shown = make("span", { class: "dim", role: "status" });
  const tools = make("div", { class: "row tools", hidden: true },
    make("span", { class: "pairing" }, make("label", { for: filter.id }, "Filter"), filter), state.part,
    ...(Object.keys(groups).length ? [group.part] : []), order.part, shown);
  order.part.classList.add("narrow");
  table.before(tools);

  function choose(changes) {
    Object.assign(choice, changes);
    sessionStorage.setItem(id, JSON.stringify(choice));
    order.node.value = choice.sort;
    show();
  }

  function onSort(column) {
    const down = choice.sort === column.label && !choice.down;
    const off = choice.sort === column.label && choice.down;
    choose(off ? { sort: "", down: false } : { sort: column.label, down });
  }

  filter.addEventListener("input", () => choose({ filter: filter.value }));
  state.node.addEventListener("change", () => choose({ state: state.node.value }));
  group.node.addEventListener("change", () => choose({ group: group.node.value }));
  order.node.addEventListener("change", () => choose({ sort: order.node.value, down: false }));

  function matching() {
    const wanted = choice.filter.toLowerCase().split(/\s+/).filter(Boolean);
    return items.filter((row) => {
      if (choice.state && row.state !== choice.state) return false;
      const text = wanted.length ? words(row).toLowerCase() : "";
      return wanted.every((one) => text.includes(one));
    });
  }

  function inOrder(rows, grouped) {
    const column = columns.find((one) => one.label === choice.sort);
    const sign = choice.down ? -1 : 1;
    if (!column?.sort && !grouped) return rows;
    return [...rows].sort((one, other) =>
      (grouped ? natural(grouped(one), grouped(other)) : 0)
      || (column?.sort ? sign * compare(column.sort(one), column.sort(other)) : 0));
  }

  function show() {
    const grouped = groups[choice.group];
    const rows = matching();
    const counts = {};
    for (const row of grouped ? rows : []) counts[grouped(row)] = (counts[grouped(row)] ?? 0) + 1;
    const heading = (row) => ({ name: grouped(row), text: `${grouped(row)} · ${counts[grouped(row)]}` });
    update(inOrder(rows, grouped), {
      group: grouped && heading,
      empty: items.length && !rows.length ? `None of ${items.length} ${things} match the filter.` : undefined,
    });
    columns.forEach((one, index) => {
      const cell = table.tHead.rows[0].cells[index];
      const sorted = one.sort && one.label === choice.sort ? (choice.down ? "descending" : "ascending") : "none";
      if (one.sort && cell.getAttribute("aria-sort") !== sorted) cell.setAttribute("aria-sort", sorted);
    });
    set(tools, "hidden", items.length < FEW && !choice.filter && !choice.state && !choice.group);
    setText(shown, rows.length === items.length ? `${items.length} ${things}` : `${rows.length} of ${items.length} ${things}`);
  }

  return (rows) => {
    items = rows;
    show();
  };
}
