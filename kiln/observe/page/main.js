// Sections, search and colours.

let DATA = null;
const STATE = { section: "", drawing: null, graph: null, query: "", kernel: () => {}, mark: () => {} };
const EMPTY = { title: "Kiln", about: "", problems: [], summary: [], files: [], paths: [], graphs: [], breaks: [], fallbacks: [], recompiles: [], warnings: [], timeline: {} };
const SECTIONS = {
  overview: ["Overview", overview, () => null],
  source: ["Source", source, () => null],
  graphs: ["Graphs", graphs, () => DATA.graphs.length],
  timeline: ["Timeline", timeline, () => null],
  guards: ["Guards", guards, () => DATA.graphs.reduce((sum, graph) => sum + graph.guards.length, 0)],
  recompiles: ["Recompiles", recompiles, () => DATA.recompiles.length],
  memory: ["Memory", memory, () => null],
};

function open(name, asked = {}) {
  const main = document.getElementById("main");
  STATE.section = name;
  STATE.drawing = null;
  for (const tab of document.querySelectorAll("#tabs button")) {
    const here = tab.dataset.section === name;
    tab.setAttribute("aria-selected", String(here));
    tab.tabIndex = here ? 0 : -1;
    const list = tab.parentElement; // scrollIntoView would have the Tab key begin here
    if (here) list.scrollLeft = Math.max(Math.min(list.scrollLeft, tab.offsetLeft - 8), tab.offsetLeft + tab.offsetWidth + 8 - list.clientWidth);
  }
  main.setAttribute("aria-labelledby", `tab-${name}`);
  main.replaceChildren();
  main.scrollTop = 0;
  try {
    SECTIONS[name][1](main, asked);
  } catch (error) {
    main.replaceChildren(el("div", { class: "sheet" }, problemsOf(), el("div", { class: "notice", role: "alert" }, el("h3", {}, "This part of the record cannot be shown"), `It is damaged, or was written by another version of Kiln. (${error.message})`)));
  }
  try {
    history.replaceState(null, "", `#${name}`);
  } catch { /* a page within another may have no address of its own */ }
}

function tabs() {
  const list = document.getElementById("tabs");
  for (const [name, [title, , count]] of Object.entries(SECTIONS)) {
    const number = name === "recompiles" || name === "graphs" || name === "guards" ? count() : null;
    list.append(el("button", { type: "button", role: "tab", id: `tab-${name}`, "data-section": name, "aria-controls": "main", onclick: () => open(name) }, title, number ? el("span", { class: "count" }, number) : null));
  }
  list.addEventListener("keydown", (event) => {
    const all = [...list.children], at = all.indexOf(document.activeElement);
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: all.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    const next = all[(to + all.length) % all.length];
    open(next.dataset.section);
    next.focus();
  });
}

