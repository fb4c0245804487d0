// Time and memory: bars over a common scale, with the same numbers as text.

const BAR = { capture: 205, trace: 275, differentiate: 275, expand: 178, fuse: 145, generate: 18, code: 18, plan: 45, launch: 45, kernel: 18, call: 205, view: 95 };

function barColour(name) {
  const hue = BAR[name] ?? HUES[[...String(name)].reduce((sum, letter) => (sum * 31 + letter.charCodeAt(0)) % 997, 7) % HUES.length];
  return `hsl(${hue}, 48%, 42%)`;
}

function timeline(main) {
  const parts = [["Compiling", DATA.timeline.compile, "Each stage when it ran, by graph."], ["One call", DATA.timeline.call, "The steps of the quickest call of each graph, measured one by one."]];
  main.append(el("div", { class: "sheet" }, parts.map(([title, chart, about]) => {
    const lanes = (chart && chart.lanes) || [];
    const total = Math.max(1e-12, ...lanes.flatMap((lane) => lane.spans.map((span) => span.start + span.seconds)));
    return el("section", {}, el("h2", {}, title), el("p", { class: "lead" }, lanes.length ? `${chart.about || about} ${seconds(chart.total ?? total)} in all.` : ""),
      lanes.length ? el("div", { class: "card" }, lanesOf(lanes, total)) : el("div", { class: "nothing" }, (chart && chart.missing) || "No times were recorded."), lanes.length > 0 && totals(lanes));
  })));
}

function lanesOf(lanes, total) {
  const ticks = [0, 0.25, 0.5, 0.75, 1];
  return el("div", { class: "lanes" }, el("div", { class: "lane", "aria-hidden": "true" }, el("span"), el("div", { class: "axis" }, ticks.map((t) => el("span", { style: `left:${t * 100}%` }, t ? seconds(total * t) : "0"))), el("span")),
    lanes.map((lane) => el("div", { class: "lane" }, el("span", { class: "who", title: lane.name }, lane.inner ? "" : lane.name),
      el("div", { class: "track", role: "list", "aria-label": lane.name }, lane.spans.map((span) => {
        const text = `${span.label}: ${seconds(span.seconds)}${span.note ? `, ${span.note}` : ""}`;
        const shown = span.seconds / total > 0.025 ? span.label : "";
        const go = span.graph !== undefined && span.graph !== null ? () => open("graphs", { graph: span.graph, view: span.view, kernel: span.kernel }) : null;
        const given = { class: "span", role: go ? undefined : "listitem", style: `left:${(span.start / total) * 100}%;width:${(span.seconds / total) * 100}%;background:${barColour(span.kind || span.label)}`, title: text, "aria-label": text };
        return go ? el("button", { type: "button", ...given, onclick: go }, shown) : el("div", { ...given, tabindex: "0" }, shown);
      })), el("span", { class: "n" }, lane.inner ? "" : seconds(lane.spans.reduce((sum, span) => sum + span.seconds, 0))))));
}

function totals(lanes) {
  const sums = new Map();
  for (const lane of lanes) for (const span of lane.spans) {
    const known = sums.get(span.label) || { count: 0, seconds: 0 };
    sums.set(span.label, { kind: span.kind, count: known.count + 1, seconds: known.seconds + (span.own ?? span.seconds) });
  }
  const rows = [...sums].sort((a, b) => b[1].seconds - a[1].seconds);
  const most = rows[0][1].seconds || 1;
  return el("div", { class: "card scroll" }, el("table", {}, el("thead", {}, el("tr", {}, ["What", "Times", "Seconds", ""].map((name, i) => el("th", { scope: "col", class: i && name ? "n" : "" }, name)))),
    el("tbody", {}, rows.slice(0, 15).map(([name, sum]) => el("tr", {}, el("td", { class: "mono" }, name), el("td", { class: "n" }, sum.count), el("td", { class: "n" }, seconds(sum.seconds)),
      el("td", { style: "width:38%" }, el("div", { style: `height:10px;border-radius:3px;background:${barColour(sum.kind || name)};width:${Math.max(0.5, (sum.seconds / most) * 100)}%` })))))));
}

// Memory

function memory(main) {
  const plans = DATA.graphs.flatMap((graph, index) => graph.views.filter((view) => view.memory).map((view) => ({ graph, index, view })));
  main.append(el("div", { class: "sheet" },
    el("section", {}, el("h2", {}, "Memory over the plan"), el("p", { class: "lead" }, "Where intermediate values lie in the arena, from the step that writes each to the last that reads it. Values whose times do not meet share memory."), !plans.length && el("div", { class: "nothing" }, "No plan with memory of its own was recorded.")),
    plans.map(({ graph, index, view }) => el("section", {}, el("h2", { class: "mono" }, `${graph.title}, ${view.name}`), planOf(view.memory, index, view.name)))));
}

