// Drawing: scales, markers, curves and bars as SVG. What is drawn is decided in charts.js.

const drawing = {
  element(name, attributes = {}, ...children) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...children);
    return made;
  },

  // Eight outlines around 0, 0, told apart without any colour.
  markers: [
    "M-4.5 0a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0-9 0z",
    "M-4-4h8v8h-8z",
    "M0-5.5L5.5 0L0 5.5L-5.5 0z",
    "M0-5.3L5.3 4.2H-5.3z",
    "M0 5.3L5.3-4.2H-5.3z",
    "M-1.7-5h3.4v3.3h3.3v3.4h-3.3v3.3h-3.4v-3.3h-3.3v-3.4h3.3z",
    "M0-5.6L5.3-1.7L3.3 4.5H-3.3L-5.3-1.7z",
    "M-5-5L5-5L-5 5L5 5z",
  ],

  dashes: ["", "7 4", "2 3", "9 3 2 3"],

  marker(style, x, y) {
    const path = drawing.markers[style.marker];
    return drawing.element("path", { class: "point", d: path, transform: `translate(${x} ${y})` });
  },

  group(style) {
    return drawing.element("g", {
      class: `series${style.ours ? " ours" : ""}`, style: `--color: var(${style.color})`,
    });
  },

  // Round numbers from 0 to at least the largest value, about as many as asked for.
  linear(largest, count) {
    const rough = (largest || 1) / count, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 2.5, 5, 10].map((one) => one * power).find((one) => one >= rough);
    const ticks = Array.from({ length: Math.ceil(largest / step - 1e-9) + 1 }, (_, i) => i * step);
    return { ticks, place: (value) => value / ticks.at(-1) };
  },

  // Powers of ten around all values; where these lie close together, 1, 2 and 5 times them.
  decades(values) {
    const [least, most] = [Math.min(...values), Math.max(...values)];
    const steps = most / least > 100 ? [1] : [1, 2, 5], first = Math.floor(Math.log10(least));
    const all = [];
    for (let power = first; power <= Math.log10(most) + 1; power++) {
      all.push(...steps.map((step) => Number(`${step}e${power}`)));
    }
    const start = all.findLastIndex((tick) => tick <= least);
    const ticks = all.slice(start, Math.max(all.findIndex((tick) => tick >= most), start + 1) + 1);
    const [low, high] = [ticks[0], ticks.at(-1)].map(Math.log10);
    return { ticks, place: (value) => (Math.log10(value) - low) / (high - low) };
  },

  length(rows) {
    return rows >= 1024 && rows % 512 === 0 ? `${rows / 1024}k` : `${rows}`;
  },

  number(value) {
    if (value === null) return "–";
    if (value !== 0 && Math.abs(value) < 1e-3) return value.toExponential(1).replace(".0e", "e");
    return value >= 100 ? value.toFixed(0) : String(Number(value.toPrecision(3)));
  },

  // Curves over length, log2; series: [{style, points: [{length, value}]}].
  curves(series, chosen, width) {
    const points = series.flatMap((one) => one.points);
    const height = width < 500 ? 270 : 380;
    const box = { left: 54, right: width - 14, top: 26, bottom: height - 40 };
    const lengths = [...new Set(points.map((point) => point.length))].sort((a, b) => a - b);
    const across = (length) => {
      const [first, last] = [lengths[0], lengths.at(-1)].map(Math.log2);
      return box.left + 14 + (box.right - box.left - 28) * (Math.log2(length) - first) / (last - first);
    };
    const values = points.map((point) => point.value);
    const shown = chosen.limit && chosen.limit <= 1.6 * Math.max(...values) ? chosen.limit : null;
    const scale = chosen.log ? drawing.decades(values) : drawing.linear(Math.max(...values, shown ?? 0), 5);
    const up = (value) => box.bottom - (box.bottom - box.top) * scale.place(value);
    const svg = drawing.element("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img" });
    drawing.frame(svg, box, scale, up, chosen.unit);
    let free = -Infinity;
    for (const length of lengths) {
      if (across(length) - free < 30) continue;
      free = across(length);
      svg.append(drawing.text("middle", free, box.bottom + 18, drawing.length(length)));
    }
    svg.append(drawing.text("end", box.right, height - 4, "length (keys), log scale"));
    if (shown) {
      const y = up(shown);
      svg.append(
        drawing.element("path", { class: "limit", d: `M${box.left} ${y}H${box.right}` }),
        drawing.text("end", box.right, y - 6, `limit ${drawing.number(shown)} ${chosen.unit}`, "name"),
      );
    }
    const ordered = [...series].sort((one, other) => one.style.ours - other.style.ours);
    for (const one of ordered) {
      const group = drawing.group(one.style);
      const line = one.points.map((point) => `${across(point.length).toFixed(1)} ${up(point.value).toFixed(1)}`);
      group.append(drawing.element("path", {
        class: "line", d: `M${line.join("L")}`, "stroke-dasharray": drawing.dashes[one.style.dash],
      }));
      for (const point of one.points) group.append(drawing.marker(one.style, across(point.length), up(point.value)));
      svg.append(group);
    }
    return { svg, box, lengths, across };
  },

  // Bars beside names, where there is one length only.
  bars(series, chosen, width) {
    const row = 30, left = width < 500 ? 118 : 178, height = series.length * row + 34;
    const values = series.map((one) => one.points[0].value);
    const scale = chosen.log ? drawing.decades(values) : drawing.linear(Math.max(...values), width < 500 ? 3 : 5);
    const box = { left, right: width - 60, top: 4, bottom: height - 30 };
    const across = (value) => left + (box.right - left) * scale.place(value);
    const svg = drawing.element("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img" });
    for (const tick of scale.ticks) {
      svg.append(
        drawing.element("path", { class: "grid", d: `M${across(tick)} ${box.top}V${box.bottom}` }),
        drawing.text("middle", across(tick), box.bottom + 16, drawing.number(tick)),
      );
    }
    svg.append(drawing.text("end", width, height - 14, chosen.unit));
    series.forEach((one, index) => {
      const y = box.top + index * row, value = one.points[0].value, group = drawing.group(one.style);
      const kind = one.style.ours ? "bar" : "bar peer", end = Math.max(across(value), left + 1);
      group.append(
        drawing.element("path", { class: kind, d: `M${left} ${y + 5}H${end}V${y + row - 5}H${left}z` }),
        drawing.marker(one.style, end, y + row / 2),
        drawing.text("end", left - 10, y + row / 2 + 4, one.style.who, "name"),
        drawing.text("start", end + 12, y + row / 2 + 4, drawing.number(value), "name"),
      );
      svg.append(group);
    });
    svg.append(drawing.element("path", { class: "axis", d: `M${left} ${box.top}V${box.bottom}` }));
    return { svg };
  },

  frame(svg, box, scale, up, unit) {
    for (const tick of scale.ticks) {
      svg.append(
        drawing.element("path", { class: tick ? "grid" : "axis", d: `M${box.left} ${up(tick)}H${box.right}` }),
        drawing.text("end", box.left - 8, up(tick) + 4, drawing.number(tick)),
      );
    }
    svg.append(drawing.text("start", 0, 12, unit));
  },

  text(anchor, x, y, words, kind = "") {
    return drawing.element("text", { "text-anchor": anchor, x, y, class: kind }, words);
  },
};
