// Owns the page as a whole: what its buttons and fields do, and what it says of the server's state.

import { Chat } from "/page/chat.js";
import { bytes, Live } from "/page/live.js";
import { keep, recall } from "/page/store.js";

const SETTINGS = "ds4q.settings";
const PANELS = "ds4q.live";
const NARROW = matchMedia("(max-width: 60rem)");
const FIELDS = ["system", "temperature", "top_p", "max_tokens", "seed"];
const EFFORTS = { low: "Low effort", high: "High effort", max: "Highest effort" };

const at = (id) => document.getElementById(id);
const own = { temperature: 1, top_p: 1 }; // until the server says what the model's are
let kept = recalled();
let facts = null;

// ---------------------------------------------------------------- settings

// What the browser keeps, without what a field would not take.
function recalled() {
  const found = recall("localStorage", SETTINGS) ?? {};
  const taken = ([id, value]) => {
    if (!FIELDS.includes(id)) return id === "thinking" ? typeof value === "boolean" : id === "effort";
    const field = at(id).cloneNode();
    field.value = value;
    return field.validity.valid && field.value === value;
  };
  return Object.fromEntries(Object.entries(found).filter(taken));
}

// Changes these and leaves the others as they are, which another tab may have changed.
function remember(changes) {
  kept = { ...recalled(), ...changes };
  keep("localStorage", SETTINGS, kept);
}

function fill() {
  for (const id of FIELDS) {
    at(id).value = kept[id] ?? own[id] ?? "";
    judge(at(id));
  }
  at("thinking").checked = kept.thinking ?? true;
  for (const output of document.querySelectorAll("#settings output")) {
    output.value = Number(at(output.htmlFor.value).value).toFixed(2);
  }
  efforts();
}

function efforts() {
  const known = facts?.efforts ?? [];
  at("effort-field").hidden = known.length < 2 || !at("thinking").checked;
  if (at("effort").options.length !== known.length) {
    at("effort").replaceChildren(...known.map((name) => new Option(EFFORTS[name] ?? name, name)));
  }
  if (known.length) at("effort").value = known.includes(kept.effort) ? kept.effort : known[0];
}

// Says of a number that it is none to use.
function judge(field) {
  if (field.type !== "number") return;
  const { valid } = field.validity;
  field.setAttribute("aria-invalid", String(!valid));
  at(`${field.id}-wrong`).textContent = valid
    ? ""
    : `Not used: not a whole number from ${field.min} to 2⁵³ − 1. Still ${kept[field.id] ?? "the default"}.`;
}

// A number is taken once it is whole: what its first digits say was never meant.
function take({ type, target }) {
  judge(target);
  for (const output of target.labels[0].querySelectorAll("output")) output.value = Number(target.value).toFixed(2);
  if (!target.validity.valid || (type === "input" && target.type === "number")) return;
  remember({ [target.id]: target.value === "" ? undefined : target.value });
}

function settings() {
  const fields = { model: facts.model, thinking: { type: at("thinking").checked ? "enabled" : "disabled" } };
  for (const id of FIELDS) {
    const value = kept[id] ?? own[id] ?? "";
    if (value !== "") fields[id] = id === "system" ? value : Number(value);
  }
  if (!at("effort-field").hidden && at("effort").value) fields.reasoning_effort = at("effort").value;
  return fields;
}

at("settings").addEventListener("input", take);
at("settings").addEventListener("change", take);
at("settings").addEventListener("reset", (event) => {
  event.preventDefault();
  remember(Object.fromEntries(FIELDS.map((id) => [id, undefined])));
  fill();
});
window.addEventListener("storage", (event) => {
  if (event.key !== SETTINGS) return;
  kept = recalled();
  fill();
});
at("thinking").addEventListener("change", () => {
  remember({ thinking: at("thinking").checked });
  efforts();
});
at("effort").addEventListener("change", () => {
  remember({ effort: at("effort").value });
});

// ---------------------------------------------------------------- panels

