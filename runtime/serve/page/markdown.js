// Owns turning an answer's text into elements while it grows. Writes no HTML text: nothing that a
// model says can become markup.

const DEEPEST = 8; // quotes and lists within each other; what goes deeper stays text
const FENCE = /^( {0,3})(`{3,}(?=[^`]*$)|~{3,})([^]*)$/;
const HEADING = /^ {0,3}(#{1,6})[ \t]/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^([ \t]*)([-*+]|\d{1,9}[.)])([ \t]+)([^]*)$/;
const MARK = new RegExp(
  [
    "\\\\(?<literal>[\\\\`*_{}\\[\\]()#+\\-.!~|>])",
    "(?<ticks>`+)",
    "(?<run>\\*+|_+|~+)",
    "(?<left>\\[)",
    "(?<right>\\](?:\\((?<href>https?:\\/\\/(?:[^\\s()]|\\([^\\s()]*\\))+)\\))?)",
    "(?<url>https?:\\/\\/[^\\s<>\"'\\]]+)",
  ].join("|"),
  "g",
);
const TAGS = { "*": "em", "**": "strong", "_": "em", "~~": "del" };

const sources = new WeakMap();

// Makes `target` show `text`; blocks that are as before keep their elements.
export function show(target, text, depth = 0) {
  const blocks = depth > DEEPEST ? [text] : split(text);
  let old = target.firstElementChild;
  for (const block of blocks) {
    const next = old?.nextElementSibling;
    if (!old || sources.get(old) !== block) {
      const made = depth > DEEPEST ? inline("p", block) : build(block, depth);
      sources.set(made, block);
      if (old) old.replaceWith(made);
      else target.append(made);
    }
    old = next;
  }
  while (old) {
    const next = old.nextElementSibling;
    old.remove();
    old = next;
  }
}

// The source of each block, in order.
function split(text) {
  const lines = text.split(/\r\n?|\n/);
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const end = blockEnd(lines, at);
    blocks.push(lines.slice(at, end).join("\n"));
    at = end;
  }
  return blocks;
}

function blockEnd(lines, start) {
  const fence = FENCE.exec(lines[start]);
  let end = start + 1;
  if (fence) {
    while (end < lines.length && !closes(lines[end], fence[2])) end += 1;
    return Math.min(end + 1, lines.length);
  }
  if (HEADING.test(lines[start]) || isRule(lines[start])) return end;
  if (QUOTE.test(lines[start])) {
    while (end < lines.length && QUOTE.test(lines[end])) end += 1;
    return end;
  }
  const isTable = beginsTable(lines, start);
  const first = itemOf(lines[start]);
  if (first && !isTable) return listEnd(lines, start, first);
  if (isTable) end += 1;
  while (end < lines.length && lines[end].trim() && !opens(lines[end]) && (isTable || !beginsTable(lines, end))) end += 1;
  return end;
}

function listEnd(lines, start, first) {
  let end = start + 1;
  for (;;) {
    let next = end;
    while (next < lines.length && !lines[next].trim()) next += 1;
    if (next === lines.length || !belongs(lines[next], next > end, first)) return end;
    end = next + 1;
  }
}

// Whether a line goes on with the list that begins with the item `first`.
function belongs(line, afterBlank, first) {
  const item = isRule(line) ? null : itemOf(line);
  if (item) return item.indent > first.indent + 1 || item.marker.at(-1) === first.marker.at(-1);
  const indent = columns(line);
  return afterBlank ? indent > 1 : indent > 0 || !opens(line);
}

function closes(line, fence) {
  const text = line.trim();
  return text.length >= fence.length && text === fence[0].repeat(text.length) && columns(line) < 4;
}

function opens(line) {
  return [FENCE, HEADING, QUOTE, ITEM].some((kind) => kind.test(line)) || isRule(line);
}

function isRule(line) {
  return columns(line) < 4 && /^(?:-{3,}|\*{3,}|_{3,})$/.test(line.replace(/\s/g, ""));
}

function beginsTable(lines, at) {
  if (!lines[at].includes("|") || at + 1 === lines.length) return false;
  const divider = cells(lines[at + 1]);
  return divider.every((cell) => /^:?-+:?$/.test(cell)) && divider.length === cells(lines[at]).length;
}

// How far the text of a line is from its start; tabs go on to each fourth column.
function columns(line) {
  let column = 0;
  for (const character of line) {
    if (character === "\t") column += 4 - (column % 4);
    else if (character === " ") column += 1;
    else break;
  }
  return column;
}

