// A graph on a canvas: drawn anew for each change, only what is seen; selected with the mouse or by keys.

const KINDS = ["input", "parameter", "saved", "constant", "op", "pointwise", "reduction", "call", "view", "output", "module"];
const HIDDEN = new Set(["parameter", "saved"]); // shown on request
const HUES = [18, 205, 145, 275, 45, 330, 178, 95, 235, 300];
const SMALLEST = 0.04, LARGEST = 2.5;

function palette() {
  const dark = document.documentElement.dataset.theme === "dark";
  const read = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  const tone = (hue, s, l, a = 1) => `hsla(${hue}, ${s}%, ${l}%, ${a})`;
  const fills = dark
    ? { input: "#24372b", parameter: "#202b24", saved: "#22303a", op: "#2b2d33", constant: "#26272c", pointwise: "#2b2d33", reduction: "#372c1d", call: "#3b2420", view: "#202127", output: "#24372b", module: "#262a33" }
    : { input: "#e2f2e6", parameter: "#f0f6f1", saved: "#e6eff6", op: "#ffffff", constant: "#f0eeea", pointwise: "#ffffff", reduction: "#fdf1d8", call: "#fde6dc", view: "#f7f6f3", output: "#e2f2e6", module: "#eef1f6" };
  return {
    dark, fills, ink: read("ink"), soft: read("soft"), faint: read("faint"), line: read("firm"), panel: read("panel"), sunk: read("sunk"), accent: read("accent"), good: read("good"), focus: read("focus"),
    edge: dark ? "#5a606c" : "#b3ab9c",
    kernel: (k) => tone(HUES[k % HUES.length], dark ? 55 : 60, dark ? 62 : 46),
    blob: (k) => tone(HUES[k % HUES.length], dark ? 32 : 62, dark ? 21 : 93),
    holder: (depth) => (dark ? `rgba(255,255,255,${0.025 + 0.012 * depth})` : `rgba(70,55,25,${0.028 + 0.012 * depth})`),
  };
}

class GraphView {
  constructor(stage, events) {
    this.events = events;
    this.canvas = el("canvas", { tabindex: "0", role: "application", "aria-label": "Graph. Arrow keys go from node to node, Enter opens a module, Escape lets go." });
    this.paper = this.canvas.getContext("2d");
    this.scale = 1;
    [this.x, this.y] = [0, 0];
    this.selected = null;
    this.kernel = -1;
    this.matches = null;
    stage.append(this.canvas);
    this.watch();
  }

  show(view, params) {
    this.view = view;
    // Edges from all over the graph to its end would hide the rest: then what leaves the graph is marked instead.
    const ends = view.nodes.filter((node) => node.k === "output");
    this.leaving = new Set(ends.flatMap((node) => node.i));
    const crowded = this.leaving.size > 3;
    this.tree = treeOf(view, (node) => (HIDDEN.has(node.k) && !params) || (crowded && node.k === "output"));
    this.users = view.nodes.map(() => []);
    view.nodes.forEach((node, index) => (node.i || []).forEach((read) => this.users[read] && this.users[read].push(index)));
    this.members = new Map();
    view.nodes.forEach((node, index) => {
      if (node.g >= 0) (this.members.get(node.g) || this.members.set(node.g, []).get(node.g)).push(index);
    });
    for (const [k, list] of this.members) if (list.length < 2) this.members.delete(k);
    if (this.tree.root.count <= 90) this.tree.modules.forEach((item) => (item.open = true));
    else openSome(this.tree, 60);
    [this.selected, this.kernel] = [null, -1];
    this.arrange();
    this.fit();
  }

  arrange() {
    const paper = this.paper;
    this.layout = layoutOf(this.view, this.tree, (item) => {
      paper.font = "500 12px " + this.mono();
      const label = Math.ceil(paper.measureText(clipped(item.label)).width);
      if (!item.children) {
        paper.font = "10.5px " + this.mono();
        return Math.max(62, label + 26, Math.ceil(paper.measureText(brief(this.view.nodes[item.node].s)).width));
      }
      paper.font = "11px " + this.sans();
      return Math.max(96, label + Math.ceil(paper.measureText(counted(item.count, "op")).width) + 52);
    });
    for (const edge of this.layout.edges) edge.text = this.edgeText(edge);
    const outs = new Map();
    for (const edge of this.layout.edges) (outs.get(edge.from) || outs.set(edge.from, []).get(edge.from)).push(edge);
    this.outs = outs;
  }

