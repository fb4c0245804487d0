// The sections that are read: overview, source, guards, recompiles.

function placeLink(place) {
  if (!place || !place.file) return null;
  const file = DATA.files.findIndex((one) => one.path === place.file);
  const text = `${shortFile(place.file)}:${place.line}`;
  const whole = `${place.file}:${place.line}`;
  if (file < 0) return el("span", { class: "place", title: whole }, text);
  return el("button", { type: "button", class: "link place", title: whole, onclick: () => open("source", { file, line: place.line }) }, text);
}

function problemsOf() {
  return (DATA.problems || []).map((text) => el("div", { class: "notice", role: "alert" }, el("h3", {}, "Something is missing here"), text));
}

function overview(main) {
  const empty = !DATA.graphs.length && !DATA.breaks.length && !DATA.fallbacks.length;
  main.append(el("div", { class: "sheet" },
    el("section", {}, el("h2", {}, DATA.title), el("p", { class: "lead" }, DATA.about || "")),
    problemsOf(),
    empty && el("div", { class: "nothing" }, "Nothing was captured: no compiled function was called, or none of them works on tensors."),
    DATA.summary.length > 0 && el("dl", { class: "facts" }, DATA.summary.map((fact) => el("div", { class: fact.bad ? "bad" : "" }, el("dt", {}, fact.label), el("dd", {}, factText(fact), noteOf(fact) && el("div", { class: "note" }, noteOf(fact)))))),
    DATA.breaks.length > 0 && el("section", {}, el("h2", {}, "Where graphs end"), DATA.breaks.map(breakCard)),
    DATA.fallbacks.length > 0 && el("section", {}, el("h2", {}, "Left to Python"), DATA.fallbacks.map((one) => el("div", { class: "card" }, el("header", {}, el("span", { class: "tag" }, one.region)), el("div", { class: "body" }, el("pre", { tabindex: "0" }, one.error))))),
    DATA.graphs.length > 0 && el("section", {}, el("h2", {}, "Graphs"), el("div", { class: "card scroll" }, graphTable())),
    DATA.warnings.length > 0 && el("section", {}, el("h2", {}, "Warnings"), DATA.warnings.map((text) => el("div", { class: "notice" }, text)))));
}

function factText(fact) {
  return fact.unit === "seconds" ? seconds(fact.value) : fact.unit === "bytes" ? bytes(fact.value) : String(fact.value);
}

function noteOf(fact) {
  return fact.eager ? `eager ${bytes(fact.eager)}` : fact.note;
}

function graphTable() {
  return el("table", {},
    el("thead", {}, el("tr", {}, ["Graph", "Starts at", "Ops", "Inputs", "Kernels", "Guards"].map((name, i) => el("th", { class: i > 1 ? "n" : "", scope: "col" }, name)))),
    el("tbody", {}, DATA.graphs.map((graph, index) => el("tr", {},
      el("td", {}, el("button", { type: "button", class: "link mono", onclick: () => open("graphs", { graph: index }) }, graph.title)),
      el("td", {}, placeLink(graph.place)),
      el("td", { class: "n" }, graph.ops), el("td", { class: "n" }, graph.inputs),
      el("td", { class: "n" }, kernelCount(graph)), el("td", { class: "n" }, graph.guards.length)))));
}

function kernelCount(graph) {
  const counts = graph.views.map((view) => (view.like ? 0 : (view.kernels || []).length));
  return counts.some(Boolean) ? counts.reduce((a, b) => a + b) : "–";
}

function breakCard(one) {
  return el("article", { class: "card", "aria-label": `Break: ${one.kind}` },
    el("header", {}, el("span", { class: "tag" }, one.kind), el("span", { class: "grow" }, placeLink(one.place), one.region && el("span", { class: "place" }, ` in ${one.region}`)), one.count > 1 && el("span", { class: "place" }, `${one.count} times`)),
    el("div", { class: "body" }, breakText(one)));
}

function breakText(one) {
  return [
    caretOf(one),
    whyOf(one),
  ];
}

function whyOf(one) {
  return el("dl", { class: "remedy" }, el("dt", {}, "Why"), el("dd", {}, one.reason), one.remedy ? [el("dt", {}, "Remedy"), el("dd", {}, one.remedy)] : null);
}

/** The line of a break with what it is about underlined. */
function caretOf(one) {
  const { text, column, width } = one.place || {};
  if (!text) return null;
  const caret = width > 0 ? " ".repeat(column) + "^".repeat(Math.min(width, Math.max(1, text.length - column))) : "";
  return el("pre", { class: "at" }, text, caret && el("span", { class: "caret" }, `\n${caret}`));
}

// Source

function source(main, asked) {
  if (!DATA.files.length) return main.append(el("div", { class: "sheet" }, el("div", { class: "nothing" }, "No source: nothing was captured, or the files could not be read.")));
  const listing = el("div", { class: "listing", tabindex: "0", role: "region", "aria-label": "Source" });
  const buttons = DATA.files.map((file, index) => el("button", { type: "button", title: file.path, onclick: () => show(index) },
    el("b", {}, shortFile(file.path)), el("span", { class: "what" }, [counted(Object.keys(file.tints).length, "captured line"), file.breaks.length && counted(file.breaks.length, "break")].filter(Boolean).join(", "))));
  const show = (index, line) => {
    buttons.forEach((button, i) => button.setAttribute("aria-current", String(i === index)));
    listing.replaceChildren(...fileRows(DATA.files[index], line));
    const here = listing.querySelector(".here") || listing.querySelector(".stop, .t0, .t1, .t2, .t3");
    if (here) here.scrollIntoView({ block: "center" });
  };
  main.append(el("div", { class: "source" }, el("nav", { class: "files", "aria-label": "Files" }, buttons), listing));
  show(asked.file || 0, asked.line);
}

