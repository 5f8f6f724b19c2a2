// Owns what the browser keeps of the page, as JSON by name. What it cannot keep lasts as long as the
// page does.

const held = new Map();

// `area` is "localStorage" or "sessionStorage"; null where nothing is kept, or nothing that can be read.
export function recall(area, name) {
  if (held.has(name)) return held.get(name);
  try {
    return JSON.parse(window[area].getItem(name));
  } catch {
    return null; // not JSON, or a browser that lets no page keep anything
  }
}

export function keep(area, name, value) {
  try {
    window[area].setItem(name, JSON.stringify(value));
    held.delete(name);
  } catch {
    held.set(name, value); // full, or not allowed
  }
}