  mono() { return getComputedStyle(document.documentElement).getPropertyValue("--mono"); }
  sans() { return getComputedStyle(document.documentElement).getPropertyValue("--sans"); }

  edgeText(edge) {
    const specs = [...new Set(edge.reads.map((read) => brief(this.view.nodes[read].s)))].filter(Boolean);
    return specs.length > 1 ? `${specs[0]} and ${specs.length - 1} more` : specs[0] || "";
  }

  // Where it is looked at

  fit() {
    const { width, height } = this.box();
    const { width: w, height: h } = this.layout;
    const whole = Math.min((width - 40) / w, (height - 40) / h, 1.15);
    // A long graph is shown from its beginning, large enough to be read.
    this.scale = Math.max(whole, Math.min(0.85, (width - 40) / w), SMALLEST);
    this.x = w / 2 - width / 2 / this.scale;
    this.y = h * this.scale > height - 40 ? -24 / this.scale : h / 2 - height / 2 / this.scale;
    this.draw();
  }

  whole() {
    const { width, height } = this.box();
    this.scale = Math.max(SMALLEST, Math.min((width - 40) / this.layout.width, (height - 40) / this.layout.height, 1.15));
    this.x = this.layout.width / 2 - width / 2 / this.scale;
    this.y = this.layout.height / 2 - height / 2 / this.scale;
    this.draw();
  }

  box() {
    return { width: Math.max(50, this.canvas.clientWidth), height: Math.max(50, this.canvas.clientHeight) };
  }

  zoom(factor, at) {
    const { width, height } = this.box();
    const [px, py] = at || [width / 2, height / 2];
    const next = Math.min(LARGEST, Math.max(SMALLEST, this.scale * factor));
    this.x += px / this.scale - px / next;
    this.y += py / this.scale - py / next;
    this.scale = next;
    this.draw();
  }

  reveal(item, gently) {
    const { width, height } = this.box();
    if (!gently && this.scale < 0.5) this.scale = 0.8;
    const margin = 60 / this.scale;
    const [w, h] = [width / this.scale, height / this.scale];
    const moved = (at, seen, from, size) => {
      if (size > seen - 2 * margin) return from - margin;
      if (from > at + margin && from + size < at + seen - margin) return at;
      if (!gently || from + size < at - seen || from > at + 2 * seen) return from + size / 2 - seen / 2;
      return from < at + margin ? from - margin : from + size - seen + margin;
    };
    this.x = moved(this.x, w, item.x, item.w);
    this.y = moved(this.y, h, item.y, item.h);
    this.draw();
  }

  // What is selected

  select(item, quiet) {
    this.selected = item;
    this.kernel = item && item.node !== undefined ? this.view.nodes[item.node].g ?? -1 : -1;
    this.draw();
    if (!quiet) this.events.selected(item);
  }

  selectKernel(k) {
    const index = this.view.nodes.findIndex((node) => node.g === k);
    if (index >= 0) this.selectNode(index, true);
    this.selected = null;
    this.kernel = k;
    this.draw();
  }

  /** Select a node by its index, opening the modules it is in. */
  selectNode(index, quiet) {
    const leaf = this.tree.leaves[index];
    if (!leaf) return;
    let closed = false;
    for (let at = leaf.parent; at; at = at.parent) if (!at.open) closed = at.open = true;
    if (closed) this.arrange();
    this.select(leaf, quiet);
    this.reveal(leaf);
  }

  toggle(item) {
    if (!item || !item.children) return;
    const before = [item.x, item.y];
    item.open = !item.open;
    this.arrange();
    this.x += item.x - before[0];
    this.y += item.y - before[1];
    this.select(item, true);
    this.events.selected(item);
    say(`${item.label} ${item.open ? "opened" : "closed"}`);
  }

