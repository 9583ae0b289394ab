// Markdown as elements. No text becomes HTML: the parser yields tokens, and each of them becomes one
// of the elements in ELEMENTS. Nothing is loaded from an address in a text.

import { make } from "./dom.js";

const ELEMENTS = new Set([
  "p", "h3", "h4", "h5", "h6", "ul", "ol", "li", "blockquote", "table", "thead", "tbody", "tr", "th", "td",
  "strong", "em", "s",
]);
const HIGHLIGHTED_LENGTH = 20_000; // a longer one takes more than 50 ms
const NESTING = 30;

let parser = null;
let highlighter = null;
let loading = null;

// Until this has succeeded, texts are shown as they are. Resolves to whether it has.
export function load() {
  loading ||= Promise.all([import("./vendor/markdown-it.min.js"), import("./vendor/highlight.min.js")])
    .then(([markdown, highlight]) => {
      parser = markdown.default({ html: false, linkify: true, breaks: true, maxNesting: NESTING });
      parser.linkify.set({ fuzzyLink: false, fuzzyEmail: false });
      highlighter = highlight.default;
      return true;
    })
    .catch(() => {
      loading = null;
      return false;
    });
  return loading;
}

// A text that grows. Blocks that can't change any more stay as they are; the last one is rendered
// again with each update, and of it only what differs is replaced.
export class MarkdownView {
  constructor(root) {
    this.root = root;
    this.live = make("div");
    this.start = 0; // of the text in `live`
    this.codes = new Map(); // highlighted code in `live`: rendered once
    this.plain = null;
    root.replaceChildren(this.live);
  }

  update(source, isComplete = false) {
    const text = source.includes("\r") ? source.replace(/\r\n?/g, "\n") : source;
    if (!parser) {
      this.plain ||= this.live.appendChild(make("p", { class: "plain" }));
      change(this.plain, make("p", {}, text));
      return;
    }
    if (this.plain) {
      this.plain.remove();
      this.plain = null;
    }
    // A definition of a link may follow its use, so then everything is rendered once more.
    if (isComplete && /^ {0,3}\[[^\]]+\]:/m.test(text)) {
      this.start = 0;
      this.root.replaceChildren(this.live);
    }
    const tail = text.slice(this.start);
    const lines = tail.split("\n");
    const { tokens, starts } = parse(tail);
    const fresh = document.createDocumentFragment();
    this.build(tokens, fresh, lines);
    change(this.live, fresh);
    // What a line begins is known when the line is complete.
    const last = isComplete ? starts.length : starts.findLastIndex((line) => line < lines.length - 1);
    if (last > 0) this.settle(last, starts[last], lines);
  }

  settle(blocks, line, lines) {
    for (let left = blocks; left > 0; left -= 1) this.live.before(this.live.firstChild);
    this.start += lines.slice(0, line ?? lines.length).reduce((sum, one) => sum + one.length + 1, 0);
    this.codes.clear();
  }

  build(tokens, parent, lines) {
    const stack = [parent];
    for (const token of tokens) {
      const top = stack.at(-1);
      if (token.type === "inline") this.build(token.children, top, lines);
      else if (token.nesting < 0) {
        if (!token.hidden && stack.length > 1) stack.pop();
      } else if (token.nesting > 0) {
        if (!token.hidden) stack.push(top.appendChild(opened(token)));
      } else top.append(this.leaf(token, lines));
    }
  }

  leaf(token, lines) {
    switch (token.type) {
      case "softbreak":
      case "hardbreak":
        return make("br");
      case "hr":
        return make("hr");
      case "code_inline":
        return make("code", {}, token.content);
      case "image":
        return link(token.attrGet("src"), `image: ${token.content || token.attrGet("src")}`);
      case "fence":
        return this.code(token.content, token.info.trim().split(/\s/)[0], isClosed(token, lines));
      case "code_block":
        return this.code(token.content, "", false);
      default:
        return token.content;
    }
  }

  code(text, language, closed) {
    const key = `${language}\n${text}`;
    const known = this.codes.get(key);
    if (known) return known.cloneNode(true);
    const code = make("code", {}, text);
    const node = make("div", { class: "code" },
      make("div", { class: "row code-head" },
        make("span", { class: "dim grow" }, language),
        make("button", { type: "button", class: "quiet copy-code", "aria-label": "Copy the code" }, "Copy")),
      make("pre", { tabIndex: 0, role: "region", "aria-label": language ? `Code, ${language}` : "Code" }, code));
    if (closed && text.length <= HIGHLIGHTED_LENGTH && highlighter.getLanguage(language)) {
      const found = highlighter.highlight(text, { language, ignoreIllegals: true });
      code.replaceChildren(...found._emitter.root.children.map(span));
      this.codes.set(key, node.cloneNode(true));
    }
    return node;
  }
}

// The tokens, and the first lines of the blocks at the top: each becomes one element.
function parse(text) {
  const tokens = parser.parse(text, {});
  const starts = tokens.filter((one) => one.level === 0 && one.nesting >= 0).map((one) => one.map[0]);
  return { tokens, starts };
}

function isClosed(token, lines) {
  const [first, end] = token.map;
  const last = (lines[end - 1] ?? "").replace(/^[\s>]+/, "").trimEnd();
  return end - first > 1 && last.startsWith(token.markup) && last === last[0].repeat(last.length);
}

function opened(token) {
  if (token.type === "link_open") return link(token.attrGet("href"));
  const heading = /^h([1-6])$/.exec(token.tag);
  const tag = heading ? `h${Math.min(6, Number(heading[1]) + 2)}` : token.tag;
  if (!ELEMENTS.has(tag)) return make("span");
  const node = document.createElement(tag);
  const start = Number(token.attrGet("start"));
  if (tag === "ol" && start > 1) node.start = start;
  if (tag === "table") node.tabIndex = 0; // a wide one scrolls, also by keyboard
  const align = /text-align:(right|center)/.exec(token.attrGet("style") ?? "");
  if (align) node.className = align[1];
  return node;
}

function link(address, ...children) {
  if (!/^(https?:\/\/|mailto:)/i.test(address)) return make("span", {}, ...children);
  return make("a", { href: address, title: address, target: "_blank", rel: "noopener noreferrer nofollow" }, ...children);
}

function span(node) {
  if (typeof node === "string") return document.createTextNode(node);
  const name = (node.scope ?? "").split(".")[0];
  return make("span", name ? { class: `code-${name}` } : {}, ...node.children.map(span));
}

// Makes `live` equal to `fresh`. What is equal already stays: its selection, focus and layout too.
function change(live, fresh) {
  let old = live.firstChild;
  for (const node of [...fresh.childNodes]) {
    const next = old?.nextSibling ?? null;
    if (!old) live.append(node);
    else if (!old.isEqualNode(node)) changeOne(old, node);
    old = next;
  }
  while (old) {
    const next = old.nextSibling;
    old.remove();
    old = next;
  }
}

function changeOne(old, node) {
  if (old.nodeType === Node.TEXT_NODE && node.nodeType === Node.TEXT_NODE) {
    if (node.data.startsWith(old.data)) old.appendData(node.data.slice(old.length));
    else old.data = node.data;
  } else if (old.nodeType === Node.ELEMENT_NODE && old.cloneNode(false).isEqualNode(node.cloneNode(false))) {
    change(old, node);
  } else old.replaceWith(node);
}
