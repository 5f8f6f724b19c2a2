// Owns the conversation: what was said, asking for an answer, and showing it while it comes.

import { ApiError, complete } from "/page/api.js";
import { element, show } from "/page/markdown.js";
import { keep, recall } from "/page/store.js";

const STORE = "ds4q.conversation";
const CUT = "The answer was cut off.";
const NEAR_PX = 64;

const log = document.getElementById("log");
const latest = document.getElementById("latest");
const said = document.getElementById("said");

export class Chat {
  // `settings()` gives the fields of a request beside its messages; `busy(bool)` hears of answers, and
  // `refused(text)` of a question that the server does not take.
  constructor(settings, busy, refused) {
    this.settings = settings;
    this.busy = busy;
    this.refused = refused;
    this.messages = [];
    this.abort = null;
    this.following = true;
    this.leaving = false;
    log.addEventListener("scroll", () => this.#scrolled(), { passive: true });
    log.addEventListener("toggle", () => this.#grown(), true);
    log.addEventListener("click", (event) => this.#clicked(event));
    latest.addEventListener("click", () => this.#follow());
    new ResizeObserver(() => this.#grown()).observe(log);
    window.addEventListener("pagehide", () => this.#leave());
    window.addEventListener("pageshow", () => { this.leaving = false; });
    for (const message of remembered()) this.#add(message);
    this.#follow();
  }

  get answering() {
    return this.abort !== null;
  }

  ask(text) {
    this.#add({ role: "user", content: text });
    return this.#answer();
  }

  stop() {
    this.abort?.abort();
  }

  clear() {
    this.stop();
    this.messages = [];
    for (const turn of log.querySelectorAll(".turn")) turn.remove();
    this.#keep();
    this.#follow();
  }

  // Asks again for the answer to the last question.
  again() {
    while (this.messages.length && this.messages.at(-1).role !== "user") this.#drop();
    if (this.messages.length) this.#answer();
  }

  #add(message) {
    this.messages.push(message);
    log.append(message.role === "user" ? question(message) : new Answer(message).turn);
  }

  #drop() {
    this.messages.pop();
    const turns = log.querySelectorAll(".turn");
    turns[turns.length - 1].remove();
  }

  #keep() {
    keep("sessionStorage", STORE, this.messages);
  }

  // What fails from now on does so because the page is left.
  #leave() {
    this.leaving = true;
    if (this.answering) this.#keep();
  }

  // What the server refused is shown, and never sent again.
  #refuse() {
    const asked = this.messages.at(-2);
    asked.unsent = true;
    [...log.querySelectorAll(".question")].at(-1).replaceWith(question(asked));
    this.refused(asked.content);
  }

  async #answer() {
    const sent = this.messages.filter(({ content, unsent }) => content && !unsent)
      .map(({ role, content }) => ({ role, content }));
    const { system, ...fields } = this.settings();
    if (system) sent.unshift({ role: "system", content: system });
    const message = { role: "assistant", content: "", reasoning: "" };
    const answer = new Answer(message);
    this.messages.push(message);
    log.append(answer.turn);
    this.#keep();
    this.abort = new AbortController();
    this.busy(true);
    log.setAttribute("aria-busy", "true");
    this.#follow();
    try {
      const body = { ...fields, messages: sent, stream: true, stream_options: { include_usage: true } };
      for await (const chunk of complete(body, this.abort.signal)) {
        answer.take(chunk, () => this.#grown());
      }
      said.textContent = "The answer is complete.";
    } catch (error) {
      answer.fail(this.leaving ? new ApiError(CUT) : error);
      if (message.refused && this.messages.at(-1) === message) this.#refuse();
      said.textContent = error.name === "AbortError" ? "Stopped." : "The answer failed.";
    } finally {
      this.abort = null;
      log.removeAttribute("aria-busy");
      this.busy(false);
      answer.end();
      this.#grown();
      this.#keep();
    }
  }

  #scrolled() {
    this.following = log.scrollHeight - log.scrollTop - log.clientHeight < NEAR_PX;
    latest.hidden = this.following;
  }

  #grown() {
    if (this.following) log.scrollTop = log.scrollHeight;
    else latest.hidden = false;
  }

  #follow() {
    this.following = true;
    latest.hidden = true;
    log.scrollTop = log.scrollHeight;
  }

  async #clicked(event) {
    const button = event.target.closest("button");
    if (!button) return;
    if (button.dataset.does === "again" && !this.answering) this.again();
    if (!button.dataset.copies) return;
    const source = button.dataset.copies === "code" ? button.closest(".code").querySelector("code") : null;
    const text = source ? source.textContent : this.messages[turnNumber(button)].content;
    const done = await copied(text);
    button.textContent = done ? "Copied" : "Not copied";
    said.textContent = done ? "Copied." : "The browser did not copy it: select the text instead.";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  }
}

function turnNumber(inside) {
  return [...log.querySelectorAll(".turn")].indexOf(inside.closest(".turn"));
}

// The conversation before the page was loaded; an answer that was not complete then never will be.
function remembered() {
  const found = recall("sessionStorage", STORE);
  const messages = Array.isArray(found) ? found.filter((each) => typeof each?.content === "string") : [];
  return messages.map((each) => (each.role === "user" || each.ended ? each : { ...each, ended: true, problem: CUT }));
}