  openAll(open) {
    this.tree.modules.forEach((item) => (item.open = open));
    this.select(null);
    this.arrange();
    this.fit();
  }

  mark(indices) {
    this.matches = indices;
    this.draw();
  }

  // Keys and mouse

  step(key) {
    const items = [...this.layout.items];
    if (!this.selected) return this.go(items.sort((a, b) => a.y - b.y || a.x - b.x)[0]);
    const from = this.selected;
    const [dx, dy] = { ArrowUp: [0, -1], ArrowDown: [0, 1], ArrowLeft: [-1, 0], ArrowRight: [1, 0] }[key];
    if (dy) { // along the edges first
      const near = this.layout.edges.filter((edge) => (dy > 0 ? edge.from : edge.to) === from).map((edge) => (dy > 0 ? edge.to : edge.from));
      if (near.length) return this.go(closest(near, from, (item) => Math.abs(item.y - from.y) + 0.3 * Math.abs(middle(item) - middle(from))));
    }
    const beyond = items.filter((item) => item !== from && (dy ? (item.y - from.y) * dy > 4 : (middle(item) - middle(from)) * dx > 4));
    this.go(closest(beyond, from, (item) => (dy ? Math.abs(item.y - from.y) + 0.5 * Math.abs(middle(item) - middle(from)) : Math.abs(middle(item) - middle(from)) + 4 * Math.abs(item.y + item.h / 2 - from.y - from.h / 2))));
  }

  go(item) {
    if (!item) return;
    this.select(item);
    this.reveal(item, true);
    say(this.told(item));
  }

  told(item) {
    if (item.children) return `Module ${item.label}, ${counted(item.count, "op")}, ${item.open ? "open" : "closed, Enter opens it"}`;
    const node = this.view.nodes[item.node];
    const kernel = node.g >= 0 && this.view.kernels[node.g] ? `, kernel ${this.view.kernels[node.g].name}` : "";
    return `${node.o}, ${node.s || "no tensor"}${kernel}`;
  }

  key(event) {
    const { key } = event;
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const pan = { ArrowUp: [0, -1], ArrowDown: [0, 1], ArrowLeft: [-1, 0], ArrowRight: [1, 0] }[key];
    if (pan && event.shiftKey) {
      this.x += (pan[0] * 80) / this.scale;
      this.y += (pan[1] * 80) / this.scale;
      this.draw();
    } else if (pan) this.step(key);
    else if (key === "Enter" || key === " ") this.selected && this.selected.children ? this.toggle(this.selected) : this.events.entered(this.selected);
    else if (key === "Backspace" && this.selected && this.selected.parent && this.selected.parent.parent) this.toggle(this.selected.parent);
    else if (key === "Escape") this.select(null);
    else if (key === "+" || key === "=") this.zoom(1.25);
    else if (key === "-") this.zoom(0.8);
    else if (key === "0") this.whole();
    else return;
    event.preventDefault();
  }

  at(event) {
    const box = this.canvas.getBoundingClientRect();
    const [x, y] = [(event.clientX - box.left) / this.scale + this.x, (event.clientY - box.top) / this.scale + this.y];
    const within = (item, h = item.h) => x >= item.x && x <= item.x + item.w && y >= item.y && y <= item.y + h;
    return this.layout.items.find((item) => within(item)) || [...this.layout.holders].reverse().find((item) => within(item, OP.head)) || null;
  }

  /** Where the small map lies that shows which part of a large graph is seen; null where all of it is. */
  map() {
    const { width, height } = this.box();
    const { width: w, height: h } = this.layout;
    if (w * this.scale <= width && h * this.scale <= height) return null;
    const scale = Math.min(130 / w, (height - 32) / h, 0.2);
    return { scale, x: width - Math.max(10, w * scale) - 14, y: 14, w: Math.max(10, w * scale), h: Math.max(10, h * scale) };
  }

