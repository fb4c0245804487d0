// Painting a graph: modules, outlines of fused kernels, edges with their types, nodes.

function paint(graph) {
  const { canvas, paper, layout, scale, x, y } = graph;
  const { width, height } = graph.box();
  const dense = devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * dense) || canvas.height !== Math.round(height * dense)) {
    canvas.width = Math.round(width * dense);
    canvas.height = Math.round(height * dense);
  }
  const colours = palette();
  paper.setTransform(1, 0, 0, 1, 0, 0);
  paper.clearRect(0, 0, canvas.width, canvas.height);
  paper.setTransform(scale * dense, 0, 0, scale * dense, -x * scale * dense, -y * scale * dense);
  const seen = { left: x, top: y, right: x + width / scale, bottom: y + height / scale };
  const visible = (item) => item.x < seen.right && item.x + item.w > seen.left && item.y < seen.bottom && item.y + item.h > seen.top;
  const near = near_(graph);
  for (const item of layout.holders) if (visible(item)) paintHolder(graph, item, colours);
  if (scale > 0.12) paintKernels(graph, colours, visible);
  const edges = layout.edges.filter((edge) => Math.min(edge.from.y, edge.to.y) < seen.bottom && Math.max(edge.from.y + edge.from.h, edge.to.y + edge.to.h) > seen.top);
  for (const edge of edges) paintEdge(graph, edge, colours, near);
  for (const item of layout.items) if (visible(item)) paintItem(graph, item, colours, near);
  if (scale > 0.62) paintTypes(graph, edges, colours, seen);
  paper.setTransform(dense, 0, 0, dense, 0, 0);
  paintMap(graph, colours, width, height);
  graph.drawn = (graph.drawn || 0) + 1;
}

function paintMap(graph, colours, width, height) {
  const map = graph.map(), { paper, layout } = graph;
  if (!map) return;
  paper.globalAlpha = 0.94;
  paper.fillStyle = colours.panel;
  paper.strokeStyle = colours.line;
  paper.lineWidth = 1;
  paper.beginPath();
  paper.roundRect(map.x - 6, map.y - 6, map.w + 12, map.h + 12, 6);
  paper.fill();
  paper.stroke();
  for (const item of layout.items) {
    const node = item.children ? null : graph.view.nodes[item.node];
    const found = graph.matches && node && graph.matches.has(item.node);
    paper.fillStyle = graph.selected === item || found ? colours.accent : node && node.g >= 0 ? colours.kernel(node.g) : colours.edge;
    const large = graph.selected === item || found ? 2 : 1;
    paper.fillRect(map.x + item.x * map.scale, map.y + item.y * map.scale, Math.max(2 * large, item.w * map.scale), Math.max(large, item.h * map.scale));
  }
  paper.globalAlpha = 1;
  paper.save();
  paper.beginPath();
  paper.rect(map.x - 6, map.y - 6, map.w + 12, map.h + 12);
  paper.clip();
  paper.strokeStyle = colours.focus;
  paper.lineWidth = 1.5;
  const left = Math.max(map.x - 5, map.x + graph.x * map.scale), right = Math.min(map.x + map.w + 5, map.x + (graph.x + width / graph.scale) * map.scale);
  paper.strokeRect(left, map.y + graph.y * map.scale, Math.max(6, right - left), (height / graph.scale) * map.scale);
  paper.restore();
}

/** What is near the selection: itself, what it reads and what reads it. */
function near_(graph) {
  const item = graph.selected;
  if (!item || item.open) return null;
  const near = new Set([item]);
  for (const edge of graph.layout.edges) {
    if (edge.from === item) near.add(edge.to);
    if (edge.to === item) near.add(edge.from);
  }
  return near;
}

function paintHolder(graph, item, colours) {
  const paper = graph.paper;
  paper.beginPath();
  paper.roundRect(item.x, item.y, item.w, item.h, 10);
  paper.fillStyle = colours.holder(item.depth);
  paper.fill();
  paper.lineWidth = graph.selected === item ? 2 : 1;
  paper.strokeStyle = graph.selected === item ? colours.focus : colours.line;
  paper.stroke();
  if (graph.scale < 0.3) return;
  paper.fillStyle = colours.soft;
  paper.font = "600 12px " + graph.mono();
  paper.textBaseline = "middle";
  paper.textAlign = "left";
  paper.fillText(clipped(item.label), item.x + 26, item.y + 15);
  sign(paper, item.x + 14, item.y + 15, false, colours.faint);
}

function sign(paper, x, y, plus, colour) {
  paper.strokeStyle = colour;
  paper.lineWidth = 1.5;
  paper.beginPath();
  paper.moveTo(x - 4, y);
  paper.lineTo(x + 4, y);
  if (plus) {
    paper.moveTo(x, y - 4);
    paper.lineTo(x, y + 4);
  }
  paper.stroke();
}

/** One outline around the ops of each kernel: fat shapes in the colour of the line, then thinner ones in that of the ground. */
function paintKernels(graph, colours, visible) {
  const { paper, view, tree, members } = graph;
  for (const [k, list] of members) {
    const leaves = list.map((index) => tree.leaves[index]).filter((leaf) => leaf && shownFor(leaf) === leaf);
    if (!leaves.length || !leaves.some(visible)) continue;
    const inside = new Set(leaves);
    const links = [];
    for (const leaf of leaves) for (const edge of graph.outs.get(leaf) || []) if (inside.has(edge.to)) links.push(edge);
    const chosen = graph.kernel === k;
    const shape = (grow, fill) => {
      paper.fillStyle = paper.strokeStyle = fill;
      paper.lineWidth = 30 + 2 * grow;
      paper.lineJoin = "round";
      paper.lineCap = "butt";
      for (const edge of links) {
        trace(paper, edge);
        paper.stroke();
      }
      paper.beginPath();
      for (const leaf of leaves) paper.roundRect(leaf.x - 7 - grow, leaf.y - 7 - grow, leaf.w + 14 + 2 * grow, leaf.h + 14 + 2 * grow, 10 + grow);
      paper.fill();
    };
    shape(chosen ? 2.4 : 1.2, colours.kernel(k));
    shape(0, colours.blob(k));
  }
}

