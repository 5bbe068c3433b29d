"use strict";
const dark = matchMedia("(prefers-color-scheme: dark)"), ink = dark.matches ? "#ffffff" : "#000000";
const numbers = (notation) => new Intl.NumberFormat("en", {notation, maximumSignificantDigits: 5});
const powers = numbers("scientific");  // for numbers that are too long without
const shown = (plain) => (value) => (value && !(1e-4 <= Math.abs(value) && Math.abs(value) < 1e15) ? powers : plain).format(value);
const exact = shown(numbers("standard")), short = shown(numbers("compact"));
// The ends of an axis, so far apart that the steps between its marks are no rounding errors: those would never end.
const apart = (low, high) => {
  const least = Math.max(Math.abs(low), Math.abs(high)) * 1e-10;
  return high - low < least ? [low - least, high + least] : [low, high];
};

function draw(box) {
  const {xs, panels} = JSON.parse(box.closest("figure").querySelector("script").textContent);
  const panel = panels[box.dataset.panel], large = panels.length < 3, series = [{}], tables = [], bands = [];
  for (const {name, color, x, y, band, dots, dash} of panel.lines) {
    const stroke = color === "#000000" ? ink : color, at = series.length;
    const points = {show: dots || y.length === 1, size: 6, fill: stroke};
    series.push({label: name, stroke, width: dots ? 0 : band ? 2 : 1, dash: dash && [6, 4], points});
    tables.push([xs[x], y]);
    if (!band) continue;
    // Two halves, because uPlot hides a band with each of its edges: one of them is the line.
    bands.push(...[[at, at + 1], [at + 2, at]].map((edges) => ({series: edges, fill: stroke + "28"})));
    for (const end of band) {
      series.push({class: "end", points: {show: false}});
      tables.push([xs[x], end]);
    }
  }
  const range = (_, low, high) => {
    if (low === null) return [0, 1];  // all curves are hidden
    const [from, to] = uPlot.rangeNum(low, high, 0.1, true), [lowest, highest] = panel.widest;
    return apart(Math.max(from, lowest), Math.min(to, highest));
  };
  let near = null;  // the series that is nearest to the mouse
  return new uPlot({
    width: box.clientWidth,
    height: large ? 340 : 150,
    title: panel.title || " ",  // without one there is no place for the values
    series,
    bands,
    legend: {show: large, live: false},
    focus: {alpha: 0.3},
    cursor: {focus: {prox: 1e6, dist: (u, i, _, at, y) => (series[i].class ? Infinity : at - y)}, points: {size: 7, one: true}},
    scales: {x: {time: false, range: (_, low, high) => (low === null ? [low, high] : apart(low, high))}, y: {range}},
    // The second axis is as wide as its longest mark.
    axes: [{label: large ? panel.across : undefined}, {size: (_, marks) => Math.max(50, ...(marks ?? []).map((mark) => 15 + 7 * mark.length))}].map((own) => ({
      ...own, stroke: ink, grid: {stroke: "#80808040"}, ticks: {show: false}, values: (_, ticks) => ticks.map(short),
    })),
    hooks: {
      setSeries: [(_, i, {focus}) => { if (focus) near = i; }],
      setCursor: [(u) => {
        const {label} = u.series[near] ?? {}, at = u.cursor.idxs[near];
        u.root.querySelector(".u-title").textContent =
          at == null ? panel.title : `${label}: ${exact(u.data[near][at])} at ${exact(u.data[0][at])}`;
      }],
    },
  }, uPlot.join(tables), box);
}

const plots = new Map();  // by their boxes
const seen = new IntersectionObserver((entries) => {
  for (const {target, isIntersecting} of entries) if (isIntersecting && !plots.has(target)) plots.set(target, draw(target));
}, {rootMargin: "400px"});
for (const box of document.querySelectorAll("[data-panel]")) seen.observe(box);
addEventListener("resize", () => plots.forEach((plot, box) => plot.setSize({width: box.clientWidth, height: plot.height})));
dark.addEventListener("change", () => location.reload());

for (const table of document.querySelectorAll(".scroll table")) {
  const rows = [...table.tBodies[0].rows], heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    head.firstChild.onclick = () => {
      const sign = head.ariaSort === "descending" ? 1 : -1;
      heads.forEach((each) => each.removeAttribute("aria-sort"));
      head.ariaSort = sign > 0 ? "ascending" : "descending";
      const key = ({cells: {[column]: cell}}) => cell.dataset.value ?? cell.textContent.replace(/^-$/, "");
      const compare = (a, b) => (isNaN(a) || isNaN(b) ? a.localeCompare(b, "en", {numeric: true}) : a - b);
      const missingLast = (a, b) => (a === "") - (b === "") || sign * compare(a, b);
      table.tBodies[0].append(...rows.sort((a, b) => missingLast(key(a), key(b))));
    };
  });
  const filter = table.parentNode.previousElementSibling;
  filter.hidden = rows.length < 6;
  filter.oninput = () => {
    const words = filter.value.toLowerCase().split(/\s+/);
    for (const row of rows) row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
  };
}

// `make report watch=true` serves the page on this machine, where it is loaded again when it has changed.
if (["127.0.0.1", "localhost"].includes(location.hostname)) {
  setInterval(() => fetch(location, {method: "HEAD", cache: "no-store"}).then(({headers}) => {
    if (new Date(headers.get("Last-Modified")) > new Date(document.lastModified)) location.reload();
  }, () => {}), 1000);
}

// A page that is loaded again has the same sections open and the same filters.
const parts = [...document.querySelectorAll("details, input")], place = location.pathname;
JSON.parse(sessionStorage[place] ?? "[]").forEach((state, i) => {
  if (parts[i]?.oninput) parts[i].oninput(parts[i].value = state);
  else if (parts[i]) parts[i].open = state;
});
addEventListener("pagehide", () => (sessionStorage[place] = JSON.stringify(parts.map((each) => each.open ?? each.value))));