  /** Look at the place of the map under the pointer; tells whether there is one. */
  jump(event, dragging) {
    const map = this.layout && this.map(), box = this.canvas.getBoundingClientRect();
    if (!map) return false;
    const [px, py] = [event.clientX - box.left - map.x, event.clientY - box.top - map.y];
    if (!dragging && (px < -6 || py < -6 || px > map.w + 6 || py > map.h + 6)) return false;
    const { width, height } = this.box();
    this.x = px / map.scale - width / 2 / this.scale;
    this.y = py / map.scale - height / 2 / this.scale;
    this.draw();
    return true;
  }

  watch() {
    const canvas = this.canvas;
    let held = null;
    const pointers = new Map();
    canvas.addEventListener("pointerdown", (event) => {
      canvas.setPointerCapture(event.pointerId);
      this.onMap = this.jump(event);
      pointers.set(event.pointerId, [event.clientX, event.clientY]);
      held = { x: event.clientX, y: event.clientY, moved: false };
    });
    canvas.addEventListener("pointermove", (event) => {
      if (!pointers.has(event.pointerId)) {
        canvas.style.cursor = this.layout && this.at(event) ? "pointer" : "";
        return;
      }
      const before = pointers.get(event.pointerId);
      const others = [...pointers].filter(([id]) => id !== event.pointerId);
      if (others.length) {
        const [ox, oy] = others[0][1], box = canvas.getBoundingClientRect();
        const far = (x, y) => Math.hypot(x - ox, y - oy) || 1;
        this.zoom(far(event.clientX, event.clientY) / far(...before), [ox - box.left, oy - box.top]);
        if (held) held.moved = true;
      } else if (this.onMap) this.jump(event, true);
      else if (held) {
        if (Math.hypot(event.clientX - held.x, event.clientY - held.y) > 4) held.moved = true;
        if (held.moved) {
          canvas.classList.add("held");
          this.x -= (event.clientX - before[0]) / this.scale;
          this.y -= (event.clientY - before[1]) / this.scale;
          this.draw();
        }
      }
      pointers.set(event.pointerId, [event.clientX, event.clientY]);
    });
    const release = (event) => {
      pointers.delete(event.pointerId);
      canvas.classList.remove("held");
      if (held && !held.moved && !this.onMap && event.type === "pointerup") this.select(this.at(event));
      held = null;
      this.onMap = false;
    };
    canvas.addEventListener("pointerup", release);
    canvas.addEventListener("pointercancel", release);
    canvas.addEventListener("dblclick", (event) => this.toggle(this.at(event)));
    canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      const box = canvas.getBoundingClientRect();
      if (event.shiftKey) {
        this.x += (event.deltaY + event.deltaX) / this.scale;
        this.draw();
      } else this.zoom(Math.exp(-event.deltaY * (event.deltaMode ? 0.05 : 0.0016)), [event.clientX - box.left, event.clientY - box.top]);
    }, { passive: false });
    canvas.addEventListener("keydown", (event) => this.key(event));
    canvas.addEventListener("focus", () => this.draw());
    canvas.addEventListener("blur", () => this.draw());
    this.resized = new ResizeObserver(() => this.layout && this.draw());
    this.resized.observe(canvas);
  }

  draw() {
    if (this.waiting || !this.layout) return;
    this.waiting = requestAnimationFrame(() => {
      this.waiting = 0;
      paint(this);
    });
  }
}

const DTYPES = { float16: "f16", float32: "f32", float64: "f64", bfloat16: "bf16", int8: "i8", int16: "i16", int32: "i32", int64: "i64", uint8: "u8", complex64: "c64", complex128: "c128" };

/** A type as short as it can be told: "f32[8, 64]". */
function brief(spec) {
  return clipped(String(spec || "").replace(/\b[a-z]+\d+\b/g, (name) => DTYPES[name] || name));
}

function clipped(text) {
  return text.length > 40 ? `${text.slice(0, 38)}…` : text;
}

function middle(item) {
  return item.x + item.w / 2;
}

function closest(items, from, distance) {
  let best = null, least = Infinity;
  for (const item of items) {
    const far = distance(item);
    if (far < least) [best, least] = [item, far];
  }
  return best;
}
