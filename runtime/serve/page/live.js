// Owns the live view: asks /live again and again, and shows what it says. Asks for nothing else.

import { getJson } from "/page/api.js";
import { HeatMap } from "/page/heatmap.js";
import { element } from "/page/markdown.js";

const EVERY_MS = 1000;
const LOADING_EVERY_MS = 300;
const SAMPLES = 60;

const at = (id) => document.getElementById(id);

export class Live {
  // `changed(facts)` hears of each answer of /live, and null where none came.
  constructor(changed) {
    this.changed = changed;
    this.rates = [];
    this.timer = 0;
    this.map = new HeatMap(at("map"), at("ramp"), (text) => { at("map-cell").textContent = text; });
    document.addEventListener("visibilitychange", () => this.#wake());
    at("by-layer").addEventListener("toggle", () => this.#layers());
    new ResizeObserver(() => this.#spark()).observe(at("spark"));
    this.#poll();
  }

  get #seen() {
    return !at("live").hidden;
  }

  // Asks at once, as when the view is opened.
  #wake() {
    clearTimeout(this.timer);
    if (!document.hidden) this.#poll();
  }

  opened() {
    this.#wake();
  }

  async #poll() {
    clearTimeout(this.timer);
    const turn = (this.turn = {}); // a later poll takes the place of one that is under way
    let facts = null;
    try {
      facts = await getJson(this.#seen ? "/live" : "/live?experts=0");
    } catch {
      // Gone or busy: said by the state in the bar, and asked again.
    }
    if (turn !== this.turn) return;
    this.changed(facts);
    if (facts) this.#show(facts);
    if (document.hidden) return;
    this.timer = setTimeout(() => this.#poll(), facts?.state === "loading" ? LOADING_EVERY_MS : EVERY_MS);
  }

  #show(facts) {
    const ready = facts.state === "ready" || facts.state === "draining";
    const rate = ready ? facts.tokens_per_s : 0;
    this.rates.push(rate);
    if (this.rates.length > SAMPLES) this.rates.shift();
    at("rate").textContent = ready ? rate.toFixed(rate < 100 ? 1 : 0) : "–";
    this.#spark();
    for (const [id, key] of [["running", "running"], ["waiting", "waiting"], ["written", "completion_tokens"]]) {
      at(id).textContent = ready ? facts[key].toLocaleString() : "–";
    }
    const read = facts.prompt_tokens;
    const share = read ? ` (${percent(facts.cached_tokens / read)} cached)` : "";
    at("read").textContent = ready ? read.toLocaleString() + share : "–";
    if (ready && facts.prefix) this.#prefix(facts.prefix);
    if (ready && this.#seen) this.#experts(facts.experts);
  }

  #prefix(prefix) {
    const bar = at("prefix-bar");
    bar.hidden = !prefix.limit_bytes;
    bar.value = prefix.limit_bytes ? prefix.bytes / prefix.limit_bytes : 0;
    at("prefix-text").textContent = prefix.limit_bytes
      ? `${bytes(prefix.bytes)} of ${bytes(prefix.limit_bytes)}, ${plural(prefix.entries, "snapshot")}; `
        + `${prefix.hits.toLocaleString()} of ${plural(prefix.queries, "prompt")} began from one`
      : "Off";
  }

  // `experts` is null where the server hears of no expert, and without a map where nobody asked.
  #experts(experts) {
    at("experts-none").hidden = experts !== null;
    at("experts-some").hidden = experts === null;
    if (experts === null) return;
    this.#cache(experts);
    at("experts-map").hidden = !experts.routed;
    if (experts.routed) this.#map(experts);
  }

  #cache(experts) {
    const facts = [];
    if (experts.hits !== undefined) {
      const asked = experts.hits + experts.misses + experts.compulsory;
      facts.push(["Cache hits", asked ? percent(experts.hits / asked) : "–"]);
      facts.push(["Slots in a layer", experts.slots.toLocaleString()]);
      facts.push(["First uses", experts.compulsory.toLocaleString()]);
      facts.push(["Misses", experts.misses.toLocaleString()]);
      facts.push(["Evictions", experts.evictions.toLocaleString()]);
      facts.push(["Bytes read", bytes(experts.bytes)]);
    }
    at("experts-facts").replaceChildren(...facts.map(([name, value]) => {
      const pair = document.createElement("div");
      pair.append(element("dt", "", name), element("dd", "", value));
      return pair;
    }));
  }

  #map(experts) {
    this.view = experts;
    this.map.update(experts);
    at("axis-from").textContent = `experts 0 to ${experts.experts - 1}`;
    at("axis-to").textContent = `layers 0 to ${experts.layers - 1}, downwards`;
    const held = experts.resident.flat().filter(Boolean).length;
    const most = busiest(experts.routed);
    at("map-summary").textContent = `${experts.layers} layers of ${plural(experts.experts, "expert")}: `
      + `${held.toLocaleString()} of ${(experts.layers * experts.experts).toLocaleString()} in memory. `
      + (most.count
        ? `Chosen most: expert ${most.expert} of layer ${most.layer}, ${most.count.toLocaleString()} times.`
        : "None chosen yet.");
    this.#layers();
  }

  #layers() {
    if (!this.view || !at("by-layer").open) return;
    const { routed, resident, experts } = this.view;
    at("layers").replaceChildren(...routed.map((row, layer) => {
      const held = resident[layer].filter(Boolean).length;
      const sum = row.reduce((total, count) => total + count, 0);
      const most = busiest([row]);
      const line = document.createElement("tr");
      const head = element("th", "", String(layer));
      head.scope = "row";
      line.append(head, element("td", "", `${held} of ${experts}`), element("td", "", sum.toLocaleString()),
        element("td", "", sum ? `${most.expert} (${percent(most.count / sum)})` : "–"));
      return line;
    }));
  }

  #spark() {
    const canvas = at("spark");
    const scale = window.devicePixelRatio || 1;
    const [width, height] = [canvas.clientWidth * scale, canvas.clientHeight * scale];
    if (!width) return;
    canvas.width = width;
    canvas.height = height;
    const brush = canvas.getContext("2d");
    const most = Math.max(1, ...this.rates);
    const style = getComputedStyle(canvas);
    const x = (place) => width - ((this.rates.length - 1 - place) / (SAMPLES - 1)) * width;
    const y = (rate) => height - scale - (rate / most) * (height - 3 * scale);
    brush.beginPath();
    this.rates.forEach((rate, place) => brush.lineTo(x(place), y(rate)));
    brush.strokeStyle = style.color;
    brush.lineWidth = 1.5 * scale;
    brush.lineJoin = "round";
    brush.stroke();
    brush.lineTo(width, height);
    brush.lineTo(x(0), height);
    brush.globalAlpha = 0.12;
    brush.fillStyle = style.color;
    brush.fill();
  }
}

function busiest(rows) {
  const found = { layer: 0, expert: 0, count: 0 };
  rows.forEach((row, layer) => row.forEach((count, expert) => {
    if (count > found.count) Object.assign(found, { layer, expert, count });
  }));
  return found;
}

function percent(share) {
  return `${(100 * share).toFixed(share > 0.995 || share < 0.005 ? 1 : 0)} %`;
}

function plural(count, word) {
  return `${count.toLocaleString()} ${word}${count === 1 ? "" : "s"}`;
}

export function bytes(count) {
  const names = ["bytes", "kB", "MB", "GB", "TB"];
  let value = count;
  while (value >= 999.5 && names.length > 1) {
    value /= 1000;
    names.shift();
  }
  return `${names[0] === "bytes" ? value : value.toPrecision(3)} ${names[0]}`;
}
