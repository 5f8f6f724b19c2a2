// Owns talking to the server: the key, JSON, and streams of events. Knows no element but the key's.

import { keep, recall } from "/page/store.js";

const KEY = "ds4q.key";
const PATIENCE_MS = 15000;
const ENDED = "The answer was cut off: the connection ended.";

export class ApiError extends Error {
  // `refused`: the same request will never be answered. `retryAfter`: in so many seconds it may be.
  constructor(message, { refused = false, retryAfter = null } = {}) {
    super(message);
    this.refused = refused;
    this.retryAfter = retryAfter;
  }
}

let asking = null;

// One question for all requests that a missing key stops at the same time.
function askKey(wrong) {
  asking ??= new Promise((resolve) => {
    const dialog = document.getElementById("key-dialog");
    const field = document.getElementById("key");
    document.getElementById("key-text").textContent = wrong
      ? "That key was not accepted."
      : "It stays in this tab until you close it.";
    field.value = "";
    dialog.addEventListener("cancel", (event) => event.preventDefault());
    dialog.addEventListener("close", () => {
      keep("sessionStorage", KEY, field.value.trim());
      asking = null;
      resolve();
    }, { once: true });
    dialog.showModal();
    field.focus();
  });
  return asking;
}

// Asks on where no header can hold what was given.
document.getElementById("key-form").addEventListener("submit", (event) => {
  try {
    authorization(document.getElementById("key").value.trim());
  } catch {
    event.preventDefault();
    document.getElementById("key-text").textContent = "That key was not accepted: it has a character that no key can have.";
  }
});

// Throws for a key that no header can hold.
function authorization(key) {
  return new Headers(key ? { Authorization: `Bearer ${key}` } : {});
}

async function problem(response) {
  let message = `${response.status} ${response.statusText}`;
  try {
    message = (await response.json()).error.message || message;
  } catch {
    // What answered is no server of this kind; its status says all there is.
  }
  const { status } = response;
  const refused = status >= 400 && status < 500 && status !== 408 && status !== 429; // those two: not now
  return new ApiError(message, { refused, retryAfter: Number(response.headers.get("Retry-After")) || null });
}

async function request(path, options = {}) {
  for (;;) {
    const key = recall("sessionStorage", KEY);
    const headers = authorization(key);
    if (options.body) headers.set("Content-Type", "application/json");
    const response = await fetch(path, { ...options, headers, cache: "no-store" });
    if (response.status === 401) {
      // A key that came in meanwhile may be the right one.
      if (recall("sessionStorage", KEY) === key) await askKey(Boolean(key));
      continue;
    }
    return response;
  }
}

// The JSON of any answer that has some; /live tells of a model that is still loading, too.
export async function getJson(path) {
  const response = await request(path, { signal: AbortSignal.timeout(PATIENCE_MS) });
  if (!response.ok) throw await problem(response);
  return response.json();
}

// Chunks of a chat completion, as they come.
export async function* complete(body, signal) {
  const response = await request("/v1/chat/completions", {
    method: "POST",
    body: JSON.stringify(body),
    signal,
  });
  if (!response.ok) throw await problem(response);
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    yield chunkOf(data);
  }
  throw new ApiError(ENDED);
}

function chunkOf(data) {
  let chunk = null;
  try {
    chunk = JSON.parse(data);
  } catch {
    // Said below, as of anything else that is no chunk.
  }
  if (chunk?.error?.message) throw new ApiError(chunk.error.message);
  if (!Array.isArray(chunk?.choices) || !chunk.choices.every((choice) => choice?.delta)) {
    throw new ApiError("The server's answer is broken.");
  }
  return chunk;
}

// The data of each event; comments, which only keep the connection alive, are left out.
async function* events(stream) {
  const reader = stream.getReader();
  const decoder = new TextDecoder();
  let held = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      held += decoder.decode(value, { stream: !done });
      const parts = held.split(/\r?\n\r?\n/);
      held = parts.pop();
      for (const part of parts) {
        const data = part.split(/\r?\n/).filter((line) => line.startsWith("data:"));
        if (data.length) yield data.map((line) => line.slice(5).replace(/^ /, "")).join("\n");
      }
      if (done) return;
    }
  } catch (error) {
    throw error.name === "AbortError" ? error : new ApiError(ENDED);
  } finally {
    reader.cancel().catch(() => {}); // nobody waits for the connection to be gone
  }
}
