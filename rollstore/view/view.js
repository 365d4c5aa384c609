"use strict";
// The panes of the page, the legend, the keys and the buttons.

const NAMES = { rollout: "marked token", group: "fork", diff: "difference" };
const panes = { node: document.getElementById("panes"), all: [] };
panes.all = data.panes.map((told, n) => new Pane(told, n));
let active = panes.all[0];
const select = (pane) => {
  active = pane;
  tell(pane, pane.cursor);
};

function setMode(name) {
  mode = name;
  const legend = document.getElementById("legend");
  const counts = MODES[name].map(() => 0);
  let others = 0;
  for (const pane of panes.all)
    for (const segment of pane.segments)
      for (let i = 0; i < segment.length; i++)
        if (segment.action[i] < 0) others++;
        else counts[classify[name](segment, i)]++;
  legend.replaceChildren();
  MODES[name].forEach((label, n) => {
    if (!counts[n] && (label === UNKNOWN || label === "p = 0")) return;
    const entry = legend.appendChild(make("li"));
    entry.append(make("span", `t a ${name}-${label === UNKNOWN ? "unknown" : n}`, "ab"), ` ${label} `);
    entry.append(make("b", "", counts[n].toLocaleString("en")));
  });
  const entry = legend.appendChild(make("li"));
  entry.append(make("span", "t", "ab"), " not drawn ", make("b", "", others.toLocaleString("en")));
  for (const button of document.querySelectorAll("#tools [data-mode]"))
    button.setAttribute("aria-pressed", String(button.dataset.mode === name));
  panes.all.forEach((pane) => pane.recolour());
}

// The next or last mark of the pane in use. In a diff both panes go to the place, and the first press to the first one.
let jumped = false;
function jump(by) {
  const marks = active.marks;
  if (!marks.length) return;
  let n = by > 0 ? marks.findIndex((at) => at > active.cursor) : marks.findLastIndex((at) => at < active.cursor);
  if (data.kind === "diff" && !jumped) n = 0;
  jumped = true;
  if (n < 0) n = by > 0 ? 0 : marks.length - 1;
  for (const pane of data.kind === "diff" ? panes.all : [active])
    if (pane.marks.length > n) pane.go(pane.marks[n]);
  tell(active, active.cursor);
  active.view.focus({ preventScroll: true });
}

const spansOf = (pane) => pane.segments.flatMap((segment) => segment.spans);
function foldHere() {
  const [segment, i] = active.at(active.cursor);
  const span = segment.span(i);
  if (span) active.fold([span], !span.folded);
}
function foldTools() {
  const of = (pane) => spansOf(pane).filter((span) => span.tool);
  const folded = panes.all.some((pane) => of(pane).some((span) => !span.folded));
  for (const pane of panes.all) pane.fold(of(pane), folded);
}
function foldAll() {
  const folded = spansOf(active).some((span) => !span.folded);
  active.fold(spansOf(active), folded);
}

const KEYS = {
  j: () => active.step(1), ArrowRight: () => active.step(1), k: () => active.step(-1), ArrowLeft: () => active.step(-1),
  ArrowDown: () => active.line(1), ArrowUp: () => active.line(-1),
  Home: () => active.go(0), End: () => active.go(active.length - 1),
  n: () => jump(1), p: () => jump(-1), f: foldHere, t: foldTools, F: foldAll,
  1: () => setMode("logprob"), 2: () => setMode("ratio"), 3: () => setMode("version"), 4: () => setMode("mask"),
};
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || !(event.key in KEYS)) return;
  event.preventDefault();
  KEYS[event.key]();
});

function tools() {
  const bar = document.getElementById("tools");
  const button = (label, key, action) => {
    const node = make("button", "", label);
    node.type = "button";
    node.append(make("kbd", "", key));
    node.addEventListener("click", action);
    return node;
  };
  const colours = bar.appendChild(make("div", "group"));
  colours.setAttribute("role", "group");
  colours.setAttribute("aria-label", "colour by");
  Object.keys(MODES).forEach((name, n) => {
    const node = colours.appendChild(button(TITLES[name], String(n + 1), () => setMode(name)));
    node.dataset.mode = name;
  });
  const jumps = bar.appendChild(make("div", "group"));
  const marks = Math.max(...panes.all.map((pane) => pane.marks.length));
  const next = jumps.appendChild(button(data.kind === "diff" ? "first difference" : `next ${NAMES[data.kind]}`, "n", () => jump(1)));
  next.id = "next";
  next.disabled = marks === 0;
  jumps.appendChild(button("previous", "p", () => jump(-1))).disabled = marks === 0;
  const folds = bar.appendChild(make("div", "group"));
  folds.append(button("fold", "f", foldHere), button("tools", "t", foldTools), button("all", "F", foldAll));
  const legend = bar.appendChild(make("ul"));
  legend.id = "legend";
  legend.setAttribute("aria-label", "what the colours mean, with the number of tokens");
}

panes.node.classList.toggle("one", panes.all.length === 1);
panes.node.append(...panes.all.map((pane) => pane.node));
tools();
setMode(mode);
panes.all.forEach((pane) => pane.draw());
panes.node.addEventListener("scroll", () => panes.all.forEach((pane) => pane.soon()), { passive: true });
new ResizeObserver(() => {
  for (const pane of panes.all) {
    for (const item of pane.chunks.values()) if (item.kind === "chunk") [item.height, item.known] = [0, false];
    pane.soon();
  }
}).observe(panes.node);
for (const line of document.querySelectorAll("svg a.line"))
  line.addEventListener("click", (event) => {
    event.preventDefault();
    const pane = panes.all[Number(line.dataset.pane)];
    pane.node.scrollIntoView({ inline: "nearest", block: "nearest" });
    pane.draw();
    pane.view.focus({ preventScroll: true });
    pane.go(Number(line.dataset.at));
  });
tell(active, 0);
active.view.focus({ preventScroll: true });
