// The layered layout: modules hold ops; what is open is laid out from the inside out, in time that grows with its size.

const OP = { height: 30, gap: 20, layer: 40, pad: 16, head: 26 };

/** The tree of modules over the nodes of a view: items have children; a leaf has the index of its node. */
function treeOf(view, hidden) {
  const root = { path: "", label: "", children: [], parent: null, depth: 0, count: 0, first: 0, byName: new Map() };
  const leaves = new Array(view.nodes.length).fill(null);
  view.nodes.forEach((node, index) => {
    if (hidden(node)) return;
    let at = root;
    const path = (view.paths && view.paths[node.p]) || [];
    root.count++;
    for (const name of path) {
      let next = at.byName.get(name);
      if (!next) {
        next = { path: at.path ? `${at.path}/${name}` : name, label: name, children: [], parent: at, depth: at.depth + 1, count: 0, first: index, byName: new Map(), open: false };
        at.byName.set(name, next);
        at.children.push(next);
      }
      next.count++;
      at = next;
    }
    const leaf = { node: index, label: node.o, parent: at, depth: at.depth + 1, first: index, count: 1 };
    at.children.push(leaf);
    leaves[index] = leaf;
  });
  root.open = true;
  const kept = [];
  const join = (item) => { // a module that holds nothing but one other is shown as one with it
    while (item.parent && item.children.length === 1 && item.children[0].children) {
      const only = item.children[0];
      [item.label, item.path, item.children] = [`${item.label}.${only.label}`, only.path, only.children];
      for (const child of item.children) child.parent = item;
    }
    for (const child of item.children) {
      child.depth = item.depth + 1;
      if (child.children) {
        kept.push(child);
        join(child);
      }
    }
  };
  join(root);
  return { root, leaves, modules: kept };
}

/** Open modules from the top, level by level, while no more than `room` items are seen; the first level is one at least. */
function openSome(tree, room) {
  let level = tree.root.children.filter((item) => item.children);
  let seen = tree.root.children.length;
  while (level.length) {
    seen += level.reduce((sum, item) => sum + item.children.length - 1, 0);
    if (seen > room && level.length > 1) return;
    for (const item of level) item.open = true;
    level = level.flatMap((item) => item.children.filter((child) => child.children));
  }
}

/** The item that stands for a leaf while some modules are closed. */
function shownFor(leaf) {
  let shown = leaf;
  for (let at = leaf.parent; at; at = at.parent) if (!at.open) shown = at;
  return shown;
}

/** Places for everything that is seen: items, and edges between what stands for their ends. */
function layoutOf(view, tree, measure) {
  const edges = new Map();
  const inner = new Map(); // a container -> edges between its children
  const shown = tree.leaves.map((leaf) => leaf && shownFor(leaf));
  view.nodes.forEach((node, index) => {
    if (!shown[index]) return;
    for (const read of node.i || []) {
      const from = shown[read], to = shown[index];
      if (!from || from === to) continue;
      let known = edges.get(from);
      if (!known) edges.set(from, (known = new Map()));
      const edge = known.get(to);
      if (edge) edge.reads.push(read);
      else known.set(to, { from, to, reads: [read], route: [], points: [] });
    }
  });
  const all = [];
  const part = (holder, a, b, edge) => {
    let list = inner.get(holder);
    if (!list) inner.set(holder, (list = []));
    const made = { a, b, edge, holder, via: [] };
    list.push(made);
    edge.route.push(made);
  };
  for (const group of edges.values()) for (const edge of group.values()) {
    all.push(edge);
    const up = [], down = []; // the modules that the edge leaves, and those that it enters
    let a = edge.from, b = edge.to;
    const climb = (item, list) => (item.parent.parent && list.push(item), item.parent);
    while (a.depth > b.depth) a = climb(a, up);
    while (b.depth > a.depth) b = climb(b, down);
    while (a.parent !== b.parent) [a, b] = [climb(a, up), climb(b, down)];
    if (a === b) continue;
    for (const item of up) part(item.parent, item, null, edge);
    part(a.parent, a, b, edge);
    for (const item of down.reverse()) part(item.parent, null, item, edge);
  }
  sized(tree.root, inner, measure);
  const items = [], holders = [];
  placed(tree.root, 0, 0, items, holders);
  for (const edge of all) edge.points = edge.route.flatMap(({ holder, via }) => via.map(([x, y]) => [x + holder.x, y + holder.y]));
  return { items, holders, edges: all, width: tree.root.w, height: tree.root.h };
}