// The line without its first columns, as far as they are blank.
function outdent(line, width) {
  let column = 0;
  let at = 0;
  while (column < width && (line[at] === " " || line[at] === "\t")) {
    column += line[at] === "\t" ? 4 - (column % 4) : 1;
    at += 1;
  }
  return " ".repeat(Math.max(0, column - width)) + line.slice(at);
}

// `width`: the columns that lines after the first have before their text.
function itemOf(line) {
  const found = ITEM.exec(line);
  if (!found) return null;
  const [, blank, marker, gap, text] = found;
  const indent = columns(blank);
  const wide = columns(gap);
  return { indent, marker, text, width: indent + marker.length + (text && wide < 5 ? wide : 1) };
}

function build(block, depth) {
  const lines = block.split("\n");
  const fence = FENCE.exec(lines[0]);
  if (fence) return codeBlock(lines, fence);
  const level = HEADING.exec(lines[0])?.[1].length;
  // A page has one h1 and the panels have h2: what an answer calls its first level is a third here.
  if (level) return inline(`h${Math.min(6, level + 2)}`, headingText(lines[0].trim().slice(level)));
  if (isRule(lines[0])) return document.createElement("hr");
  if (QUOTE.test(lines[0])) {
    const quote = document.createElement("blockquote");
    show(quote, lines.map((line) => line.replace(QUOTE, "")).join("\n"), depth + 1);
    return quote;
  }
  if (beginsTable(lines, 0)) return table(lines);
  if (ITEM.test(lines[0])) return list(lines, depth);
  return inline("p", block);
}

// Without the marks that may close a heading, which stand apart from its text.
function headingText(text) {
  let end = text.length;
  while (text[end - 1] === "#") end -= 1;
  return (/\s/.test(text[end - 1]) ? text.slice(0, end) : text).trim();
}

