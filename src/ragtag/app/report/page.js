"use strict";
// Reads values back from the drawn paths, so that no number stands in the page twice.
(() => {
  const tip = document.createElement("div");
  tip.id = "tip"; tip.hidden = true; document.body.append(tip);
  const pair = (svg, name) => svg.dataset[name].split(",").map(Number);
  const three = (v) => (v === 0 ? "0" : String(Number(v.toPrecision(3))));
  const clock = (t) => {
    if (t < 120) return t.toFixed(t < 10 ? 2 : 1) + " s";
    const s = Math.round(t), two = (n) => String(n).padStart(2, "0"), h = Math.floor(s / 3600);
    return h ? `${h}:${two(Math.floor(s / 60) % 60)}:${two(s % 60)}` : `${Math.floor(s / 60)}:${two(s % 60)}`;
  };
  const form = (svg, v) => {
    const unit = svg.dataset.unit;
    if (unit === "share") return three(100 * v) + " %";
    if (unit === "seconds") return v < 1 ? three(1000 * v) + " ms" : three(v) + " s";
    return three(v);
  };
  const value = (svg, y) => {
    const [a, b] = pair(svg, "y"), [low, high] = pair(svg, "v"), share = (y - a) / (b - a);
    if (svg.dataset.form === "log") return low * Math.pow(high / low, share);
    if (svg.dataset.form === "error") return 1 - (1 - low) * Math.pow((1 - high) / (1 - low), share);
    return low + share * (high - low);
  };
  const points = (path) => {
    if (!path.points) { // [x, y, joined to the one before]
      const parts = path.getAttribute("d").matchAll(/([ML])(-?[\d.]+) (-?[\d.]+)/g);
      path.points = [...parts].map((p) => [Number(p[2]), Number(p[3]), p[1] === "L"]);
    }
    return path.points;
  };
  const near = (path, x) => {
    const all = points(path);
    let low = 0, high = all.length - 1;
    while (low < high) { const mid = (low + high) >> 1; if (all[mid][0] < x) low = mid + 1; else high = mid; }
    const best = low > 0 && x - all[low - 1][0] < all[low][0] - x ? low - 1 : low;
    const inside = low > 0 && all[low][2] && x >= all[low - 1][0] && x <= all[low][0];
    return inside || Math.abs(all[best][0] - x) <= 8 ? all[best] : null;
  };
  for (const title of document.querySelectorAll("svg.chart title")) { // else the browser shows it a second time
    title.parentNode.dataset.about = title.textContent;
    title.remove();
  }
  for (const svg of document.querySelectorAll("svg.chart")) {
    const lines = [...svg.querySelectorAll("path[data-name]")];
    const cursor = svg.querySelector("path.axis").cloneNode();
    cursor.setAttribute("class", "cursor"); cursor.setAttribute("d", ""); svg.append(cursor);
    const hide = () => { tip.hidden = true; cursor.setAttribute("d", ""); lines.forEach((l) => l.classList.remove("hot")); };
    svg.addEventListener("pointerleave", hide);
    svg.addEventListener("pointermove", (event) => {
      const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
      const [x0, x1] = pair(svg, "x"), [t0, t1] = pair(svg, "t"), [bottom, top] = pair(svg, "y");
      if (at.x < x0 || at.x > x1) { hide(); return; }
      cursor.setAttribute("d", `M${at.x} ${top - 8}V${bottom}`);
      let found = lines.map((l) => ({ line: l, at: near(l, at.x) })).filter((f) => f.at);
      found.sort((a, b) => Math.abs(a.at[1] - at.y) - Math.abs(b.at[1] - at.y));
      lines.forEach((l) => l.classList.toggle("hot", found.length > 1 && l === found[0].line));
      found = found.slice(0, 9).sort((a, b) => a.at[1] - b.at[1]);
      tip.replaceChildren();
      const add = (tag, text) => { const e = document.createElement(tag); e.textContent = text; tip.append(e); return e; };
      add("b", clock(t0 + ((at.x - x0) / (x1 - x0)) * (t1 - t0)));
      if (!lines.length && svg.dataset.unit) add("div", form(svg, value(svg, at.y)) + " at the pointer");
      for (const f of found) {
        const row = add("div", "");
        const key = document.createElement("i"); key.className = f.line.classList[1]; row.append(key);
        row.append(`${f.line.dataset.name}: ${form(svg, value(svg, f.at[1]))}`);
      }
      const about = event.target.closest("[data-about]");
      if (about) add("div", about.dataset.about);
      tip.hidden = false;
      const box = tip.getBoundingClientRect();
      tip.style.left = Math.max(4, Math.min(event.clientX + 14, innerWidth - box.width - 4)) + "px";
      tip.style.top = Math.max(4, event.clientY - box.height - 12) + "px";
    });
  }
})();