function planOf(plan, index, form) {
  const values = plan.values.filter((value) => typeof value.bytes === "number" && value.offset >= 0);
  const sum = values.reduce((total, value) => total + value.bytes, 0);
  const facts = [["Arena", bytes(plan.arena)], ["Without sharing", bytes(sum)], plan.peak !== undefined && ["Peak of the plan", bytes(plan.peak)], plan.eager !== undefined && plan.eager !== null && ["Peak of eager", bytes(plan.eager)], ["Values", plan.values.length], ["Steps", plan.steps]].filter(Boolean);
  const largest = [...plan.values].sort((a, b) => (b.bytes || 0) - (a.bytes || 0)).slice(0, 12);
  return [el("dl", { class: "facts" }, facts.map(([label, value]) => el("div", {}, el("dt", {}, label), el("dd", {}, String(value))))),
    values.length > 0 && el("div", { class: "card", style: "padding:14px" }, plot(plan, values), el("p", { class: "place" }, "The line is how many bytes are alive.")),
    (plan.alive || []).length > 1 && el("div", { class: "card", style: "padding:14px" }, curves(plan), el("div", { class: "legend" }, el("span", {}, el("i", { style: "background:var(--accent)" }), "bytes alive in the plan, results included"), el("span", {}, el("i", { style: "background:var(--firm)" }), "if the graph ran op by op"))),
    plan.values.length > 0 && el("div", { class: "card scroll" }, el("table", {}, el("thead", {}, el("tr", {}, ["Largest values", "Bytes", "At", "Steps"].map((name, i) => el("th", { scope: "col", class: i ? "n" : "" }, name)))),
      el("tbody", {}, largest.map((value) => el("tr", {}, el("td", {}, el("button", { type: "button", class: "link mono", onclick: () => open("graphs", { graph: index, view: form, named: value.name }) }, value.name)), el("td", { class: "n" }, bytes(value.bytes)), el("td", { class: "n" }, value.offset >= 0 ? value.offset.toLocaleString("en") : "varies"), el("td", { class: "n" }, `${value.first} to ${value.last}`))))))];
}

/** Bytes alive over a call: of the plan, and of eager; both from the first step to the last. */
function curves(plan) {
  const [width, height, left, bottom] = [1040, 190, 62, 12];
  const lines = [[plan.running || [], "var(--firm)"], [plan.alive, "var(--accent)"]];
  const top = Math.max(1, ...lines.flatMap(([list]) => list));
  const py = (count) => 8 + (height - bottom - 8) * (1 - count / top);
  const made = svg("svg", { class: "plot", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `At most ${bytes(Math.max(...plan.alive))} alive in the plan, ${bytes(Math.max(0, ...(plan.running || [])))} op by op` });
  for (const part of [0, 1]) made.append(svg("line", { x1: left, x2: width - 8, y1: py(top * part), y2: py(top * part), stroke: "var(--line)" }), svg("text", { x: left - 8, y: py(top * part) + 4, "text-anchor": "end" }, bytes(Math.round(top * part))));
  for (const [list, colour] of lines) {
    const px = (step) => left + ((width - left - 8) * step) / Math.max(1, list.length);
    made.append(svg("path", { d: list.map((count, step) => `${step ? "L" : "M"}${px(step)},${py(count)}L${px(step + 1)},${py(count)}`).join(""), fill: "none", stroke: colour, "stroke-width": 2 }));
  }
  return made;
}

function plot(plan, values) {
  const [width, height, left, bottom] = [1040, 300, 62, 26];
  const steps = Math.max(1, plan.steps, ...values.map((value) => value.last + 1));
  const top = Math.max(1, plan.arena || 0, ...values.map((value) => value.offset + value.bytes));
  const px = (step) => left + ((width - left - 8) * step) / steps;
  const py = (offset) => 8 + (height - bottom - 8) * (1 - offset / top);
  const made = svg("svg", { class: "plot", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${values.length} values over ${steps} steps in ${bytes(top)}` });
  for (const part of [0, 0.5, 1]) {
    made.append(svg("line", { x1: left, x2: width - 8, y1: py(top * part), y2: py(top * part), stroke: "var(--line)" }), svg("text", { x: left - 8, y: py(top * part) + 4, "text-anchor": "end" }, bytes(Math.round(top * part))));
  }
  for (const part of [0, 0.25, 0.5, 0.75, 1]) made.append(svg("text", { x: px(steps * part), y: height - 8, "text-anchor": part === 1 ? "end" : part ? "middle" : "start" }, part ? String(Math.round(steps * part)) : "step 0"));
  values.forEach((value, i) => {
    const rect = svg("rect", { class: "value", x: px(value.first), y: py(value.offset + value.bytes), width: Math.max(1.5, px(value.last + 1) - px(value.first)), height: Math.max(1.5, py(value.offset) - py(value.offset + value.bytes)), fill: `hsl(${HUES[i % HUES.length]}, 46%, 52%)`, rx: 2 });
    rect.append(svg("title", {}, `${value.name}: ${bytes(value.bytes)} at ${value.offset}, steps ${value.first} to ${value.last}`));
    made.append(rect);
  });
  const live = new Array(steps + 1).fill(0);
  for (const value of values) for (let step = value.first; step <= value.last; step++) live[step] += value.bytes;
  const path = live.slice(0, steps).map((count, step) => `${step ? "L" : "M"}${px(step)},${py(count)}L${px(step + 1)},${py(count)}`).join("");
  made.append(svg("path", { d: path, fill: "none", stroke: "var(--ink)", "stroke-width": 1.4 }));
  return made;
}
