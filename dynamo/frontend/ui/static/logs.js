// The output of one service, as it is written.

import { byId, fillSelect, make, natural, setText } from "./dom.js";
import { Stream } from "./server.js";

const KEPT = 2000;
const NEAR_PX = 8;

export function install() {
  const select = byId("log-name");
  const lines = byId("log-lines");
  const follow = byId("log-follow");
  const filter = byId("log-filter");
  let visible = false;
  let wanted = "";
  const stream = new Stream(onEvent, (state, text) => setText(byId("log-state"), state === "live" ? "" : text));

  function matches(text) {
    return text.toLowerCase().includes(filter.value.toLowerCase());
  }

  function level(text) {
    if (/\b(ERROR|CRITICAL|Traceback|\w+Error:)/.test(text)) return "error";
    return /\bWARN(ING)?\b/.test(text) ? "warning" : "";
  }

  function onEvent(name, texts) {
    if (name === "first") lines.replaceChildren();
    const added = texts.map((text) => make("div", { class: level(text), hidden: !matches(text) }, text));
    lines.append(...added);
    while (lines.childElementCount > KEPT) lines.firstChild.remove();
    if (follow.checked) lines.scrollTop = lines.scrollHeight;
  }

  function restart() {
    if (visible && select.value) stream.open(`ui/logs?name=${encodeURIComponent(select.value)}`);
    else stream.close();
  }

  select.addEventListener("change", () => {
    wanted = select.value;
    lines.replaceChildren();
    restart();
  });
  filter.addEventListener("input", () => {
    for (const node of lines.children) node.hidden = !matches(node.textContent);
  });
  // A reader who scrolls up stays there; at the end, new lines move the view again.
  lines.addEventListener("scroll", () => {
    follow.checked = lines.scrollHeight - lines.scrollTop - lines.clientHeight < NEAR_PX;
  });
  follow.addEventListener("change", () => {
    if (follow.checked) lines.scrollTop = lines.scrollHeight;
  });

  return {
    show(on) {
      if (visible === on) return;
      visible = on;
      restart();
    },
    choose(name) {
      wanted = name;
      if ([...select.options].some((one) => one.value === name) && select.value !== name) {
        select.value = name;
        lines.replaceChildren();
        restart();
      }
    },
    update(status) {
      const names = [...status.workers, ...status.others].map((one) => one.name).sort(natural);
      if (fillSelect(select, names, wanted)) restart();
    },
  };
}
