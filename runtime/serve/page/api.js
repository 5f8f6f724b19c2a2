// Owns talking to the server: the key, JSON, and streams of events. Knows no element but the key's.

const KEY = "ds4q.key";
const PATIENCE_MS = 15000;

export class ApiError extends Error {
  constructor(message, status, retryAfter) {
    super(message);
    this.status = status;
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
      sessionStorage.setItem(KEY, field.value);
      asking = null;
      resolve();
    }, { once: true });
    dialog.showModal();
    field.focus();
  });
  return asking;
}

async function problem(response) {
  let message = `${response.status} ${response.statusText}`;
  try {
    message = (await response.json()).error.message || message;
  } catch {
    // What answered is no server of this kind; its status says all there is.
  }
  return new ApiError(message, response.status, Number(response.headers.get("Retry-After")) || null);
}

async function request(path, options = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const headers = { ...options.headers, ...(key && { Authorization: `Bearer ${key}` }) };
    const response = await fetch(path, { ...options, headers, cache: "no-store" });
    if (response.status === 401) {
      // A key that came in meanwhile may be the right one.
      if (sessionStorage.getItem(KEY) === key) await askKey(Boolean(key));
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
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  if (!response.ok) throw await problem(response);
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(chunk.error.message, chunk.error.code ?? 500, null);
    yield chunk;
  }
  throw new ApiError("The connection ended before the answer did.", 0, null);
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
  } finally {
    reader.cancel().catch(() => {}); // nobody waits for the connection to be gone
  }
}
