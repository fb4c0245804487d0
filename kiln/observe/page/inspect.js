// The section of graphs: what is drawn, and beside it all about what is selected.

function graphs(main, asked) {
  if (!DATA.graphs.length) return main.append(el("div", { class: "sheet" }, problemsOf(), el("div", { class: "nothing" }, "No graph was captured.")));
  let current = Math.min(asked.graph || 0, DATA.graphs.length - 1), view = null, params = false;
  const stage = el("div", { class: "stage" }, el("div", { class: "keys", "aria-hidden": "true" }, "drag, scroll, arrows, Enter opens, 0 shows all"));
  const side = el("aside", { class: "side", "aria-label": "About the selection", tabindex: "-1" });
  const picker = el("select", { "aria-label": "Graph", onchange: () => pick(Number(picker.value)) }, DATA.graphs.map((graph, i) => el("option", { value: i }, `${graph.title}, ${counted(graph.ops, "op")}`)));
  const forms = el("div", { class: "set", role: "group", "aria-label": "Form of the graph" });
  const note = el("span", { class: "grow" });
  const button = (text, label, act) => el("button", { type: "button", "aria-label": label, title: label, onclick: act }, text);
  const withParams = button("Parameters", "Show parameters and saved values", () => {
    params = !params;
    withParams.setAttribute("aria-pressed", String(params));
    drawing.show(view, params);
  });
  const tools = el("div", { class: "tools" }, picker, forms,
    el("div", { class: "set", role: "group", "aria-label": "Modules" }, button("Expand", "Open all modules", () => drawing.openAll(true)), button("Collapse", "Close all modules", () => drawing.openAll(false))),
    el("div", { class: "set", role: "group", "aria-label": "Zoom" }, button("−", "Zoom out", () => drawing.zoom(0.8)), button("+", "Zoom in", () => drawing.zoom(1.25)), button("Fit", "Show the whole graph", () => drawing.whole())),
    el("div", { class: "set" }, withParams), note);
  main.append(el("div", { class: "graphs" }, tools, stage, side));
  const drawing = new GraphView(stage, { selected: (item) => about(item), entered: () => side.focus() });
  STATE.drawing = drawing;
  side.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      drawing.canvas.focus();
      event.preventDefault();
    }
  });

  const pick = (index, form) => {
    current = index;
    picker.value = String(index);
    const graph = DATA.graphs[index];
    const best = graph.views.findIndex((one) => one.name === form);
    const start = best >= 0 ? best : Math.max(0, graph.views.findIndex((one) => (one.kernels || []).length));
    forms.replaceChildren(...graph.views.map((one, i) => el("button", { type: "button", "data-form": one.name, onclick: () => turn(i) }, one.label || one.name)));
    forms.hidden = graph.views.length < 2;
    if (graph.views.length) turn(start);
    else side.replaceChildren(el("div", { class: "notice" }, graph.missing || "The nodes of this graph were not recorded."));
  };
  const turn = (i) => {
    view = DATA.graphs[current].views[i];
    [...forms.children].forEach((one, j) => one.setAttribute("aria-pressed", String(i === j)));
    withParams.disabled = !view.nodes.some((node) => HIDDEN.has(node.k));
    const ops = view.nodes.filter((node) => !["input", "parameter", "saved", "constant", "output"].includes(node.k)).length;
    note.textContent = `${counted(ops, "op")}, ${counted((view.kernels || []).length, "kernel")}`;
    drawing.show(view, params);
    about(null);
    STATE.graph = { index: current, view };
    STATE.mark();
  };
  const about = (item) => side.replaceChildren(...(item === null ? aboutGraph(DATA.graphs[current], view, drawing) : item.children ? aboutModule(item, view, drawing) : aboutNode(item.node, view, drawing)).flat(Infinity).filter(Boolean));
  STATE.kernel = (k) => {
    drawing.selectKernel(k);
    side.replaceChildren(...aboutKernel(view, k, drawing).flat(Infinity).filter(Boolean));
  };
  pick(current, asked.view);
  if (asked.node !== undefined) jump(asked.node, drawing);
  else if (asked.kernel !== undefined && asked.kernel !== null) STATE.kernel(asked.kernel);
  else if (asked.named) jump(Math.max(0, view.nodes.findIndex((node) => node.n === asked.named)), drawing);
  else if (asked.at) {
    const at = view.nodes.findIndex((node) => !HIDDEN.has(node.k) && placesOf(view, node).some((place) => place.file === asked.at[0] && place.line === asked.at[1]));
    if (at >= 0) drawing.selectNode(at);
  }
}

