"use strict";
// What is known of each token, the colours, and the panel that tells of one. Texts are set as text, never as markup.

const data = JSON.parse(document.getElementById("data").textContent);
const UNKNOWN = "not known";
const MODES = {
  logprob: ["p ≥ 0.5", "0.1 to 0.5", "0.01 to 0.1", "below 0.01", "p = 0", UNKNOWN],
  ratio: ["below 0.5", "0.5 to 0.8", "0.8 to 1.25", "1.25 to 2", "above 2", UNKNOWN],
  version: [], // from the data
  mask: ["trained on", "drawn, loss weight 0", "drawn, held out"],
};
const TITLES = { logprob: "log-prob", ratio: "ratio", version: "version", mask: "mask" };

const make = (tag, name, text) => {
  const node = document.createElement(tag);
  if (name) node.className = name;
  if (text !== undefined) node.textContent = text;
  return node;
};
const number = (value) =>
  value === "-inf" ? -Infinity : value === "inf" ? Infinity : value === "nan" ? null : value ?? null;
const quoted = (text) => `"${text.replaceAll("\n", "↵").replaceAll("\t", "⇥")}"`;
const shown = (value, digits) =>
  value === null ? UNKNOWN : Number.isFinite(value) ? String(+value.toFixed(digits)) : value < 0 ? "−∞" : "∞";

// One segment of a rollout; `base` is the number of its first token on the pane.
class Segment {
  constructor(told, base) {
    Object.assign(this, told);
    this.base = base;
    this.length = told.ids.length;
    this.action = new Int32Array(this.length).fill(-1);
    let count = 0;
    for (let i = 0; i < this.length; i++) if (told.acts[i] !== "-") this.action[i] = count++;
    this.out = new Set(told.escaped);
    this.why = new Map(told.marks);
    this.starts = null;
    if (told.heads) {
      this.starts = [0];
      for (const n of told.heads.counts) this.starts.push(this.starts[this.starts.length - 1] + n);
    }
    told.spans.forEach((span) => (span.folded = false));
  }
  known(column, i) {
    const at = this.action[i];
    return at < 0 || !this[column] ? null : number(this[column][at]);
  }
  text(i) {
    const text = this.texts ? this.texts[i] : null;
    return text === null ? `<${this.ids[i]}>` : text;
  }
  drawn(i) {
    const text = this.text(i);
    return text === "" ? "·" : text.replaceAll("\n", "↵\n").replaceAll("\t", "⇥\t");
  }
  span(i) {
    return this.spans.find((span) => i >= span.start && i < span.stop) ?? null;
  }
}

const versions = [...new Set(data.panes.flatMap((p) => p.segments.flatMap((s) => s.versions ?? [])))]
  .filter((v) => v !== null)
  .sort((a, b) => a - b);
const bins = []; // at most six ranges of versions, each [first, last]
for (let n = 0; n < Math.min(6, versions.length); n++) {
  const cut = (k) => Math.floor((k * versions.length) / Math.min(6, versions.length));
  bins.push([versions[cut(n)], versions[cut(n + 1) - 1]]);
}
MODES.version = [...bins.map(([a, b]) => (a === b ? String(a) : `${a} to ${b}`)), UNKNOWN];

// Which entry of its legend a token belongs to; -1 for what was not drawn.
const classify = {
  logprob(segment, i) {
    const value = segment.known("logprobs", i);
    if (value === null) return 5;
    return value === -Infinity ? 4 : value >= Math.log(0.5) ? 0 : value >= Math.log(0.1) ? 1 : value >= Math.log(0.01) ? 2 : 3;
  },
  ratio(segment, i) {
    const value = segment.known("ratios", i);
    return value === null ? 5 : value < 0.5 ? 0 : value < 0.8 ? 1 : value <= 1.25 ? 2 : value <= 2 ? 3 : 4;
  },
  version(segment, i) {
    const value = segment.known("versions", i);
    const at = value === null ? -1 : bins.findIndex(([a, b]) => value >= a && value <= b);
    return at < 0 ? bins.length : at;
  },
  mask(segment, i) {
    return segment.acts[i] === "h" ? 2 : segment.known("weights", i) === 0 ? 1 : 0;
  },
};
let mode = "logprob";
const style = (segment, i) => {
  const n = segment.action[i] < 0 ? -1 : classify[mode](segment, i);
  if (n < 0) return "t";
  return `t a ${mode}-${MODES[mode][n] === UNKNOWN ? "unknown" : n}`;
};

// What is known of a token, as [name, value].
function rows(segment, i) {
  const act = segment.acts[i] !== "-";
  const value = (name, column, digits, always) => {
    const found = segment.known(column, i);
    return act && (always || segment[column]) ? [[name, shown(found, digits)]] : [];
  };
  const logprob = segment.known("logprobs", i);
  const p = logprob === null ? "" : ` (p ${Math.exp(logprob).toPrecision(3)})`;
  const span = segment.span(i);
  return [
    ["position", String(i)],
    ["id", String(segment.ids[i])],
    ["text", segment.texts && segment.texts[i] !== null ? quoted(segment.texts[i]) : UNKNOWN],
    ["span", span ? span.role : UNKNOWN],
    ["mask", !act ? "observation" : segment.acts[i] === "h" ? "action, held out" : "action"],
    ...(act ? [["log-prob", shown(logprob, 4) + p]] : []),
    ...value("version", "versions", 0, true),
    ...value("trainer", "trainer", 4),
    ...value("ratio", "ratios", 4),
    ...value("rank in head", "ranks", 0),
    ...value("advantage", "advantages", 4),
    ...value("loss weight", "weights", 4),
    ...(segment.why.has(i) ? [["marked", segment.why.get(i)]] : []),
  ];
}

// Show a token beside the panes: what is known of it, then its head.
function tell(pane, at) {
  const place = document.getElementById("token");
  if (!pane.length) return place.replaceChildren(make("p", "", "no tokens"));
  const [segment, i] = pane.at(at);
  const list = make("dl");
  if (pane.segments.length > 1) list.append(make("dt", "", "segment"), make("dd", "", String(segment.segment)));
  for (const [name, value] of rows(segment, i)) {
    list.append(make("dt", "", name), make("dd", "", value));
    list.lastChild.dataset.name = name;
  }
  place.replaceChildren(list);
  const action = segment.action[i];
  if (action < 0) return;
  if (!segment.heads || !segment.heads.counts[action]) return place.append(make("p", "none", "no head recorded"));
  const table = make("table");
  table.append(make("caption", "", segment.heads.cut ? "head, its first entries" : "head"));
  for (let n = segment.starts[action]; n < segment.starts[action + 1]; n++) {
    const id = segment.heads.ids[n];
    const logprob = number(segment.heads.logprobs[n]);
    const row = table.insertRow();
    row.className = id === segment.ids[i] ? "here" : "";
    const text = data.names[id];
    row.insertCell().textContent = id === segment.ids[i] ? "▸" : "";
    row.insertCell().textContent = id;
    row.insertCell().textContent = text === undefined ? "" : quoted(text);
    row.insertCell().textContent = shown(logprob, 3);
    const bar = row.insertCell().appendChild(make("i", "bar"));
    bar.style.width = `${(40 * Math.exp(logprob)).toFixed(1)}px`;
  }
  place.append(table);
}
