"use strict";
// Draws the tokens of one rollout. Only what is near the window is in the document, so that 100,000 stay usable.

const CHUNK = 128; // tokens that come and go together
const OVER = 300; // pixels drawn above and below the window

// Where a chunk that begins at `from` ends: behind a line end if there is one, since a chunk begins a line.
function cut(segment, from, stop) {
  const most = Math.min(from + CHUNK, stop);
  if (most === stop) return stop;
  for (let i = most; i > from + CHUNK / 2; i--) if (segment.text(i - 1).endsWith("\n")) return i;
  return most;
}

class Pane {
  constructor(told, n) {
    this.n = n;
    this.segments = [];
    this.length = 0;
    for (const one of told.segments) {
      this.segments.push(new Segment(one, this.length));
      this.length += one.ids.length;
    }
    this.cursor = 0;
    this.marks = this.segments.flatMap((s) => s.marks.map(([at]) => s.base + at));
    const first = this.segments.find((s) => s.first !== null);
    this.first = first ? first.base + first.first : null;
    this.node = make("section", "pane");
    this.node.id = `pane-${n}`;
    const title = this.node.appendChild(make("h2"));
    if (told.address) {
      const link = title.appendChild(make("a", "", told.title));
      link.href = told.address;
    } else title.textContent = told.title;
    if (data.kind !== "rollout") {
      const line = this.node.appendChild(make("p", "told", told.told));
      if (told.diff) {
        const link = make("a", "", told.diff[0]);
        link.href = told.diff[1];
        line.append(" · ", link);
      }
    }
    this.view = this.node.appendChild(make("div", "tokens"));
    this.view.tabIndex = 0;
    this.view.setAttribute("role", "listbox");
    this.view.setAttribute("aria-label", `tokens of ${told.title}`);
    this.top = this.view.appendChild(make("div", "space"));
    this.bottom = this.view.appendChild(make("div", "space"));
    this.nodes = new Map(); // item -> its node, of those in the document
    this.view.addEventListener("scroll", () => this.soon(), { passive: true });
    this.view.addEventListener("focus", () => select(this));
    this.view.addEventListener("mousedown", (event) => {
      const i = this.under(event);
      if (i !== null) this.go(i, false);
    });
    this.view.addEventListener("mouseover", (event) => {
      const i = this.under(event);
      tell(this, i ?? this.cursor);
    });
    this.view.addEventListener("mouseleave", () => tell(active, active.cursor));
    this.chunks = new Map();
    this.list();
  }
  under(event) {
    const node = event.target.closest(".t");
    return node ? Number(node.dataset.i) : null;
  }
  at(i) {
    const segment = this.segments.findLast((s) => s.base <= i && s.length > 0) ?? this.segments[0];
    return [segment, i - segment.base];
  }
  // What the pane consists of from top to bottom; heights of what was not drawn yet are estimated.
  list() {
    this.items = [];
    for (const segment of this.segments) {
      if (this.segments.length > 1 || data.kind === "rollout") this.items.push(this.item(segment, "title", segment, 30));
      for (const span of segment.spans) {
        this.items.push(this.item(span, "span", segment, 28));
        if (span.folded) continue;
        for (let from = span.start; from < span.stop; ) {
          const item = this.item(`${segment.base}:${from}`, "chunk", segment, 0);
          item.from = from;
          item.to ??= cut(segment, from, span.stop);
          this.items.push(item);
          from = item.to;
        }
      }
    }
  }
  item(key, kind, segment, height) {
    if (!this.chunks.has(key)) this.chunks.set(key, { key, kind, segment, height, known: height > 0 });
    return this.chunks.get(key);
  }
  estimate(item) {
    const across = Math.max(20, (this.view.clientWidth - 24) / 8);
    let signs = 0;
    let lines = 1;
    for (let i = item.from; i < item.to; i++) {
      const text = item.segment.text(i);
      signs += Math.max(1, text.length) + 0.25;
      for (const sign of text) if (sign === "\n") lines++;
    }
    return (lines + signs / across) * 23;
  }
  offsets() {
    const found = [0];
    for (const item of this.items) {
      if (!item.known && !item.height) item.height = this.estimate(item);
      found.push(found[found.length - 1] + item.height);
    }
    return found;
  }
  soon() {
    this.waiting ??= requestAnimationFrame(() => {
      this.waiting = null;
      this.draw();
    });
  }
  // Put into the document what is near the window and take out the rest. Heights are measured as they become known,
  // and the first item in the window stays where it is while those above it change.
  draw() {
    const frame = this.node.getBoundingClientRect();
    const seen = panes.node.getBoundingClientRect();
    const aside = frame.right < seen.left - OVER || frame.left > seen.right + OVER;
    for (let round = 0; round < 4; round++) {
      const tops = this.offsets();
      const from = this.view.scrollTop - OVER;
      const to = this.view.scrollTop + this.view.clientHeight + OVER;
      let first = 0;
      while (first < this.items.length - 1 && tops[first + 1] <= from) first++;
      let last = first;
      while (last < this.items.length && tops[last] < to) last++;
      const wanted = aside ? [] : this.items.slice(first, last);
      const kept = new Set(wanted);
      for (const [item, node] of this.nodes)
        if (!kept.has(item)) {
          node.remove();
          this.nodes.delete(item);
        }
      let before = this.top;
      for (const item of wanted) {
        let node = this.nodes.get(item);
        if (!node) {
          node = this.build(item);
          this.nodes.set(item, node);
        }
        if (before.nextSibling !== node) before.after(node);
        before = node;
      }
      this.top.style.height = `${aside ? 0 : tops[first]}px`;
      this.bottom.style.height = `${Math.max(0, tops[this.items.length] - tops[aside ? 0 : last])}px`;
      const anchor = this.items.findIndex((_, n) => tops[n + 1] > this.view.scrollTop);
      let changed = false;
      let shift = 0;
      wanted.forEach((item, n) => {
        const height = item.kind === "chunk" ? this.nodes.get(item).getBoundingClientRect().height : item.height;
        if (Math.abs(height - item.height) > 0.5) {
          if (first + n < anchor) shift += height - item.height;
          item.height = height;
          changed = true;
        }
        item.known = true;
      });
      if (shift) this.view.scrollTop += shift;
      if (!changed) break;
    }
    this.point();
  }
  build(item) {
    if (item.kind === "title") return make("div", "title", item.segment.title);
    if (item.kind === "span") {
      const span = item.key;
      const node = make("div", `head ${span.acts ? "acts" : ""}`);
      const button = node.appendChild(make("button", "fold", `${span.folded ? "▸" : "▾"} ${span.role}`));
      button.type = "button";
      button.tabIndex = -1;
      button.setAttribute("aria-expanded", String(!span.folded));
      button.addEventListener("click", () => this.fold([span], !span.folded));
      node.append(make("span", "details", span.details));
      return node;
    }
    const node = make("div", "chunk");
    node.setAttribute("role", "group");
    for (let i = item.from; i < item.to; i++) {
      const text = item.segment.drawn(i);
      const ends = text.endsWith("\n"); // a line end stands behind its token, or the ring around it would go on below
      const token = make("span", "", ends ? text.slice(0, -1) : text);
      token.id = `t-${this.n}-${item.segment.base + i}`;
      token.dataset.i = item.segment.base + i;
      token.setAttribute("role", "option");
      this.dress(token, item.segment, i);
      node.append(token, ...(ends && i < item.to - 1 ? ["\n"] : []));
    }
    return node;
  }
  dress(token, segment, i) {
    const extra = (segment.out.has(i) ? " escaped" : "") + (segment.why.has(i) ? " marked" : "");
    token.className = style(segment, i) + extra + (segment.first === i ? " first" : "");
  }
  recolour() {
    for (const [item, node] of this.nodes)
      if (item.kind === "chunk")
        [...node.children].forEach((token, n) => this.dress(token, item.segment, item.from + n));
    this.point();
  }
  // The span at the top of the window stays there.
  fold(spans, folded) {
    const tops = this.offsets();
    let n = this.items.findIndex((_, at) => tops[at + 1] > this.view.scrollTop);
    while (n > 0 && this.items[n].kind === "chunk") n--;
    const anchor = this.items[n];
    const below = this.view.scrollTop - (tops[n] ?? 0);
    for (const span of spans) {
      span.folded = folded;
      this.nodes.get(this.chunks.get(span))?.remove(); // its sign changes
      this.nodes.delete(this.chunks.get(span));
    }
    this.list();
    if (anchor) this.view.scrollTop = this.offsets()[this.items.indexOf(anchor)] + (anchor.key.folded ? 0 : below);
    this.draw();
  }
  element(i) {
    return document.getElementById(`t-${this.n}-${i}`);
  }
  // Mark the current token, wherever it is; a list says with aria-activedescendant which of its options that is.
  point() {
    this.view.querySelector(".cursor")?.classList.remove("cursor");
    const node = this.element(this.cursor);
    if (node) {
      node.classList.add("cursor");
      node.setAttribute("aria-posinset", this.cursor + 1);
      node.setAttribute("aria-setsize", this.length);
      const [segment, i] = this.at(this.cursor);
      node.setAttribute("aria-label", rows(segment, i).slice(0, 6).map((row) => row.join(" ")).join(", "));
      this.view.setAttribute("aria-activedescendant", node.id);
    } else this.view.removeAttribute("aria-activedescendant");
  }
  // Make a token the current one and bring it into the window, unfolding what hides it.
  go(i, scroll = true) {
    if (!this.length) return;
    this.cursor = Math.max(0, Math.min(this.length - 1, i));
    const [segment, at] = this.at(this.cursor);
    const span = segment.span(at);
    if (span?.folded) this.fold([span], false);
    if (scroll) {
      const near = this.element(this.cursor)?.getBoundingClientRect();
      const frame = this.view.getBoundingClientRect();
      if (!near || near.top < frame.top + 20 || near.bottom > frame.bottom - 20) {
        if (!near) {
          const n = this.items.findIndex((o) => o.kind === "chunk" && o.segment === segment && o.from <= at && at < o.to);
          this.view.scrollTop = this.offsets()[n] - this.view.clientHeight / 3;
          this.draw();
        }
        const now = this.element(this.cursor)?.getBoundingClientRect();
        if (now) this.view.scrollTop += now.top - frame.top - frame.height / 3;
        this.draw();
      }
    }
    this.point();
    tell(this, this.cursor);
  }
  // The next token in a direction that no fold hides.
  step(by) {
    let i = this.cursor + by;
    for (; i >= 0 && i < this.length; i += by) {
      const [segment, at] = this.at(i);
      const span = segment.span(at);
      if (!span?.folded) break;
      i = segment.base + (by > 0 ? span.stop - 1 : span.start);
    }
    if (i >= 0 && i < this.length) this.go(i);
  }
  // The token nearest above or below, by where they were laid out.
  line(by) {
    const here = this.element(this.cursor)?.getBoundingClientRect();
    if (!here) return this.go(this.cursor);
    const distance = (rect) => Math.abs(rect.left + rect.width / 2 - here.left - here.width / 2);
    let best = null;
    let row = null;
    for (let i = this.cursor + by; ; i += by) {
      const rect = this.element(i)?.getBoundingClientRect();
      if (!rect) break;
      if (by > 0 ? rect.top < here.bottom - 2 : rect.bottom > here.top + 2) continue;
      row ??= rect;
      if (Math.abs(rect.top - row.top) > 6) break;
      if (!best || distance(rect) < best.far) best = { i, far: distance(rect) };
    }
    if (best) this.go(best.i);
    else this.step(by);
  }
}
