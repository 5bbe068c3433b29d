"use strict";
const root = document.documentElement;
const color = (index) => getComputedStyle(root).getPropertyValue(index < 0 ? "--faint" : `--line${index}`);
const number = (value) => new Intl.NumberFormat("en", {maximumSignificantDigits: 5}).format(value);
const short = (value) => new Intl.NumberFormat("en", {notation: "compact", maximumFractionDigits: 3}).format(value);
const element = (parent, tag, values) => parent.appendChild(Object.assign(document.createElement(tag), values));

function draw(box, panel, xs, label) {
  const series = [{label}], tables = [], bands = [], shared = new Map();
  const values = panel.lines.flatMap((line) => line.y);
  const low = Math.min(...values), high = Math.max(...values), room = (high - low) / 2 || 1;
  for (const line of panel.lines) {
    const stroke = () => color(line.color), width = line.band ? 2 : 1;
    const points = {show: line.dots || line.y.length === 1, size: 6, fill: stroke};
    series.push({label: line.name, stroke, width: line.dots ? 0 : width, points, dash: line.dash && [6, 4]});
    tables.push([xs[line.x], line.y]);
    if (!line.band) continue;
    bands.push({series: [series.length + 1, series.length], fill: () => color(line.color) + "28"});
    for (const end of line.band) {
      series.push({class: "end", points: {show: false}});
      tables.push([xs[line.x], end]);
    }
    shared.set(series.length - 3, [series.length - 2, series.length - 1]);
  }
  const tip = Object.assign(document.createElement("div"), {className: "tip", hidden: true});
  let near = null;
  const plot = new uPlot({
    width: box.clientWidth,
    height: label ? 340 : 150,
    title: label ? undefined : panel.title,
    series,
    bands,
    legend: {show: Boolean(label), live: false},
    focus: {alpha: 0.3},
    cursor: {focus: {prox: 1e6, dist: (u, i, _, at, y) => (series[i].class ? Infinity : at - y)}, points: {size: 7, one: true}},
    scales: {
      x: {time: false},
      // Wide bands would press the curves flat.
      y: {range: (_, min, max) => uPlot.rangeNum(Math.max(min, low - room), Math.min(max, high + room), 0.1, true)},
    },
    axes: ["x", "y"].map((scale) => ({
      scale,
      stroke: () => color(-1),
      grid: {stroke: () => getComputedStyle(root).getPropertyValue("--border"), width: 1},
      ticks: {show: false},
      space: scale === "x" ? 60 : 28,
      label: scale === "x" && label ? label : undefined,
      values: (_, ticks) => ticks.map((tick) => (scale === "x" || Math.abs(tick) >= 1e5 ? short(tick) : number(tick))),
    })),
    hooks: {
      setSeries: [(u, i, change) => {
        if (change.focus !== undefined) near = i;
        if (change.show !== undefined) for (const end of shared.get(i) ?? []) u.setSeries(end, {show: change.show});
      }],
      setCursor: [(u) => {
        const {left, top, idxs} = u.cursor, at = near && left >= 0 ? idxs[near] : null;
        tip.hidden = at == null;
        if (at == null) return;
        tip.textContent = `${series[near].label}: ${number(u.data[near][at])} at ${number(u.data[0][at])}`;
        tip.style.transform = `translate(${left < u.over.clientWidth / 2 ? left + 12 : left - 12 - tip.offsetWidth}px, ${top - 30}px)`;
      }],
    },
  }, uPlot.join(tables), box);
  plot.over.append(tip);
  for (const name of box.querySelectorAll(".u-series th")) {
    Object.assign(name, {tabIndex: 0, role: "button", onkeydown: (event) => event.key === "Enter" && name.click()});
  }
  return plot;
}

const drawn = new Map();  // the plot in each box
const show = (box) => {
  drawn.get(box)?.destroy();
  box.replaceChildren();
  const chart = JSON.parse(box.closest("figure").querySelector("script").textContent);
  const panel = chart.panels[box.dataset.panel];
  drawn.set(box, draw(box, panel, chart.xs, chart.panels.length > 1 ? "" : panel.across));
};
const seen = new IntersectionObserver((entries) => {
  for (const {target, isIntersecting} of entries) if (isIntersecting && !drawn.has(target)) show(target);
}, {rootMargin: "400px"});
const sized = new ResizeObserver((entries) => {
  for (const {target} of entries) drawn.get(target)?.setSize({width: target.clientWidth, height: drawn.get(target).height});
});
for (const box of document.querySelectorAll("[data-panel]")) [seen, sized].forEach((each) => each.observe(box));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => [...drawn.keys()].forEach(show));

for (const table of document.querySelectorAll(".scroll table")) {
  const rows = [...table.tBodies[0].rows], heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const button = element(head, "button", {textContent: head.textContent, type: "button"});
    head.firstChild.remove();
    button.onclick = () => {
      const sign = head.ariaSort === "descending" ? 1 : -1;
      heads.forEach((each) => each.removeAttribute("aria-sort"));
      head.ariaSort = sign > 0 ? "ascending" : "descending";
      const key = ({cells: {[column]: cell}}) => cell.dataset.value ?? (/^-?$/.test(cell.textContent) ? null : cell.textContent);
      const compare = (a, b) => (a == null || b == null ? (a == null) - (b == null)
        : sign * (isNaN(a) || isNaN(b) ? a.localeCompare(b, "en", {numeric: true}) : a - b));
      table.tBodies[0].append(...rows.sort((a, b) => compare(key(a), key(b))));
    };
  });
  if (rows.length < 6) continue;
  const search = element(document.createElement("p"), "input", {type: "search", placeholder: "filter", ariaLabel: "filter"});
  const count = element(search.parentNode, "span", {className: "faint"});
  table.parentNode.before(search.parentNode);
  search.oninput = () => {
    const words = search.value.toLowerCase().split(/\s+/), text = (row) => row.textContent.toLowerCase();
    for (const row of rows) {
      row.hidden = !words.every((word) => text(row).includes(word));
      const section = document.querySelector(row.querySelector("a[href^='#']")?.getAttribute("href") ?? "none");
      if (section) section.hidden = row.hidden;
    }
    count.textContent = search.value && ` ${rows.filter((row) => !row.hidden).length} of ${rows.length}`;
  };
}

// A page that is loaded again, because it has changed, has the same sections open and the same filters.
const parts = [...document.querySelectorAll("details, input")], place = location.pathname;
JSON.parse(sessionStorage[place] ?? "[]").forEach((state, i) => {
  if (parts[i]?.oninput) parts[i].oninput(parts[i].value = state);
  else if (parts[i]) parts[i].open = state;
});
addEventListener("pagehide", () => (sessionStorage[place] = JSON.stringify(parts.map((each) => each.open ?? each.value))));
