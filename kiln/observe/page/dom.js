// Elements, numbers and Python text for people. Text is always set as text: sources may hold anything.

function el(tag, given, ...children) {
  const made = document.createElement(tag);
  for (const [key, value] of Object.entries(given || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (key === "class") made.className = value;
    else made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return made;
}

function svg(tag, given, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(given || {})) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function bytes(count) {
  if (typeof count !== "number") return count === undefined || count === null ? "?" : String(count);
  let unit = "B";
  for (const larger of ["KiB", "MiB", "GiB", "TiB"]) {
    if (count < 1024) break;
    [count, unit] = [count / 1024, larger];
  }
  return unit === "B" ? `${count} B` : `${count < 10 ? count.toFixed(1) : Math.round(count)} ${unit}`;
}

function seconds(value) {
  if (typeof value !== "number" || !isFinite(value)) return "?";
  for (const [unit, size] of [["s", 1], ["ms", 1e-3], ["µs", 1e-6]]) {
    if (value >= size) return `${(value / size).toPrecision(value / size < 100 ? 2 : 3).replace(/e\+\d+$/, "")} ${unit}`;
  }
  return value ? `${(value * 1e9).toFixed(0)} ns` : "0";
}

function counted(count, noun) {
  return `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;
}

function shortFile(path) {
  return String(path).split("/").slice(-1)[0];
}

const WORDS = new Set(("False None True and as assert async await break class continue def del elif else except finally for from " +
  "global if import in is lambda nonlocal not or pass raise return try while with yield match case").split(" "));
const TOKEN = /("""|''')|(#.*)|([rbfuRBFU]{0,2}(?:"(?:[^"\\]|\\.)*"?|'(?:[^'\\]|\\.)*'?))|([A-Za-z_]\w*)|(\d[\w.]*)|(\s+|.)/gu;

/** One line of Python as nodes; `open` is the quote of a string that goes on from earlier lines. */
function python(line, open) {
  const made = [];
  const push = (kind, text) => made.push(kind ? el("span", { class: kind }, text) : document.createTextNode(text));
  let rest = line;
  if (open && line) {
    const end = rest.indexOf(open);
    if (end < 0) return [[el("span", { class: "s" }, rest)], open];
    push("s", rest.slice(0, end + 3));
    rest = rest.slice(end + 3);
  }
  if (!rest) return [made, open && line ? null : open];
  TOKEN.lastIndex = 0;
  for (let match; (match = TOKEN.exec(rest)); ) {
    const [text, triple, comment, string, word, number] = match;
    if (triple) {
      const end = rest.indexOf(triple, match.index + 3);
      if (end < 0) {
        push("s", rest.slice(match.index));
        return [made, triple];
      }
      push("s", rest.slice(match.index, end + 3));
      TOKEN.lastIndex = end + 3;
    } else push(comment ? "c" : string ? "s" : number ? "d" : word && WORDS.has(word) ? "k" : "", text);
  }
  return [made, null];
}

function say(text) {
  document.getElementById("said").textContent = text;
}

/** The text of code with a name in front and a button that copies it. */
function codeBlock(title, text) {
  const copy = el("button", { type: "button", class: "link", onclick: async () => {
    try {
      await navigator.clipboard.writeText(text);
      copy.textContent = "Copied";
    } catch {
      const range = document.createRange();
      range.selectNodeContents(block);
      getSelection().removeAllRanges();
      getSelection().addRange(range);
      copy.textContent = "Selected";
    }
  } }, "Copy");
  const block = el("pre", { tabindex: "0", "aria-label": title }, text);
  return el("section", {}, el("div", { style: "display:flex;justify-content:space-between" }, el("h3", {}, title), copy), block);
}