function trace(paper, edge) {
  const points = [[middle(edge.from), edge.from.y + edge.from.h], ...edge.points, [middle(edge.to), edge.to.y]];
  paper.beginPath();
  paper.moveTo(...points[0]);
  for (let i = 1; i < points.length; i++) {
    const [[ax, ay], [bx, by]] = [points[i - 1], points[i]];
    const bend = Math.max(12, Math.abs(by - ay) / 2);
    if (by >= ay) paper.bezierCurveTo(ax, ay + bend, bx, by - bend, bx, by);
    else paper.bezierCurveTo(ax, ay + 40, bx, by - 40, bx, by);
  }
}

function paintEdge(graph, edge, colours, near) {
  const { paper, scale } = graph;
  const item = graph.selected;
  const touched = near && (edge.from === item || edge.to === item);
  paper.globalAlpha = near && !touched ? 0.45 : 1;
  paper.strokeStyle = touched ? colours.accent : colours.edge;
  paper.lineWidth = (touched ? 2 : 1.2 + Math.min(2, Math.log2(edge.reads.length))) / Math.max(0.5, Math.min(1, scale * 1.4));
  paper.lineCap = "round";
  trace(paper, edge);
  paper.stroke();
  if (scale > 0.35) {
    const [ex, ey] = [middle(edge.to), edge.to.y];
    paper.fillStyle = paper.strokeStyle;
    paper.beginPath();
    paper.moveTo(ex, ey);
    paper.lineTo(ex - 4, ey - 7);
    paper.lineTo(ex + 4, ey - 7);
    paper.fill();
  }
  paper.globalAlpha = 1;
}

function paintItem(graph, item, colours, near) {
  const { paper, view, scale } = graph;
  const node = item.children ? null : view.nodes[item.node];
  const kind = node ? (KINDS.includes(node.k) ? node.k : "pointwise") : "module";
  const found = graph.matches && (node ? graph.matches.has(item.node) : false);
  const within = graph.matches && !node && [...graph.matches].some((index) => graph.tree.leaves[index] && shownFor(graph.tree.leaves[index]) === item);
  paper.globalAlpha = graph.matches && !found && !within ? 0.4 : near && !near.has(item) && !graph.matches ? 0.75 : 1;
  paper.beginPath();
  paper.roundRect(item.x, item.y, item.w, item.h, kind === "input" || kind === "output" || HIDDEN.has(kind) ? item.h / 2 : 7);
  paper.fillStyle = colours.fills[kind];
  paper.fill();
  const chosen = graph.selected === item;
  paper.lineWidth = chosen ? 2.6 : found || within ? 2 : 1;
  paper.strokeStyle = chosen ? (document.activeElement === graph.canvas ? colours.focus : colours.accent) : found || within ? colours.accent : node && node.g >= 0 ? colours.kernel(node.g) : colours.line;
  if (kind === "view") paper.setLineDash([4, 3]);
  paper.stroke();
  paper.setLineDash([]);
  if (node && graph.leaving.has(item.node)) { // a result of the graph
    paper.beginPath();
    paper.arc(middle(item), item.y + item.h, 4, 0, 7);
    paper.fillStyle = colours.good;
    paper.fill();
  }
  if (scale > 0.26) {
    paper.textBaseline = "middle";
    paper.fillStyle = colours.ink;
    paper.font = `${item.children ? 600 : 500} 12px ` + graph.mono();
    if (item.children) {
      paper.textAlign = "left";
      sign(paper, item.x + 15, item.y + item.h / 2, true, colours.soft);
      paper.fillText(clipped(item.label), item.x + 28, item.y + item.h / 2 + 1);
      paper.textAlign = "right";
      paper.fillStyle = colours.faint;
      paper.font = "11px " + graph.sans();
      paper.fillText(counted(item.count, "op"), item.x + item.w - 11, item.y + item.h / 2 + 1);
    } else {
      paper.textAlign = "center";
      paper.fillText(clipped(item.label), middle(item), item.y + item.h / 2 + 1);
    }
  }
  paper.globalAlpha = 1;
}

/** Shapes and dtypes: once below a node whose edges carry the same, else beside the end of each edge. */
function paintTypes(graph, edges, colours, seen) {
  const paper = graph.paper;
  paper.font = "10.5px " + graph.mono();
  paper.textAlign = "center";
  paper.textBaseline = "middle";
  const done = new Set();
  for (const edge of edges) {
    if (!edge.text) continue;
    const same = (graph.outs.get(edge.from) || []).every((other) => other.text === edge.text);
    if (same && done.has(edge.from)) continue;
    done.add(edge.from);
    const [x, y] = same ? [middle(edge.from), edge.from.y + edge.from.h + 12] : [middle(edge.to), edge.to.y - 15];
    if (x < seen.left - 80 || x > seen.right + 80 || y < seen.top || y > seen.bottom) continue;
    const w = paper.measureText(edge.text).width + 8;
    paper.fillStyle = colours.panel;
    paper.globalAlpha = 0.88;
    paper.beginPath();
    paper.roundRect(x - w / 2, y - 8, w, 15, 4);
    paper.fill();
    paper.globalAlpha = 1;
    paper.fillStyle = colours.soft;
    paper.fillText(edge.text, x, y);
  }
}
