// Owns turning an answer's text into elements while it grows. Writes no HTML text: nothing that a
// model says can become markup.

const DEEPEST = 8; // quotes and lists within each other; what goes deeper stays text
const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*\s*$/;
const RULE = /^ {0,3}(?:-{3,}|\*{3,}|_{3,})\s*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const DIVIDER = /^ {0,3}\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
const INLINE = new RegExp(
  [
    "(?<ticks>`+)(?<code>[^`]|[^`][\\s\\S]*?[^`])\\k<ticks>(?!`)",
    "\\*\\*(?=\\S)(?<strong>[\\s\\S]*?\\S)\\*\\*",
    "\\*(?=[^\\s*])(?<em>[\\s\\S]*?[^\\s*])\\*(?!\\*)",
    "(?<!\\w)_(?=[^\\s_])(?<under>[\\s\\S]*?[^\\s_])_(?!\\w)",
    "~~(?=\\S)(?<del>[\\s\\S]*?\\S)~~",
    "\\[(?<label>[^\\]\\n]+)\\]\\((?<href>https?:\\/\\/[^\\s)]+)\\)",
    "(?<url>https?:\\/\\/[^\\s<>\"')\\]]*[^\\s<>\"')\\].,;:!?])",
    "\\\\(?<literal>[\\\\`*_{}\\[\\]()#+\\-.!~|>])",
  ].join("|"),
  "g",
);

const sources = new WeakMap();

// Makes `target` show `text`; blocks that are as before keep their elements.
export function show(target, text, depth = 0) {
  const blocks = depth > DEEPEST ? [text] : split(text);
  blocks.forEach((block, index) => {
    const old = target.children[index];
    if (old && sources.get(old) === block) return;
    const made = depth > DEEPEST ? inline("p", block) : build(block, depth);
    sources.set(made, block);
    if (old) old.replaceWith(made);
    else target.append(made);
  });
  while (target.children.length > blocks.length) target.lastElementChild.remove();
}

// The source of each block, in order.
function split(text) {
  const lines = text.split("\n");
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
    while (end < lines.length && !closes(lines[end], fence[1])) end += 1;
    return Math.min(end + 1, lines.length);
  }
  if (HEADING.test(lines[start]) || RULE.test(lines[start])) return end;
  if (ITEM.test(lines[start])) {
    while (end < lines.length && belongsToList(lines, end)) end += 1;
    return end;
  }
  const quoted = QUOTE.test(lines[start]);
  while (end < lines.length && lines[end].trim() && (quoted ? QUOTE.test(lines[end]) : !opens(lines[end]))) end += 1;
  return end;
}

function closes(line, fence) {
  const text = line.trim();
  return text.length >= fence.length && text === fence[0].repeat(text.length);
}

function opens(line) {
  return [FENCE, HEADING, RULE, QUOTE, ITEM].some((kind) => kind.test(line));
}

function belongsToList(lines, at) {
  if (ITEM.test(lines[at])) return !RULE.test(lines[at]);
  if (lines[at].trim()) return /^\s/.test(lines[at]) || (Boolean(lines[at - 1].trim()) && !opens(lines[at]));
  const next = lines[at + 1] ?? "";
  return ITEM.test(next) || (Boolean(next.trim()) && /^\s{2,}/.test(next));
}

function build(block, depth) {
  const lines = block.split("\n");
  const fence = FENCE.exec(lines[0]);
  if (fence) return codeBlock(lines, fence);
  const heading = HEADING.exec(lines[0]);
  // A page has one h1 and the panels have h2: what an answer calls its first level is a third here.
  if (heading) return inline(`h${Math.min(6, heading[1].length + 2)}`, heading[2]);
  if (RULE.test(lines[0])) return document.createElement("hr");
  if (QUOTE.test(lines[0])) {
    const quote = document.createElement("blockquote");
    show(quote, lines.map((line) => line.replace(QUOTE, "")).join("\n"), depth + 1);
    return quote;
  }
  if (ITEM.test(lines[0])) return list(lines, depth);
  if (lines.length > 1 && lines[0].includes("|") && DIVIDER.test(lines[1])) return table(lines);
  return inline("p", block);
}

function codeBlock(lines, fence) {
  const closed = lines.length > 1 && closes(lines.at(-1), fence[1]);
  const text = lines.slice(1, closed ? -1 : undefined).join("\n");
  const box = element("div", "code");
  const head = element("div", "code-head");
  const copy = element("button", "quiet small", "Copy");
  copy.type = "button";
  copy.dataset.copies = "code";
  head.append(element("span", "", fence[2]), copy);
  const pre = element("pre");
  pre.tabIndex = 0; // so that a keyboard can scroll it
  pre.append(element("code", "", text));
  box.append(head, pre);
  return box;
}

function list(lines, depth) {
  const first = ITEM.exec(lines[0]);
  const ordered = /\d/.test(first[2]);
  const made = document.createElement(ordered ? "ol" : "ul");
  if (ordered) made.start = Number.parseInt(first[2], 10);
  const margin = first[1].length;
  const items = [];
  for (const line of lines) {
    const item = ITEM.exec(line);
    if (item && item[1].length <= margin + 1) items.push([item[3]]);
    else items.at(-1).push(line.replace(/^\s{1,4}/, ""));
  }
  for (const item of items) {
    const entry = document.createElement("li");
    show(entry, item.join("\n"), depth + 1);
    // A single paragraph needs no gap of its own.
    if (entry.children.length === 1 && entry.firstElementChild.tagName === "P") {
      entry.replaceChildren(...entry.firstElementChild.childNodes);
    }
    made.append(entry);
  }
  return made;
}

function table(lines) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim());
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
  const made = document.createElement(tag);
  made.append(...spans(text));
  return made;
}

function spans(text) {
  const made = [];
  let at = 0;
  for (const match of text.matchAll(INLINE)) {
    const found = match.groups;
    if (match.index > at) made.push(text.slice(at, match.index));
    at = match.index + match[0].length;
    if (found.code !== undefined) made.push(element("code", "", found.code.replace(/^ (.*) $/, "$1")));
    else if (found.strong !== undefined) made.push(inline("strong", found.strong));
    else if (found.em !== undefined) made.push(inline("em", found.em));
    else if (found.under !== undefined) made.push(inline("em", found.under));
    else if (found.del !== undefined) made.push(inline("del", found.del));
    else if (found.href !== undefined) made.push(link(found.label, found.href));
    else if (found.url !== undefined) made.push(link(found.url, found.url));
    else made.push(found.literal);
  }
  if (at < text.length) made.push(text.slice(at));
  return made;
}

function link(label, href) {
  const made = element("a", "", label);
  made.href = href;
  made.target = "_blank";
  made.rel = "noopener noreferrer";
  return made;
}

export function element(tag, className = "", text = "") {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text) made.textContent = text;
  return made;
}
