// Owns the heat map of experts: layers down, experts across; colour is how often a router chose one,
// fullness whether it is in memory, a glow that it was chosen just now.

const STEPS = 9;
const GLOW_MS = 1400;
const still = matchMedia("(prefers-reduced-motion: reduce)");
const dark = matchMedia("(prefers-color-scheme: dark)");

export class HeatMap {
  constructor(canvas, ramp, tell) {
    this.canvas = canvas;
    this.ramp = ramp;
    this.tell = tell;
    this.view = null;
    this.cursor = null;
    this.glow = new Float32Array(0);
    this.now = 0;
    this.drawn = 0;
    new ResizeObserver(() => this.#lay()).observe(canvas.parentElement);
    dark.addEventListener("change", () => this.#lay());
    canvas.addEventListener("pointermove", (event) => this.#point(event));
    canvas.addEventListener("pointerdown", (event) => this.#point(event));
    canvas.addEventListener("pointerleave", () => this.#move(null));
    canvas.addEventListener("blur", () => this.#move(null));
    canvas.addEventListener("keydown", (event) => this.#key(event));
  }

  // `view`: layers, experts, routed and resident [layers][experts].
  update(view) {
    const before = this.view;
    const size = view.layers * view.experts;
    const counts = new Float64Array(size);
    view.routed.forEach((row, layer) => row.forEach((count, expert) => {
      counts[layer * view.experts + expert] = count;
    }));
    const same = before && before.layers === view.layers && before.experts === view.experts;
    if (!same) this.glow = new Float32Array(size);
    else if (!still.matches) {
      const news = counts.map((count, each) => Math.max(0, count - this.counts[each]));
      const most = news.reduce((a, b) => Math.max(a, b), 1);
      news.forEach((fresh, each) => {
        if (fresh) this.glow[each] = Math.max(this.glow[each], Math.sqrt(fresh / most));
      });
    }
    this.counts = counts;
    this.view = view;
    if (same) this.#animate();
    else this.#lay();
    if (this.cursor) this.#told();
  }

  #lay() {
    if (!this.view) return;
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    this.blues = Array.from({ length: STEPS }, (_, step) => colour(`--b${step}`));
    this.greys = this.blues.map(grey);
    this.ground = colour("--ground");
    this.hot = colour("--hot");
    this.ink = colour("--ink");
    const scale = window.devicePixelRatio || 1;
    const width = Math.floor(this.canvas.parentElement.clientWidth * scale);
    if (!width) return;
    const { layers, experts } = this.view;
    // A square where there is room; many narrow columns get rows that a pointer can hit.
    const across = width / experts;
    const down = Math.max(Math.min(across, 26 * scale), Math.min(9 * scale, (320 * scale) / layers));
    this.cell = { across: Math.min(across, 40 * scale), down: Math.max(1, Math.floor(down)) };
    this.canvas.width = Math.round(this.cell.across * experts);
    this.canvas.height = this.cell.down * layers;
    this.canvas.style.width = `${this.canvas.width / scale}px`;
    this.canvas.style.height = `${this.canvas.height / scale}px`;
    this.#legend(scale);
    this.#draw();
  }

  #legend(scale) {
    this.ramp.width = STEPS * 8 * scale;
    this.ramp.height = 10 * scale;
    const brush = this.ramp.getContext("2d");
    this.blues.forEach((colour, step) => {
      brush.fillStyle = colour;
      brush.fillRect(step * 8 * scale, 0, 8 * scale, 10 * scale);
    });
  }

  #animate() {
    if (this.frame) return;
    this.now = performance.now();
    const step = (time) => {
      this.frame = 0;
      const faded = Math.max(0, time - this.now) / GLOW_MS;
      this.now = time;
      let alight = false;
      for (let each = 0; each < this.glow.length; each += 1) {
        if (!this.glow[each]) continue;
        this.glow[each] = Math.max(0, this.glow[each] - faded);
        alight ||= this.glow[each] > 0;
      }
      this.#draw();
      if (alight) this.frame = requestAnimationFrame(step);
    };
    this.frame = requestAnimationFrame(step);
  }

  #draw() {
    if (!this.cell) return;
    const { layers, experts, resident } = this.view;
    const { across, down } = this.cell;
    const brush = this.canvas.getContext("2d");
    brush.globalAlpha = 1;
    brush.fillStyle = this.ground;
    brush.fillRect(0, 0, this.canvas.width, this.canvas.height);
    const gap = Math.min(across, down) >= 5 ? 1 : 0;
    const step = scale(this.counts);
    for (let layer = 0; layer < layers; layer += 1) {
      for (let expert = 0; expert < experts; expert += 1) {
        const place = layer * experts + expert;
        const held = resident[layer][expert];
        const count = this.counts[place];
        const left = Math.round(expert * across);
        const wide = Math.round((expert + 1) * across) - left - gap;
        const tall = down - gap;
        if (count || held) {
          brush.fillStyle = (held ? this.blues : this.greys)[step(count)];
          // Not in memory: smaller, so that it does not take colour alone to tell.
          const inset = held || !gap ? 0 : Math.max(1, Math.round(Math.min(wide, tall) * 0.22));
          brush.fillRect(left + inset, layer * down + inset, wide - 2 * inset, tall - 2 * inset);
        }
        if (this.glow[place]) {
          brush.globalAlpha = this.glow[place];
          brush.fillStyle = brush.strokeStyle = this.hot;
          // A frame, where there is room for one, leaves the colour within to be read.
          const rim = Math.round(Math.min(wide, tall) / 6);
          brush.lineWidth = rim;
          if (rim > 1) brush.strokeRect(left + rim / 2, layer * down + rim / 2, wide - rim, tall - rim);
          else brush.fillRect(left, layer * down, wide, tall);
          brush.globalAlpha = 1;
        }
      }
    }
    this.drawn += 1;
    this.canvas.dataset.drawn = this.drawn;
    if (!this.cursor) return;
    brush.strokeStyle = this.ink;
    brush.lineWidth = 2;
    brush.strokeRect(this.cursor.expert * across, this.cursor.layer * down, across, down);
  }

  #point(event) {
    if (!this.cell) return;
    const box = this.canvas.getBoundingClientRect();
    const { layers, experts } = this.view;
    const layer = Math.floor(((event.clientY - box.top) / box.height) * layers);
    const expert = Math.floor(((event.clientX - box.left) / box.width) * experts);
    if (layer >= 0 && layer < layers && expert >= 0 && expert < experts) this.#move({ layer, expert });
  }

  #key(event) {
    const steps = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
    if (!this.view || !(event.key in steps || event.key === "Home" || event.key === "End")) return;
    event.preventDefault();
    const { layers, experts } = this.view;
    const from = this.cursor;
    if (!from) return this.#move({ layer: 0, expert: 0 });
    if (event.key === "Home") return this.#move({ layer: from.layer, expert: 0 });
    if (event.key === "End") return this.#move({ layer: from.layer, expert: experts - 1 });
    const [down, across] = steps[event.key];
    this.#move({
      layer: Math.min(layers - 1, Math.max(0, from.layer + down)),
      expert: Math.min(experts - 1, Math.max(0, from.expert + across)),
    });
  }

  #move(cursor) {
    this.cursor = cursor;
    this.#told();
    if (this.view) this.#draw();
  }

  #told() {
    if (!this.cursor) return this.tell("");
    const { layer, expert } = this.cursor;
    const count = this.view.routed[layer][expert];
    const where = this.view.resident[layer][expert] ? "in memory" : "not in memory";
    this.tell(`Layer ${layer}, expert ${expert}: chosen ${count.toLocaleString()} time${count === 1 ? "" : "s"}, ${where}`);
  }
}

// Which step of a ramp a count takes: 0 for none, the others by its logarithm between the least and
// the most that there is, since a few experts are chosen many times as often as most.
function scale(counts) {
  let [least, most] = [Infinity, 0];
  for (const count of counts) {
    if (count && count < least) least = count;
    if (count > most) most = count;
  }
  const span = Math.log(most / least) || 1;
  return (count) => (count ? 1 + Math.round((Math.log(count / least) / span) * (STEPS - 2)) : 0);
}

// The grey of equal lightness.
function grey(hex) {
  const [red, green, blue] = [1, 3, 5].map((at) => Number.parseInt(hex.slice(at, at + 2), 16));
  const light = Math.round(0.2126 * red + 0.7152 * green + 0.0722 * blue);
  return `rgb(${light} ${light} ${light})`;
}