function fileRows(file, line) {
  const breaks = new Map();
  for (const index of file.breaks) {
    const at = DATA.breaks[index].place.line;
    breaks.set(at, [...(breaks.get(at) || []), DATA.breaks[index]]);
  }
  const graphs = [...new Set(Object.values(file.tints).flatMap((tint) => tint.graphs))].sort((a, b) => a - b);
  const legend = el("div", { class: "path" }, file.path, el("div", { class: "legend" }, graphs.slice(0, 8).map((graph) =>
    el("span", {}, el("i", { style: `background:var(--rail-${graph % 4})` }), DATA.graphs[graph].title)), file.breaks.length > 0 && el("span", {}, el("i", { style: "background:var(--bad)" }), "a graph ends")));
  let quote = null;
  return [legend, ...file.lines.flatMap((text, i) => {
    const number = i + (file.first || 1), tint = file.tints[number], stops = breaks.get(number);
    let parts;
    [parts, quote] = python(text, quote);
    const name = ["row", tint && `t${tint.graphs[0] % 4}`, stops && "stop", number === line && "here"].filter(Boolean).join(" ");
    const row = el("div", { class: name, "data-line": number }, el("span", { class: "no" }, number), el("span", { class: "rail" }), el("span", { class: "text" }, parts.length ? parts : " "),
      el("span", { class: "tail" }, tint && el("button", { type: "button", class: "ops", "aria-label": `Line ${number}: ${counted(tint.ops, "op")} in the graph`, onclick: () => open("graphs", { graph: tint.graphs[0], at: [file.path, number] }) }, `${counted(tint.ops, "op")} →`)));
    return stops ? [row, ...stops.map((one) => el("div", { class: "broken", role: "note" }, el("div", { class: "tag" }, one.kind), caretOf(one), whyOf(one)))] : [row];
  })];
}

// Guards

function guards(main, asked) {
  const total = DATA.graphs.reduce((sum, graph) => sum + graph.guards.length, 0);
  const filter = el("input", { class: "filter", type: "search", placeholder: "Filter guards", "aria-label": "Filter guards", value: asked.filter || "" });
  const lists = el("div", { class: "sheet", style: "padding:0" });
  const show = () => {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    lists.replaceChildren(...DATA.graphs.map((graph) => {
      const kept = graph.guards.filter((guard) => words.every((word) => guard.text.toLowerCase().includes(word)));
      if (!kept.length) return null;
      const own = kept.filter((guard) => !guard.inside), inside = kept.filter((guard) => guard.inside);
      return el("section", {}, el("h2", { class: "mono" }, graph.title), guardTable(own),
        inside.length > 0 && el("details", { open: words.length > 0 }, el("summary", {}, `${counted(inside.length, "more guard")} on hooks, classes and what code of PyTorch reads`), guardTable(inside)));
    }).filter(Boolean));
  };
  filter.addEventListener("input", show);
  main.append(el("div", { class: "sheet" },
    el("section", {}, el("h2", {}, "Guards"), el("p", { class: "lead" }, "What was read while a function was captured, and must be the same for its graph to be used again. The first that fails leads to a recompile."), total ? filter : el("div", { class: "nothing" }, "No guards were recorded.")), lists));
  show();
}

function guardTable(list) {
  if (!list.length) return null;
  return el("div", { class: "card scroll" }, el("table", {}, el("tbody", {}, list.map((guard) => el("tr", {}, el("td", { class: "wide" }, guard.text), el("td", { class: "n" }, placeLink(guard.place)))))));
}

// Recompiles

function recompiles(main) {
  const byRegion = new Map();
  for (const one of DATA.recompiles) byRegion.set(one.region, [...(byRegion.get(one.region) || []), one]);
  main.append(el("div", { class: "sheet" },
    el("section", {}, el("h2", {}, "Recompiles"), el("p", { class: "lead" }, "Each time no graph at hand fitted a call: what the failing guard is about, the value it was captured with, and the value that came."), !DATA.recompiles.length && el("div", { class: "nothing" }, "Nothing was compiled a second time.")),
    [...byRegion].map(([region, list]) => el("section", {}, el("h2", { class: "mono" }, region), list.map(historyOf)))));
}

function historyOf(one) {
  return el("article", { class: "card" },
    el("header", {}, el("b", { class: "mono" }, one.source || one.guard), el("span", { class: "grow" }, placeLink(one.place)), el("span", { class: "place" }, counted(one.count, "time"))),
    el("div", { class: "body" },
      el("ol", { class: "history" }, one.changes.map((change) => el("li", {}, el("span", { class: "swap" }, el("span", { class: "old" }, change.old), el("span", { "aria-label": "became" }, "→"), el("span", { class: "new" }, change.new))))),
      el("dl", { class: "remedy" }, el("dt", {}, "Why"), el("dd", {}, one.guard), one.remedy ? [el("dt", {}, "Remedy"), el("dd", {}, one.remedy)] : null, one.limited ? [el("dt", {}, "Limit"), el("dd", {}, "It was compiled as often as allowed, and runs eagerly since.")] : null)));
}