function placed(item, x, y, items, holders) {
  item.x = x;
  item.y = y;
  if (!item.open) {
    items.push(item);
    return;
  }
  if (item.parent) holders.push(item);
  for (const child of item.children) placed(child, x + child.rx, y + child.ry, items, holders);
}

/** The size of an item, and of an open one the places of its children within it. */
function sized(item, inner, measure) {
  if (!item.open) {
    item.w = measure(item);
    item.h = OP.height;
    return;
  }
  for (const child of item.children) sized(child, inner, measure);
  const parts = components(item.children, inner.get(item) || []);
  for (const part of parts) layered(part);
  const [w, h] = packed(parts);
  const head = item.parent ? OP.head : 0, pad = OP.pad;
  for (const part of parts) {
    for (const child of part.items) {
      child.rx += part.x + pad;
      child.ry += part.y + pad + head;
    }
    for (const edge of part.edges) for (const point of edge.via) {
      point[0] += part.x + pad;
      point[1] += part.y + pad + head;
    }
  }
  item.w = Math.max(w + 2 * pad, item.parent ? measure(item) + 12 : 0);
  item.h = h + 2 * pad + head;
  const spare = (item.w - w - 2 * pad) / 2;
  if (spare > 0) {
    for (const child of item.children) child.rx += spare;
    for (const part of parts) for (const edge of part.edges) for (const point of edge.via) point[0] += spare;
  }
}

/** Parts that no edge connects, in the order of their first nodes. */
function components(items, edges) {
  const up = new Map(items.map((item) => [item, item]));
  const find = (item) => {
    while (up.get(item) !== item) {
      up.set(item, up.get(up.get(item)));
      item = up.get(item);
    }
    return item;
  };
  for (const { a, b } of edges) if (a && b) up.set(find(a), find(b));
  const parts = new Map();
  for (const item of items) {
    const root = find(item);
    if (!parts.has(root)) parts.set(root, { items: [], edges: [] });
    parts.get(root).items.push(item);
  }
  for (const edge of edges) parts.get(find(edge.a || edge.b)).edges.push(edge);
  return [...parts.values()];
}

/** Put parts on shelves, so that the whole is about as wide as high. */
function packed(parts) {
  const area = parts.reduce((sum, part) => sum + (part.w + OP.gap) * (part.h + OP.gap), 0);
  const row = parts.reduce((sum, part) => sum + part.w + OP.gap * 1.6, 0);
  const wide = Math.max(Math.sqrt(area) * 1.5, parts.length <= 8 && row < 1400 ? row : 0, ...parts.map((part) => part.w));
  let x = 0, y = 0, shelf = 0, most = 0;
  for (const part of parts) {
    if (x && x + part.w > wide) [x, y, shelf] = [0, y + shelf + OP.layer, 0];
    [part.x, part.y] = [x, y];
    x += part.w + OP.gap * 1.6;
    most = Math.max(most, part.x + part.w);
    shelf = Math.max(shelf, part.h);
  }
  return [most, y + shelf];
}