function theme() {
  const button = document.getElementById("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  let chosen = null;
  try {
    chosen = localStorage.getItem("kiln-theme");
  } catch { /* files may have no storage */ }
  const show = () => {
    const now = chosen || (system.matches ? "dark" : "light");
    document.documentElement.dataset.theme = now;
    button.textContent = now === "dark" ? "Light" : "Dark";
    button.setAttribute("aria-label", `Switch to ${now === "dark" ? "light" : "dark"} colours`);
    if (STATE.drawing) STATE.drawing.draw();
  };
  button.addEventListener("click", () => {
    chosen = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    try {
      localStorage.setItem("kiln-theme", chosen);
    } catch { /* then it lasts as long as the page */ }
    show();
  });
  system.addEventListener("change", show);
  show();
}

// Search

let index = null;

function everything() {
  const made = [];
  const add = (group, name, about, go) => made.push({ group, name, about, text: `${name} ${about}`.toLowerCase(), go });
  DATA.breaks.forEach((one) => add("Breaks", one.kind, `${one.place ? `${shortFile(one.place.file)}:${one.place.line} ` : ""}${one.reason} ${one.remedy || ""}`, () => {
    const file = one.place ? DATA.files.findIndex((each) => each.path === one.place.file) : -1;
    if (file >= 0) open("source", { file, line: one.place.line });
    else open("overview");
  }));
  DATA.graphs.forEach((graph, g) => {
    add("Graphs", graph.title, `${counted(graph.ops, "op")}`, () => open("graphs", { graph: g }));
    graph.views.forEach((view) => {
      const seen = new Set();
      (view.paths || []).forEach((path) => path.length && seen.add(path.join(".")));
      for (const path of seen) add("Modules", path, `${graph.title}, ${view.name}`, () => open("graphs", { graph: g, view: view.name, node: view.nodes.findIndex((node) => (view.paths[node.p] || []).join(".") === path && !HIDDEN.has(node.k)) }));
      view.nodes.forEach((node, i) => add("Nodes", node.n, `${node.o !== node.n ? `${node.o} ` : ""}${node.s || ""} ${graph.title}, ${view.name}`, () => open("graphs", { graph: g, view: view.name, node: i })));
      (view.kernels || []).forEach((kernel, k) => add("Kernels", kernel.name, `${kernel.codes && kernel.codes.length ? view.codes[kernel.codes[0]].text.split("\n")[0] : ""} ${graph.title}, ${view.name}`, () => open("graphs", { graph: g, view: view.name, kernel: k })));
    });
    graph.guards.forEach((guard) => add("Guards", guard.text, graph.title, () => open("guards", { filter: guard.text })));
  });
  DATA.recompiles.forEach((one) => add("Recompiles", one.region, `${one.source} ${one.guard}`, () => open("recompiles")));
  DATA.fallbacks.forEach((one) => add("Left to Python", one.region, one.error, () => open("overview")));
  DATA.files.forEach((file, f) => file.lines.forEach((text, i) => text.trim() && add("Source", text.trim(), `${shortFile(file.path)}:${i + (file.first || 1)}`, () => open("source", { file: f, line: i + (file.first || 1) }))));
  return made;
}

function matching(query) {
  const words = query.toLowerCase().split(/\s+/).filter(Boolean);
  if (!words.length) return [];
  index = index || everything();
  return index.filter((entry) => words.every((word) => entry.text.includes(word)));
}

function search() {
  const input = document.getElementById("search"), list = document.getElementById("found");
  let hits = [], at = -1;
  const show = () => {
    STATE.query = input.value;
    const found = matching(input.value);
    STATE.mark();
    const groups = new Map();
    for (const entry of found) (groups.get(entry.group) || groups.set(entry.group, []).get(entry.group)).push(entry);
    hits = [];
    at = -1;
    const rows = [...groups].flatMap(([name, entries]) => [el("div", { class: "group", role: "presentation" }, `${name} (${entries.length})`), ...entries.slice(0, 8).map((entry) => {
      const hit = el("div", { class: "hit", role: "option", id: `hit-${hits.length}`, "aria-selected": "false", onpointerdown: (event) => { event.preventDefault(); take(entry); } }, el("b", {}, entry.name), el("span", {}, entry.about));
      hits.push([entry, hit]);
      return hit;
    })]);
    list.replaceChildren(...(rows.length ? rows : [el("div", { class: "none" }, `Nothing here reads “${input.value}”.`)]));
    list.hidden = !input.value.trim();
    input.setAttribute("aria-expanded", String(!list.hidden));
    if (!list.hidden) say(counted(found.length, "result"));
    if (hits.length) move(0);
  };
  const move = (to) => {
    if (!hits.length) return;
    if (at >= 0) hits[at][1].setAttribute("aria-selected", "false");
    at = (to + hits.length) % hits.length;
    hits[at][1].setAttribute("aria-selected", "true");
    hits[at][1].scrollIntoView({ block: "nearest" });
    input.setAttribute("aria-activedescendant", hits[at][1].id);
  };
  const close = () => {
    list.hidden = true;
    input.setAttribute("aria-expanded", "false");
    input.removeAttribute("aria-activedescendant");
  };
  const take = (entry) => {
    close();
    entry.go();
    const target = document.querySelector("#main canvas, #main .listing") || document.getElementById("main");
    target.focus();
  };
  let waiting = 0;
  input.addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(show, 60);
  });
  input.addEventListener("focus", () => input.value && show());
  input.addEventListener("blur", close);
  input.addEventListener("keydown", (event) => {
    if (event.key === "ArrowDown") move(at + 1);
    else if (event.key === "ArrowUp") move(at - 1);
    else if (event.key === "Enter") {
      clearTimeout(waiting);
      if (STATE.query !== input.value) show();
      if (at >= 0) take(hits[at][0]);
    } else if (event.key === "Escape") {
      if (input.value) input.value = "";
      else input.blur();
      show();
    } else return;
    event.preventDefault();
  });
  document.addEventListener("keydown", (event) => {
    const typing = event.target.closest && event.target.closest("input, textarea, select");
    if (event.key === "/" && !typing && !event.ctrlKey && !event.metaKey) {
      event.preventDefault();
      input.focus();
      input.select();
    }
  });
  /** Marks what is searched for in the graph that is drawn. */
  STATE.mark = () => {
    if (!STATE.drawing || !STATE.graph) return;
    const words = STATE.query.toLowerCase().split(/\s+/).filter(Boolean);
    const found = new Set();
    if (words.length) STATE.graph.view.nodes.forEach((node, i) => {
      const text = `${node.n} ${node.o} ${node.s} ${((STATE.graph.view.paths || [])[node.p] || []).join(".")}`.toLowerCase();
      if (words.every((word) => text.includes(word))) found.add(i);
    });
    STATE.drawing.mark(words.length && found.size ? found : null);
  };
}

function start() {
  const text = document.getElementById("data").textContent;
  try {
    const given = JSON.parse(text);
    if (given === null || typeof given !== "object" || Array.isArray(given)) throw new Error("it is no object");
    DATA = { ...EMPTY, ...given };
    for (const [key, value] of Object.entries(EMPTY)) if (Array.isArray(value) && !Array.isArray(DATA[key])) throw new Error(`${key} is no list`);
  } catch (error) {
    DATA = { ...EMPTY, problems: [`The record in this page cannot be read: ${error.message}. Write the report again.`] };
  }
  for (const graph of DATA.graphs) for (const view of graph.views || []) {
    const like = view.like && graph.views.find((other) => other.name === view.like);
    if (like) [view.kernels, view.codes] = [like.kernels, like.codes];
  }
  theme();
  tabs();
  search();
  const name = location.hash.slice(1);
  open(Object.hasOwn(SECTIONS, name) ? name : "overview");
  document.documentElement.dataset.ready = "true";
}

start();