function placesOf(view, node) {
  return ((view.places && view.places[node.w]) || []).map(([file, line, name]) => ({ file: DATA.paths[file], line, name }));
}

function section(title, ...content) {
  return el("section", {}, el("h3", {}, title), ...content);
}

function nodeList(title, indices, view, drawing) {
  if (!indices.length) return null;
  return section(title, el("div", { class: "list" }, indices.slice(0, 60).map((index) => el("button", { type: "button", onclick: () => jump(index, drawing) }, el("b", {}, view.nodes[index].n), el("span", {}, view.nodes[index].s || view.nodes[index].k))), indices.length > 60 && el("span", {}, `and ${indices.length - 60} more`)));
}

function jump(index, drawing) {
  if (drawing.tree.leaves[index]) drawing.selectNode(index);
  else drawing.events.selected({ node: index });
}

function kernelList(view, drawing) {
  if (!(view.kernels || []).length) return null;
  return section(counted(view.kernels.length, "kernel"), el("div", { class: "list" }, view.kernels.slice(0, 200).map((kernel, k) => el("button", { type: "button", onclick: () => STATE.kernel(k) }, el("b", {}, el("i", { class: "swatch", style: `background:${palette().kernel(k)}` }), kernel.name, kernel.what && el("span", {}, ` ${kernel.what}`)), el("span", {}, [kernel.ops !== undefined && counted(kernel.ops, "op"), kernel.bytes !== undefined && kernel.bytes !== null && bytes(kernel.bytes)].filter(Boolean).join(", "))))));
}

function aboutGraph(graph, view, drawing) {
  return [
    el("div", {}, el("h2", {}, graph.title), el("p", { class: "what" }, `${counted(graph.ops, "call")} captured, ${counted(graph.inputs, "input")}, ${counted(graph.guards.length, "guard")}`)),
    graph.place && section("Starts at", placeLink(graph.place)),
    view.missing && el("div", { class: "notice" }, view.missing),
    legend(view), kernelList(view, drawing),
    view.code && codeBlock("As Python", view.code),
  ];
}

function legend(view) {
  const names = { input: "input or output", parameter: "parameter", saved: "saved for the backward", op: "captured call", pointwise: "element by element", reduction: "reduction", call: "eager kernel", view: "view", constant: "constant" };
  const colours = palette();
  const used = Object.keys(names).filter((kind) => view.nodes.some((node) => node.k === kind));
  return el("div", { class: "legend" }, used.map((kind) => el("span", {}, el("i", { style: `background:${colours.fills[kind]};border:1px solid ${colours.line}` }), names[kind])), (view.kernels || []).length > 0 && el("span", {}, el("i", { style: `border:2px solid ${colours.kernel(0)}` }), "fused kernel"), el("span", {}, el("i", { style: "background:var(--good);border-radius:50%" }), "leaves the graph"));
}

function aboutModule(item, view, drawing) {
  const inside = [];
  const gather = (one) => (one.children ? one.children.forEach(gather) : inside.push(one.node));
  gather(item);
  const kernels = [...new Set(inside.map((index) => view.nodes[index].g))].filter((k) => k >= 0 && view.kernels[k]);
  return [
    el("div", {}, el("h2", {}, item.path.split("/").join(".")), el("p", { class: "what" }, `Module of ${counted(item.count, "op")}`)),
    el("div", {}, el("button", { type: "button", class: "link", onclick: () => drawing.toggle(item) }, item.open ? "Close it" : "Open it")),
    kernels.length > 0 && section("Kernels with ops of it", el("div", { class: "list" }, kernels.map((k) => el("button", { type: "button", onclick: () => STATE.kernel(k) }, el("b", {}, view.kernels[k].name), el("span", {}, counted(view.kernels[k].ops || 0, "op")))))),
    nodeList("Ops", inside, view, drawing),
  ];
}