function codeBlock(lines, [, blank, fence, info]) {
  const closed = lines.length > 1 && closes(lines.at(-1), fence);
  const text = lines.slice(1, closed ? -1 : undefined).map((line) => outdent(line, blank.length)).join("\n");
  const box = element("div", "code");
  const head = element("div", "code-head");
  const copy = element("button", "quiet small", "Copy");
  copy.type = "button";
  copy.dataset.copies = "code";
  head.append(element("span", "", /^[\w+#.-]*/.exec(info.trim())[0]), copy);
  const pre = element("pre");
  pre.tabIndex = 0; // so that a keyboard can scroll it
  pre.append(element("code", "", text));
  box.append(head, pre);
  return box;
}

function list(lines, depth) {
  const first = itemOf(lines[0]);
  const ordered = /\d/.test(first.marker);
  const made = document.createElement(ordered ? "ol" : "ul");
  if (ordered) made.start = Number.parseInt(first.marker, 10);
  const items = [];
  for (const line of lines) {
    const item = itemOf(line);
    if (item && item.indent <= first.indent + 1) items.push({ text: item.text, width: item.width, rest: [] });
    else items.at(-1).rest.push(line);
  }
  for (const { text, width, rest } of items) {
    const entry = document.createElement("li");
    // Many indent what belongs to an item by less than its marker is wide.
    const next = rest.find((line) => line.trim() && columns(line) > first.indent + 1);
    const inner = Math.min(width, next === undefined ? width : columns(next));
    show(entry, [text, ...rest.map((line) => outdent(line, inner))].join("\n"), depth + 1);
    // A single paragraph needs no gap of its own.
    if (entry.children.length === 1 && entry.firstElementChild.tagName === "P") {
      entry.replaceChildren(...entry.firstElementChild.childNodes);
    }
    made.append(entry);
  }
  return made;
}

function cells(line) {
  const row = line.trim().replace(/^\||(?<!\\)\|$/g, "");
  return row.split(/(?<!\\)\|/).map((cell) => cell.replaceAll("\\|", "|").trim());
}

function table(lines) {
  const made = document.createElement("table");
  const row = (line, kind) => {
    const tr = document.createElement("tr");
    tr.append(...cells(line).map((cell) => inline(kind, cell)));
    return tr;
  };
  made.createTHead().append(row(lines[0], "th"));
  made.createTBody().append(...lines.slice(2).map((line) => row(line, "td")));
  const scroll = element("div", "scroll");
  scroll.append(made);
  return scroll;
}

function inline(tag, text) {
  return filled(element(tag), spans(text));
}

// Strings and elements for the marks in a text, which is read once from its start to its end. A mark
// that nothing closes stays the text that it was from the beginning.
function spans(text) {
  const nodes = [];
  const open = []; // marks that may yet be closed, and where they are in `nodes`
  const codeEnds = endsOfCode(text);
  const marks = new RegExp(MARK);
  let at = 0;
  for (let found = marks.exec(text); found; found = marks.exec(text)) {
    const { literal, ticks, run, left, href, url } = found.groups;
    const codeEnd = codeEnds.get(found.index);
    nodes.push(text.slice(at, found.index));
    at = marks.lastIndex;
    if (literal) nodes.push(literal);
    else if (run) emphasise(nodes, open, run, text[found.index - 1] ?? " ", text[at] ?? " ");
    else if (left) begin(nodes, open, left);
    else if (ticks && codeEnd) {
      nodes.push(code(text.slice(at, codeEnd)));
      at = codeEnd + ticks.length;
    } else if (url) {
      const address = addressIn(url);
      nodes.push(address.endsWith("//") ? address : link([address], address));
      at = found.index + address.length;
    } else if (ticks) nodes.push(ticks);
    else if (!endLink(nodes, open, href)) {
      nodes.push("]");
      at = found.index + 1;
    }
    marks.lastIndex = at;
  }
  nodes.push(text.slice(at));
  return nodes;
}

// Where a run of backticks begins -> where the next one of its length does.
function endsOfCode(text) {
  const ends = new Map();
  const next = new Map();
  for (const { 0: run, index } of [...text.matchAll(/`+/g)].reverse()) {
    if (next.has(run)) ends.set(index, next.get(run));
    next.set(run, index);
  }
  return ends;
}

function code(text) {
  const padded = text.trim() && text.startsWith(" ") && text.endsWith(" ");
  return element("code", "", padded ? text.slice(1, -1) : text);
}

function begin(nodes, open, mark) {
  open.push({ mark, at: nodes.length });
  nodes.push(mark);
  if (open.length > DEEPEST) open.shift();
}

// A run of `*`, `_` or `~` between two characters: closes what it can, else begins something.
function emphasise(nodes, open, run, before, after) {
  const inWord = (character) => run[0] === "_" && /[\p{L}\p{N}]/u.test(character);
  let rest = run;
  while (rest && /\S/.test(before) && !inWord(after)) {
    const place = open.findLastIndex(({ mark }) => mark === rest || (rest === "***" && mark[0] === "*"));
    if (place < 0) break;
    const { mark, at } = open[place];
    open.length = place;
    nodes[at] = filled(element(TAGS[mark]), nodes.splice(at + 1));
    rest = rest.slice(mark.length);
  }
  const marks = rest === "***" ? ["**", "*"] : [rest];
  if (/\S/.test(after) && !inWord(before) && marks[0] in TAGS) marks.forEach((mark) => begin(nodes, open, mark));
  else nodes.push(rest);
}

// Makes a link of what stands since the last `[`; false where there is none, or no address.
function endLink(nodes, open, href) {
  const place = open.findLastIndex(({ mark }) => mark === "[");
  if (place < 0) return false;
  const { at } = open[place];
  if (!href || nodes.slice(at + 1).every((node) => node === "")) {
    open.splice(place, 1);
    return false;
  }
  open.length = place;
  nodes[at] = link(nodes.splice(at + 1), href);
  return true;
}

// Without what ends the sentence around an address, or the brackets.
function addressIn(url) {
  let end = url.length;
  let unopened = url.split(")").length - url.split("(").length;
  for (;;) {
    const last = url[end - 1];
    if (last === ")" && unopened > 0) unopened -= 1;
    else if (!".,;:!?*_~".includes(last)) return url.slice(0, end);
    end -= 1;
  }
}

function link(nodes, href) {
  const made = filled(element("a"), nodes);
  for (const inner of made.querySelectorAll("a")) inner.replaceWith(...inner.childNodes);
  made.href = href;
  made.target = "_blank";
  made.rel = "noopener noreferrer";
  return made;
}

function filled(target, nodes) {
  for (const node of nodes) target.append(node);
  target.normalize(); // marks that stayed text become one with what is around them
  return target;
}

export function element(tag, className = "", text = "") {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text) made.textContent = text;
  return made;
}