function panel(id, button, open) {
  at(id).hidden = !open;
  at(button).setAttribute("aria-expanded", String(open));
}

at("tune").addEventListener("click", () => {
  panel("settings", "tune", at("settings").hidden);
  if (at("settings").hidden) return;
  fill();
  at("system").focus();
});
at("tuned").addEventListener("click", () => {
  at("tune").focus(); // first: what is being written is taken when its field is left
  panel("settings", "tune", false);
});
at("watch").addEventListener("click", () => {
  panel("live", "watch", at("live").hidden);
  document.body.classList.toggle("watching", !at("live").hidden);
  if (!NARROW.matches) keep("localStorage", PANELS, at("live").hidden ? "closed" : "open");
  if (!at("live").hidden) live.opened();
});

function room() {
  const open = !NARROW.matches && recall("localStorage", PANELS) !== "closed";
  panel("live", "watch", open);
  document.body.classList.toggle("watching", open);
}
NARROW.addEventListener("change", room);

// ---------------------------------------------------------------- asking

const ask = at("ask");
const chat = new Chat(settings, (busy) => {
  at("send").hidden = busy;
  at("stop").hidden = !busy;
  if (!busy && !NARROW.matches && document.activeElement === document.body) ask.focus();
  ready();
}, (text) => {
  if (ask.value.trim()) return;
  ask.value = text;
  grow();
});

function ready() {
  at("send").disabled = facts?.state !== "ready" || chat.answering || !ask.value.trim();
}

function submit() {
  ready();
  if (at("send").disabled) return;
  chat.ask(ask.value.trimEnd());
  ask.value = "";
  grow();
}

// Where CSS cannot size a field by its content yet.
function grow() {
  ask.style.height = "auto";
  ask.style.height = `${ask.scrollHeight}px`;
}

at("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  submit();
});
ask.addEventListener("input", () => {
  grow();
  ready();
});
ask.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  submit();
});
at("stop").addEventListener("click", () => {
  chat.stop();
  ask.focus();
});
at("fresh").addEventListener("click", () => {
  chat.clear();
  ask.focus();
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || at("key-dialog").open) return;
  if (chat.answering) chat.stop();
  else if (!at("settings").hidden) at("tuned").click();
});

// ---------------------------------------------------------------- state

function changed(found) {
  facts = found ?? (facts && { ...facts, state: "gone" });
  const state = facts?.state ?? "gone";
  const [done, total] = facts?.progress ?? [0, 0];
  const share = total ? done / total : 0;
  const words = {
    loading: total ? `loading, ${Math.floor(100 * share)} %` : "loading",
    ready: "ready",
    draining: "finishing",
    failed: "failed",
    gone: "no connection",
  };
  if (at("state").textContent !== words[state]) at("state").textContent = words[state];
  at("state").dataset.state = state;
  at("loading").hidden = state !== "loading" && state !== "failed";
  at("loading-bar").hidden = state === "failed";
  if (total) at("loading-bar").value = share;
  else at("loading-bar").removeAttribute("value");
  at("loading-text").textContent = state === "failed"
    ? facts.error ?? "The model could not be loaded."
    : `Loading the model: ${total ? `${bytes(done)} of ${bytes(total)}` : "opening it"}`;
  if (found) {
    Object.assign(own, found.sampling);
    if (at("model").textContent !== found.model) {
      at("model").textContent = found.model;
      document.title = `${found.model} – ds4q`;
    }
    const context = found.max_context ? `Context of ${found.max_context.toLocaleString()} tokens` : "";
    at("about").textContent = [context, found.device && `on ${found.device === "cpu" ? "the CPU" : found.device}`].filter(Boolean).join(" ");
    const most = Math.min(found.default_max_tokens, found.max_context ?? Infinity);
    at("max_tokens").placeholder = `${most.toLocaleString()}, or what fits`;
    if (at("settings").hidden) fill();
    else efforts();
  }
  ready();
}

room();
fill();
const live = new Live(changed);
ask.focus({ preventScroll: true });
