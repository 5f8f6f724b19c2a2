"use strict";
// The maps are drawn without this script: it tells of one cell at a time, and saves all as CSV.
(() => {
  const data = JSON.parse(document.getElementById("cells").textContent);
  const tip = document.getElementById("tip");
  const number = (value) => value.toLocaleString("en-US");

  const words = (part, row, column) => {
    const cell = part.cells[row][column];
    const lines = [`layer ${data.layers[row]} · expert ${data.columns[column]} · ${part.title}`];
    if (cell < 0) return [...lines, "not in this file"];
    const kind = part.kinds[cell];
    lines.push(kind.type, `${number(kind.bytes)} bytes`);
    if (part.errors) {
      const error = part.errors[row][column];
      lines.push(error === null ? "not re-encoded" : `NRMSE ${error.toFixed(4)}`);
    }
    return lines;
  };

  const place = (x, y) => {
    const box = tip.getBoundingClientRect();
    const left = Math.min(x + 14, innerWidth - box.width - 8);
    tip.style.left = `${Math.max(8, left)}px`;
    tip.style.top = `${y + 18 + box.height > innerHeight ? y - box.height - 12 : y + 18}px`;
  };

  const attach = (svg) => {
    const part = data.parts[svg.dataset.part];
    const [left, top, width, height] = svg.dataset.plot.split(" ").map(Number);
    const cursor = svg.querySelector(".cursor");
    const rows = data.layers.length, columns = data.columns.length;
    let row = 0, column = 0;

    const show = (x, y) => {
      cursor.setAttribute("x", left + column * width);
      cursor.setAttribute("y", top + row * height);
      cursor.classList.add("on");
      tip.replaceChildren(...words(part, row, column).map((line) => {
        const item = document.createElement("div");
        item.textContent = line;
        return item;
      }));
      tip.hidden = false;
      place(x, y);
    };
    const hide = () => {
      cursor.classList.remove("on");
      tip.hidden = true;
    };
    const point = (event) => {
      const at = new DOMPoint(event.clientX, event.clientY)
        .matrixTransform(svg.getScreenCTM().inverse());
      const x = Math.floor((at.x - left) / width), y = Math.floor((at.y - top) / height);
      if (x < 0 || y < 0 || x >= columns || y >= rows) return hide();
      [row, column] = [y, x];
      show(event.clientX, event.clientY);
    };
    const step = (by, along) => {
      row = Math.min(rows - 1, Math.max(0, row + by));
      column = Math.min(columns - 1, Math.max(0, column + along));
      const corner = new DOMPoint(left + (column + 1) * width, top + (row + 1) * height)
        .matrixTransform(svg.getScreenCTM());
      show(corner.x, corner.y);
    };
    const keys = {
      ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1],
      Home: [0, -columns], End: [0, columns], PageUp: [-rows, 0], PageDown: [rows, 0],
    };

    svg.tabIndex = 0;
    svg.addEventListener("pointermove", point);
    svg.addEventListener("pointerdown", point);
    svg.addEventListener("pointerleave", hide);
    svg.addEventListener("blur", hide);
    svg.addEventListener("focus", () => { if (svg.matches(":focus-visible")) step(0, 0); });
    svg.addEventListener("keydown", (event) => {
      if (event.key === "Escape") return hide();
      if (!(event.key in keys)) return;
      event.preventDefault();
      step(...keys[event.key]);
    });
  };
  document.querySelectorAll("svg[data-part]").forEach(attach);

  const quoted = (value) => `"${String(value ?? "").replaceAll('"', '""')}"`;
  const table = () => {
    const lines = [["layer", "expert", "part", "type", "bytes", "nrmse"]];
    for (const part of data.parts) {
      part.cells.forEach((cells, row) => cells.forEach((cell, column) => {
        if (cell < 0) return;
        const { type, bytes } = part.kinds[cell];
        const error = part.errors ? part.errors[row][column] : null;
        lines.push([data.layers[row], data.columns[column], part.part, type, bytes, error]);
      }));
    }
    return lines.map((line) => line.map(quoted).join(",")).join("\n") + "\n";
  };
  const save = document.getElementById("save");
  save.hidden = false;
  save.addEventListener("click", () => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([table()], { type: "text/csv" }));
    link.download = `${data.name}.experts.csv`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  });
})();