/** Layers by the longest path, an order within layers by the middle of neighbours, places by least squares. */
function layered(part) {
  const { items, edges } = part;
  const order = [...items].sort((a, b) => a.first - b.first);
  const cells = new Map(order.map((item) => [item, { item, w: item.w, h: item.h, layer: 0, ins: [], outs: [], x: 0 }]));
  const outs = new Map(), reads = new Set();
  for (const { a, b } of edges) if (a && b && a.first < b.first) {
    (outs.get(a) || outs.set(a, []).get(a)).push(b);
    reads.add(b);
  }
  for (const item of order) for (const next of outs.get(item) || []) {
    const cell = cells.get(next);
    cell.layer = Math.max(cell.layer, cells.get(item).layer + 1);
  }
  for (const item of order) { // what reads nothing stands right above what first reads it
    if (!reads.has(item) && outs.has(item)) cells.get(item).layer = Math.max(0, Math.min(...outs.get(item).map((next) => cells.get(next).layer)) - 1);
  }
  let last = 1; // the first layer and the last hold the doors, through which edges come from outside and go there
  for (const cell of cells.values()) last = Math.max(last, ++cell.layer + 1);
  const layers = Array.from({ length: last + 1 }, () => []);
  const put = (cell) => layers[cell.layer].push(cell);
  for (const cell of cells.values()) put(cell);
  const doors = [new Map(), new Map()];
  const door = (side, edge) => {
    let cell = doors[side].get(edge.from);
    if (!cell) {
      doors[side].set(edge.from, (cell = { item: null, w: 8, h: 0, layer: side ? last : 0, ins: [], outs: [], x: 0 }));
      put(cell);
    }
    return cell;
  };
  let room = 6 * items.length + 200; // long edges go around what lies between, while there are not too many
  for (const one of edges) {
    if (one.a && one.b && one.a.first >= one.b.first) continue;
    let from = one.a ? cells.get(one.a) : door(0, one.edge);
    const to = one.b ? cells.get(one.b) : door(1, one.edge);
    const length = to.layer - from.layer - 1;
    one.bends = one.a ? [] : [from];
    if (length > 0 && length < room) {
      room -= length;
      for (let layer = from.layer + 1; layer < to.layer; layer++) {
        const bend = { item: null, w: 8, h: 0, layer, ins: [], outs: [], x: 0 };
        join(from, bend);
        put(bend);
        one.bends.push(bend);
        from = bend;
      }
    }
    join(from, to);
    if (!one.b) one.bends.push(to);
  }
  layers.forEach((layer) => layer.forEach((cell, i) => (cell.at = i)));
  for (let sweep = 0; sweep < 6; sweep++) {
    const down = sweep % 2 === 0;
    for (const layer of down ? layers : [...layers].reverse()) {
      for (const cell of layer) {
        const near = down ? cell.ins : cell.outs;
        cell.key = near.length ? near.reduce((sum, other) => sum + other.at / (layers[other.layer].length || 1), 0) / near.length : cell.at / layer.length;
      }
      layer.sort((a, b) => a.key - b.key);
      layer.forEach((cell, i) => (cell.at = i));
    }
  }
  for (const layer of layers) {
    let x = 0;
    for (const cell of layer) {
      cell.x = x + cell.w / 2;
      x += cell.w + OP.gap;
    }
  }
  for (let sweep = 0; sweep < 8; sweep++) {
    const down = sweep % 2 === 0;
    for (const layer of down ? layers : [...layers].reverse()) spread(layer, sweep > 5 ? "both" : down ? "ins" : "outs");
  }
  let left = Infinity, right = -Infinity, y = 0;
  for (const layer of layers) {
    const high = layer.reduce((most, cell) => Math.max(most, cell.h), 0);
    for (const cell of layer) {
      cell.y = y + (high - cell.h) / 2;
      left = Math.min(left, cell.x - cell.w / 2);
      right = Math.max(right, cell.x + cell.w / 2);
    }
    const door = layer === layers[0] ? layer.length : layer === layers[last - 1] ? layers[last].length : 0;
    y += layer === layers[0] || layer === layers[last - 1] ? high + (door ? OP.gap : 0) : high ? high + OP.layer : 0;
  }
  for (const [item, cell] of cells) {
    item.rx = cell.x - cell.w / 2 - left;
    item.ry = cell.y;
  }
  for (const one of edges) one.via = (one.bends || []).map((bend) => [bend.x - left, bend.y]);
  part.w = right - left;
  part.h = y;
}

function join(from, to) {
  from.outs.push(to);
  to.ins.push(from);
}

/** Move the cells of a layer toward their neighbours as far as the room between them allows. */
function spread(layer, side) {
  const blocks = [];
  let sum = 0;
  for (const cell of layer) {
    const near = side === "both" ? [...cell.ins, ...cell.outs] : cell[side].length ? cell[side] : [...cell.ins, ...cell.outs];
    const straight = cell.item === null ? 4 : 1;
    const wanted = near.length ? near.reduce((total, other) => total + other.x, 0) / near.length : cell.x;
    sum += cell.w / 2;
    let block = { cells: [[cell, sum]], weight: straight, value: (wanted - sum) * straight };
    sum += cell.w / 2 + OP.gap;
    while (blocks.length && blocks.at(-1).value / blocks.at(-1).weight >= block.value / block.weight) {
      const before = blocks.pop();
      const cells = before.cells;
      for (const one of block.cells) cells.push(one);
      block = { cells, weight: before.weight + block.weight, value: before.value + block.value };
    }
    blocks.push(block);
  }
  for (const block of blocks) for (const [cell, offset] of block.cells) cell.x = block.value / block.weight + offset;
}