// Whether the browser copied a text. It has no clipboard for a page of another machine without TLS.
async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const focused = document.activeElement;
    const area = element("textarea", "unseen");
    area.value = text;
    area.readOnly = true; // a phone shows no keyboard for it
    document.body.append(area);
    area.focus({ preventScroll: true });
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    focused.focus({ preventScroll: true });
    return done;
  }
}

function question({ content, unsent }) {
  const turn = element("article", unsent ? "turn question unsent" : "turn question");
  turn.append(element("h3", "unseen", "You"), element("p", "bubble", content));
  if (unsent) turn.append(element("p", "soft", "Not sent"));
  return turn;
}

// One answer: grows with each chunk, and is drawn at most once a frame.
class Answer {
  constructor(message) {
    this.message = message;
    this.turn = element("article", "turn answer");
    this.thoughts = element("details", "thoughts");
    this.summary = element("summary", "", "Thinking");
    this.reasoning = element("div", "reasoning");
    this.thoughts.append(this.summary, this.reasoning);
    this.body = element("div", "prose");
    this.waiting = element("p", "pulse", "Reading");
    this.foot = element("p", "foot");
    this.turn.append(element("h3", "unseen", "Model"), this.thoughts, this.body, this.waiting, this.foot);
    this.started = performance.now();
    this.first = null;
    this.thought = message.thought ?? null;
    this.usage = null;
    this.frame = 0;
    this.waiting.hidden = true;
    this.#draw();
    if (message.ended) this.#close();
    else this.waiting.hidden = false;
  }

  take(chunk, grown) {
    const now = performance.now();
    if (chunk.usage) this.usage = chunk.usage;
    const choice = chunk.choices[0];
    if (!choice) return;
    const { reasoning_content: reasoning, content } = choice.delta;
    if (reasoning || content) this.first ??= now;
    if (reasoning) this.message.reasoning += reasoning;
    if (content) {
      if (this.message.reasoning) this.thought ??= now - this.first;
      this.message.content += content;
    }
    if (choice.finish_reason) this.message.reason = choice.finish_reason;
    this.last = now;
    this.frame ||= requestAnimationFrame(() => {
      this.frame = 0;
      this.#draw();
      grown();
    });
  }

  fail(error) {
    if (error.name === "AbortError") {
      this.message.reason = "stopped";
      return;
    }
    this.message.refused = error instanceof ApiError && error.refused;
    const wait = error instanceof ApiError && error.retryAfter ? ` Try again in ${error.retryAfter} s.` : "";
    this.message.problem = (error instanceof ApiError ? error.message : `No answer from the server: ${error.message}`) + wait;
  }

  end() {
    cancelAnimationFrame(this.frame);
    this.message.ended = true;
    if (this.message.reasoning) this.message.thought = this.thought ?? performance.now() - (this.first ?? this.started);
    this.message.figures = this.#figures();
    this.#draw();
    this.#close();
  }

  #draw() {
    const { reasoning, content } = this.message;
    this.thoughts.hidden = !reasoning;
    if (reasoning) {
      this.reasoning.textContent = reasoning;
      this.summary.textContent = content || this.message.ended ? "Thoughts" : "Thinking";
    }
    this.thoughts.classList.toggle("live", !content && !this.message.ended);
    show(this.body, content);
    if (reasoning || content) this.waiting.hidden = true;
  }

  #close() {
    const { content, reasoning, problem, reason, refused, figures, thought } = this.message;
    this.waiting.hidden = true;
    this.thoughts.classList.remove("live");
    if (reasoning && thought !== undefined) this.summary.textContent = `Thought for ${seconds(thought)}`;
    if (problem) {
      const alert = element("p", "problem", problem);
      alert.setAttribute("role", "alert");
      this.turn.insertBefore(alert, this.foot);
    }
    const copy = element("button", "quiet small", "Copy");
    copy.type = "button";
    copy.dataset.copies = "answer";
    copy.hidden = !content;
    const again = element("button", "quiet small", problem ? "Try again" : "Again");
    again.type = "button";
    again.dataset.does = "again";
    again.hidden = Boolean(refused);
    const notes = { length: "Cut at the most tokens allowed.", stopped: "Stopped." };
    const none = content || problem ? "" : reasoning ? "Only thoughts, no answer." : "No answer.";
    this.foot.replaceChildren(copy, again, element("span", "", [none, notes[reason], figures].filter(Boolean).join(" ")));
  }

  #figures() {
    if (!this.usage) return "";
    const made = this.usage.completion_tokens;
    const spent = (this.last - this.first) / 1000;
    const rate = made > 1 && spent > 0 ? `, ${((made - 1) / spent).toFixed(1)} a second` : "";
    const cached = this.usage.prompt_tokens_details?.cached_tokens ?? 0;
    const kept = cached ? `, ${cached.toLocaleString()} of them cached` : "";
    return `${made.toLocaleString()} tokens${rate}. Prompt ${this.usage.prompt_tokens.toLocaleString()}${kept}.`;
  }
}

function seconds(ms) {
  return ms < 9950 ? `${(ms / 1000).toFixed(1)} s` : `${Math.round(ms / 1000)} s`;
}
