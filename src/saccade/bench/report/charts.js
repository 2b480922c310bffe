// Charts: the selects choose points, which become a picture, a legend and a table.

const charts = {
  ...JSON.parse(document.getElementById("data").textContent),
  part: (name) => document.getElementById(name),
  hidden: new Set(), // peers that the legend has switched off

  // The selects that choose points, in the order in which one narrows down the next.
  fields: [
    ["machine", "Machine"], ["kind", "Mask"], ["dtype", "Dtype"], ["dim", "Head dim"],
    ["pass", "Pass"], ["source", "Results from"],
  ],

  values: {
    rate: { name: "Throughput", of: (point) => point.rate, unit: (point) => point.unit },
    share: { name: "Share of the limit", of: (point) => point.share && 100 * point.share, unit: () => "%" },
    ms: { name: "Time", of: (point) => point.ms, unit: () => "ms", log: true },
    ratio: { name: "Time over the fastest", of: (point) => point.ratio, unit: () => "×" },
    error: { name: "Error against float64", of: (point) => point.error, unit: () => "relative", log: true },
    mb: { name: "Memory", of: (point) => point.mb, unit: () => "MB" },
  },

  start() {
    const form = charts.part("choices");
    if (!charts.points.length) {
      charts.part("chart-title").textContent = "No result here has a throughput to draw.";
      return;
    }
    for (const point of charts.points) point.source = charts.sources[point.source];
    charts.styles = charts.chooseStyles();
    charts.selects = {};
    for (const [name, label] of [["value", "Show"], ...charts.fields]) {
      const select = document.createElement("select"), wrapper = document.createElement("label");
      select.name = name;
      select.id = `choose-${name}`;
      wrapper.append(label, select);
      form.append(wrapper);
      charts.selects[name] = select;
    }
    form.addEventListener("submit", (event) => event.preventDefault());
    form.addEventListener("change", ({ target }) => {
      charts.wanted[target.name] = target.value;
      charts.update();
    });
    for (const [key, { name, of }] of Object.entries(charts.values)) {
      const option = new Option(name, key);
      option.disabled = !charts.points.some((point) => of(point) !== null);
      if (option.disabled) option.text += " (not measured)";
      charts.selects.value.add(option);
    }
    charts.wanted = charts.richest();
    charts.update();
    let width = 0;
    new ResizeObserver(([entry]) => {
      if (Math.abs(entry.contentRect.width - width) < 1) return;
      width = entry.contentRect.width;
      charts.draw();
    }).observe(charts.part("chart"));
  },

  // Saccade's in warm colours and peers' in cold ones, the same one everywhere on the page. Those
  // that stand in one chart differ in colour; where there are too few, in dashes.
  chooseStyles() {
    const styles = {}, together = new Map(), beside = new Map(), seen = new Map();
    for (const point of charts.points) {
      const place = ["machine", "kind", "dtype", "dim", "pass"].map((name) => point[name]).join("\n");
      if (!together.has(place)) together.set(place, new Set());
      together.get(place).add(point.who);
      seen.set(point.who, { ours: point.ours, count: (seen.get(point.who)?.count ?? 0) + 1 });
    }
    for (const names of together.values()) {
      for (const who of names) beside.set(who, new Set([...(beside.get(who) ?? []), ...names]));
    }
    const order = [...seen.keys()].sort((one, other) => seen.get(other).count - seen.get(one).count);
    for (const [index, who] of order.entries()) {
      const ours = seen.get(who).ours, kind = ours ? "ours" : "peer", colors = ours ? 4 : 5;
      const near = [...beside.get(who)].map((name) => styles[name]).filter((style) => style?.ours === ours);
      const taken = new Set(near.map((style) => style.number));
      let number = 0;
      while (taken.has(number)) number++;
      styles[who] = {
        who, ours, number, color: `--${kind}-${number % colors}`, dash: Math.floor(number / colors) % 4,
        marker: index % drawing.markers.length,
      };
    }
    return styles;
  },

  // The choice with the most points: it shows most at first sight.
  richest() {
    const counts = new Map();
    for (const point of charts.points) {
      const names = charts.fields.map(([name]) => name).filter((name) => name !== "source");
      const place = JSON.stringify(names.map((name) => [name, point[name]]));
      counts.set(place, (counts.get(place) ?? 0) + 1);
    }
    const [place] = [...counts].reduce((one, other) => (other[1] > one[1] ? other : one));
    return { ...Object.fromEntries(JSON.parse(place)), source: "" };
  },

  // Fill each select with what the ones before it leave, and choose what was wanted if it is there.
  update() {
    let left = charts.points;
    for (const [name] of charts.fields) {
      const select = charts.selects[name], wanted = charts.wanted[name];
      const found = [...new Set(left.map((point) => point[name]))];
      if (name === "dim") found.sort((one, other) => parseInt(one) - parseInt(other));
      const options = found.map((value) => new Option(value, value));
      if (name === "source" && found.length > 1) options.unshift(new Option("all files", ""));
      select.replaceChildren(...options);
      if (options.some((option) => option.value === wanted)) select.value = wanted;
      select.disabled = options.length < 2;
      if (select.value) left = left.filter((point) => point[name] === select.value);
    }
    charts.chosen = left;
    charts.draw();
    charts.tabulate();
  },

  // One point for each peer and case, its last one: files may hold several runs of a case.
  lastOnes() {
    const last = new Map();
    for (const point of charts.chosen) {
      const place = `${point.who} ${point.case}`;
      if (!last.has(place) || last.get(place).date <= point.date) last.set(place, point);
    }
    return [...last.values()];
  },

  draw() {
    const value = charts.values[charts.selects.value.value], points = charts.lastOnes();
    const largest = Math.max(...points.map((point) => point.rate));
    // Small rates in thousandths, so that they are read with ease.
    const giga = value === charts.values.rate && points[0].unit === "TFLOP/s" && largest < 1;
    const factor = giga ? 1000 : 1;
    const styles = Object.values(charts.styles).sort((one, other) => other.ours - one.ours);
    const all = styles.map((style) => ({
      style,
      points: points
        .filter((point) => point.who === style.who && value.of(point) !== null)
        .map((point) => ({ length: point.length, value: value.of(point) * factor }))
        .sort((one, other) => one.length - other.length),
    })).filter((one) => one.points.length);
    const series = all.filter((one) => !charts.hidden.has(one.style.who));
    const limit = points.find((point) => point.limit !== null);
    const chosen = {
      unit: giga ? "GFLOP/s" : value.unit(points[0]), log: value.log,
      limit: value === charts.values.rate && limit ? limit.limit * factor : null,
    };
    charts.caption(value, series);
    charts.note(points, chosen, limit, series);
    charts.legend(all);
    const chart = charts.part("chart");
    chart.replaceChildren();
    if (!series.length) return;
    const lengths = new Set(series.flatMap((one) => one.points.map((point) => point.length)));
    const width = Math.max(260, chart.clientWidth);
    const drawn = (lengths.size > 1 ? drawing.curves : drawing.bars)(series, chosen, width);
    drawn.svg.setAttribute("aria-label", `${charts.part("chart-title").textContent}. The table below holds the numbers.`);
    chart.append(drawn.svg);
    if (drawn.lengths) charts.follow(drawn, series, chosen);
  },

  caption(value, series) {
    const { machine, kind, dtype, dim, pass } = charts.selects;
    const where = `${kind.value}, ${dtype.value}, head dim ${dim.value}, ${pass.value}, on ${machine.value}`;
    const none = series.length ? "" : charts.hidden.size ? ": nobody is switched on" : ": not measured";
    charts.part("chart-title").textContent = `${value.name}: ${where}${none}`;
  },

  note(points, chosen, limit, series) {
    const notes = [], runs = new Set(points.map((point) => `${point.case} ${point.run}`)).size;
    const cases = new Set(points.map((point) => point.case)).size;
    if (runs > cases) {
      notes.push("Not all of these took turns in one run; the table's last column compares within runs.");
    }
    const largest = Math.max(...series.flatMap((one) => one.points.map((point) => point.value)));
    if (chosen.limit && chosen.limit > 1.6 * largest) {
      notes.push(`The machine's limit lies above this picture: ${drawing.number(chosen.limit)} ${chosen.unit}.`);
    }
    if (chosen.limit) notes.push(`The limit comes from ${limit.limitSource}.`);
    charts.part("chart-note").textContent = notes.join(" ");
  },

  legend(all) {
    const focused = document.activeElement?.dataset?.who;
    const buttons = all.map(({ style }) => {
      const button = document.createElement("button"), group = drawing.group(style);
      const icon = drawing.element("svg", { width: 30, height: 14, viewBox: "-15 -7 30 14", "aria-hidden": "true" }, group);
      group.append(drawing.element("path", { class: "line", d: "M-15 0H15", "stroke-dasharray": drawing.dashes[style.dash] }), drawing.marker(style, 0, 0));
      button.type = "button";
      button.dataset.who = style.who;
      button.setAttribute("aria-pressed", String(!charts.hidden.has(style.who)));
      button.append(icon, style.who);
      button.addEventListener("click", () => {
        charts.hidden.has(style.who) ? charts.hidden.delete(style.who) : charts.hidden.add(style.who);
        charts.draw();
      });
      return button;
    });
    charts.part("legend").replaceChildren(...buttons);
    buttons.find((button) => button.dataset.who === focused)?.focus();
  },

  // Under a pointer: every peer's value at the nearest length.
  follow({ svg, box, lengths, across }, series, chosen) {
    const tip = document.createElement("div"), cursor = drawing.element("path", { class: "cursor" });
    tip.id = "tip";
    tip.hidden = true;
    svg.prepend(cursor);
    svg.after(tip);
    const show = (event) => {
      const x = event.clientX - svg.getBoundingClientRect().left;
      const length = lengths.reduce((one, other) => (Math.abs(across(other) - x) < Math.abs(across(one) - x) ? other : one));
      const rows = series
        .flatMap((one) => one.points.filter((point) => point.length === length).map((point) => [one.style.who, point.value]))
        .sort((one, other) => other[1] - one[1]);
      const title = document.createElement("b");
      title.textContent = `${drawing.length(length)} keys, ${chosen.unit}`;
      tip.replaceChildren(title, ...rows.flatMap(([who, value]) => [`${drawing.number(value)}  ${who}`, document.createElement("br")]));
      tip.hidden = false;
      const beside = across(length) + 12 + tip.offsetWidth > box.right ? across(length) - 12 - tip.offsetWidth : across(length) + 12;
      tip.style.left = `${Math.max(0, beside)}px`;
      tip.style.top = `${box.top}px`;
      cursor.setAttribute("d", `M${across(length)} ${box.top}V${box.bottom}`);
    };
    const hide = () => { tip.hidden = true; cursor.removeAttribute("d"); };
    svg.addEventListener("pointermove", show);
    svg.addEventListener("pointerdown", show);
    svg.addEventListener("pointerleave", hide);
  },

  // The same points as a table: it says in words what the picture shows.
  tabulate() {
    const columns = [
      ["keys", (point) => [drawing.length(point.length), point.length]],
      ["who", (point) => [point.who]],
      ["batch × heads", (point) => [point.heads]],
      ["ms", (point) => [drawing.number(point.ms), point.ms]],
      [charts.chosen[0].unit, (point) => [drawing.number(point.rate), point.rate]],
      ["of the limit", (point) => (point.share === null ? ["–"] : [`${(100 * point.share).toFixed(0)} %`, point.share])],
      ["error", (point) => (point.error === null ? ["–"] : [point.error.toExponential(1), point.error])],
      ["MB", (point) => (point.mb === null ? ["–"] : [point.mb.toFixed(1), point.mb])],
      ["from", (point) => [point.source]],
      ["× fastest of its run", (point) => [point.ratio.toFixed(2), point.ratio]],
    ];
    const points = [...charts.chosen].sort((one, other) => one.length - other.length || one.ms - other.ms);
    const body = points.map((point) => columns.map(([, cell]) => cell(point)));
    const kept = columns.map((_, index) => body.some((row) => row[index][0] !== "–"));
    const numeric = columns.map((_, index) => body.some((row) => row[index].length === 2));
    const make = (name, parent, text) => {
      const made = document.createElement(name);
      if (text !== undefined) made.textContent = text;
      parent.append(made);
      return made;
    };
    const scroll = document.createElement("div"), table = make("table", scroll);
    Object.assign(scroll, { className: "scroll", tabIndex: 0 });
    scroll.setAttribute("role", "region");
    scroll.setAttribute("aria-label", "The chart's numbers");
    table.className = "sortable";
    make("span", make("caption", table), "The chart's numbers");
    const head = make("tr", make("thead", table)), rows = make("tbody", table);
    columns.forEach(([name], index) => {
      if (!kept[index]) return;
      const header = make("th", head);
      header.scope = "col";
      if (numeric[index]) header.className = "number";
      make("button", header, name).type = "button";
    });
    for (const [at, row] of body.entries()) {
      const made = make("tr", rows);
      row.forEach(([text, number], index) => {
        if (!kept[index]) return;
        const cell = make("td", made, text);
        if (numeric[index]) cell.className = "number";
        if (index === 1 && points[at].ours) cell.className = "ours";
        if (number !== undefined) cell.dataset.number = number;
      });
    }
    charts.part("chart-table").replaceChildren(scroll);
  },
};
charts.start();