function aboutNode(index, view, drawing) {
  const node = view.nodes[index];
  const kernel = node.g >= 0 ? view.kernels[node.g] : null;
  const path = (view.paths && view.paths[node.p]) || [];
  return [
    el("div", {}, el("h2", {}, node.n), el("p", { class: "what" }, node.k === "input" ? "Input of the graph" : node.k === "parameter" ? "Tensor that the program holds" : node.k === "saved" ? "Saved by the forward half" : node.k === "output" ? "Output of the graph" : node.o)),
    drawing.leaving.has(index) && el("p", { class: "what" }, "It leaves the graph: a result, or a value that the backward needs."),
    el("dl", { class: "pairs" }, el("dt", {}, "Type"), el("dd", {}, node.s || "–"), path.length > 0 && [el("dt", {}, "Module"), el("dd", {}, path.join("."))], node.a && [el("dt", {}, "Call"), el("dd", {}, node.a)], node.f && [el("dt", {}, "Part of"), el("dd", {}, node.f)]),
    sourceOf(view, node),
    kernel && [section("Kernel", el("div", { class: "list" }, el("button", { type: "button", onclick: () => STATE.kernel(node.g) }, el("b", {}, el("i", { class: "swatch", style: `background:${palette().kernel(node.g)}` }), kernel.name), el("span", {}, counted(kernel.ops || 0, "op"))))), kernelText(view, kernel)],
    !kernel && node.k === "call" && section("Kernel", el("p", { class: "what" }, "Runs as one of PyTorch's own kernels.")),
    nodeList("Reads", [...new Set(node.i || [])], view, drawing), nodeList("Read by", [...new Set(drawing.users[index] || [])], view, drawing),
  ];
}

function kernelText(view, kernel) {
  return [...(kernel.codes || []).map((index) => view.codes[index] && codeBlock(view.codes[index].title, view.codes[index].text))];
}

function aboutKernel(view, k, drawing) {
  const kernel = view.kernels[k];
  if (!kernel) return [];
  const inside = view.nodes.map((node, index) => (node.g === k ? index : -1)).filter((index) => index >= 0);
  const rows = [["Reads", kernel.reads], ["Writes", kernel.writes]].filter(([, count]) => count !== undefined && count !== null);
  return [
    el("div", {}, el("h2", {}, el("i", { class: "swatch", style: `background:${palette().kernel(k)}` }), kernel.name), el("p", { class: "what" }, `Kernel of ${counted(inside.length, "op")}${kernel.what ? `: ${kernel.what}` : ""}`)),
    rows.length > 0 && el("dl", { class: "pairs" }, rows.map(([label, count]) => [el("dt", {}, label), el("dd", {}, bytes(count))]), kernel.seconds && [el("dt", {}, "One run"), el("dd", {}, `${seconds(kernel.seconds)}, ${bytes(Math.round(kernel.bytes / kernel.seconds))} a second`)]),
    kernelText(view, kernel), nodeList("Ops", inside, view, drawing),
  ];
}

/** The lines of the program that a node comes from, innermost first, those of the user's own files with their text. */
function sourceOf(view, node) {
  const places = placesOf(view, node);
  if (!places.length) return null;
  const own = places.filter((place) => DATA.files.some((file) => file.path === place.file && !file.library));
  const shown = own.length ? own.at(-1) : places.at(-1);
  const file = DATA.files.find((one) => one.path === shown.file);
  const first = file ? file.first || 1 : 1;
  const text = file && file.lines[shown.line - first];
  return section("Source", text && el("pre", { class: "at" }, python(text.trim(), null)[0]), el("div", { style: "display:grid;gap:2px" }, [...places].reverse().slice(0, 8).map((place) => el("div", {}, placeLink(place), el("span", { class: "place" }, ` in ${place.name}`)))));
}
