"use strict";
(() => {
  const root = document.documentElement;
  const byId = (id) => document.getElementById(id);
  // Okabe and Ito's colours, in an order that is legible on each ground.
  const COLORS = {
    light: ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000"],
    dark: ["#56b4e9", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#f0e442", "#ffffff"],
  };
  const DASHES = ["solid", "dash", "dot", "dashdot", "longdash", "longdashdot"];
  const MARKERS = ["circle", "square", "diamond", "triangle-up", "triangle-down"];
  const FEW_POINTS = 30, MOST_DRAWN = 48;
  const touch = matchMedia("(pointer: coarse)").matches;

  // --- What was packed: base64 of gzip -----------------------------------------------------------------
  async function unpacked(text) {
    const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Response(stream).text();
  }
  let library = null;
  function plotly() {
    library ??= unpacked(byId("plotly").textContent).then((text) => {
      const script = document.createElement("script");
      script.textContent = text; // allowed by its hash in the policy of the page
      document.head.append(script);
      byId("plotly").remove();
      if (!window.Plotly) throw new Error("plotly.js was not let in");
      return window.Plotly;
    });
    return library;
  }
  const groups = new Map();
  function chartsOf(id) {
    if (!groups.has(id)) {
      const holder = document.querySelector(`.data[data-id="${CSS.escape(id)}"]`);
      groups.set(id, unpacked(holder.textContent).then(JSON.parse));
    }
    return groups.get(id);
  }

  // --- Colours of the page -----------------------------------------------------------------------------
  const wishes = ["system", "light", "dark"];
  const system = matchMedia("(prefers-color-scheme: dark)");
  let wish = "system";
  try { wish = localStorage.getItem("report-colours") ?? "system"; } catch { /* no storage for files */ }
  if (!wishes.includes(wish)) wish = "system";
  const theme = () => (wish === "system" ? (system.matches ? "dark" : "light") : wish);
  function applyTheme() {
    root.dataset.theme = theme();
    root.style.colorScheme = theme();
    byId("theme").textContent = `colours: ${wish}`;
    byId("theme").setAttribute("aria-label", `colours: ${wish}; press for the next of ${wishes.join(", ")}`);
    for (const place of drawn) draw(place);
  }

  // --- Charts ------------------------------------------------------------------------------------------
  // plotly reads a little HTML in texts; names from run folders are only names.
  const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const cumulated = (steps) => { let at = 0; return steps.map((step) => (at += step)); };
  const faded = (color, part) => color + Math.round(part * 255).toString(16).padStart(2, "0");
  const styled = (list, style) => list[style % list.length];
  const ink = (name) => ({
    light: { text: "#1c2024", faint: "#5c6570", grid: "#e3e7ec" },
    dark: { text: "#e6e9ed", faint: "#a3adb8", grid: "#2a313a" },
  })[name];

  function apart(values, gap, height) {
    // Pixels from the top, no two closer than gap, those of a stack around their mean, and none off the chart.
    const stacks = [];
    const top = (stack) => {
      const size = gap * (stack.length - 1);
      const wanted = stack.reduce((sum, one) => sum + one[0], 0) / stack.length - size / 2;
      return Math.max(0, Math.min(wanted, height - size));
    };
    for (const one of values.map((value, i) => [value, i]).sort((a, b) => a[0] - b[0])) {
      stacks.push([one]);
      while (stacks.length > 1) {
        const [a, b] = stacks.slice(-2);
        if (top(b) - top(a) - gap * (a.length - 1) >= gap) break;
        stacks.splice(-2, 2, [...a, ...b]);
      }
    }
    const places = [];
    for (const stack of stacks) stack.forEach((one, nr) => { places[one[1]] = top(stack) + nr * gap; });
    return places;
  }

  function spanOf(chart, log) {
    let low = Infinity, high = -Infinity;
    const take = (value) => { if (value < low) low = value; if (value > high) high = value; };
    for (const line of chart.l) for (const list of [line.v, line.a, line.b]) list.forEach(take);
    if (!log) for (const [value] of chart.r) take(value);
    if (log) return [Math.log10(low) - 0.05, Math.log10(high) + 0.05];
    const pad = (high - low || Math.abs(high) || 1) * 0.06;
    return [low - pad, high + pad];
  }

  function linesFigure(chart, colors, shade, size, log) {
    const data = [], annotations = [], shapes = [], ends = [];
    const few = size.width < 480;
    const [low, high] = spanOf(chart, log);
    // Names below the chart, unless they would take its place; then pointing at a line tells its name.
    const letters = Math.max(...chart.l.map((line) => line.n.length));
    const rows = Math.ceil(chart.l.length / Math.max(1, Math.floor((size.width - 60) / (letters * 6.2 + 46))));
    const named = chart.l.length > 1 && size.height > 250 && rows <= (few ? 3 : 4);
    const margin = { l: 54, r: 10, t: 10, b: named ? 50 + 18 * rows : 40 };
    for (const line of chart.l) {
      const color = styled(colors, line.s), x = cumulated(line.d);
      if (line.a.length) {
        const band = { x, type: "scatter", mode: "lines", line: { width: 0, color }, hoverinfo: "skip", showlegend: false };
        data.push({ ...band, y: line.a }, { ...band, y: line.b, fill: "tonexty", fillcolor: faded(color, 0.2) });
      }
      const marks = line.m && x.length <= FEW_POINTS;
      data.push({
        x, y: line.v, type: "scatter", mode: marks || x.length === 1 ? "lines+markers" : "lines",
        name: plain(line.n), showlegend: named, legendrank: line.m ? 1 : 2, opacity: line.m ? 1 : 0.7,
        line: { color, width: line.m ? 2.6 : 1.2, dash: styled(DASHES, line.s) },
        marker: { color, symbol: styled(MARKERS, line.s), size: 6 },
        hovertemplate: `${chart.x === "environment steps" ? "%{x:,} steps" : "%{x:.5~g}"}: %{y:.5~g}<extra>${plain(line.n)}</extra>`,
      });
      if (line.e) ends.push([line.v[line.v.length - 1], line.e, color]);
    }
    for (const [value, text] of log ? [] : chart.r) {
      shapes.push({ type: "line", xref: "paper", x0: 0, x1: 1, y0: value, y1: value, layer: "below",
        line: { color: shade.faint, width: 1.2, dash: "dot" } });
      ends.push([value, text, shade.faint]);
    }
    const floor = chart.r.find((one) => one[1].startsWith("published, lowest"));
    const top = chart.r.find((one) => one[1].startsWith("published, highest"));
    if (floor && top && !log) {
      shapes.push({ type: "rect", xref: "paper", x0: 0, x1: 1, y0: floor[0], y1: top[0], layer: "below",
        line: { width: 0 }, fillcolor: faded(shade.faint, 0.13) });
    }
    const font = few ? 10 : 11;
    margin.r = 14 + Math.min(few ? 92 : 180, Math.max(0, ...ends.map((end) => end[1].length)) * font * 0.6);
    const height = size.height - margin.t - margin.b;
    const pixel = (value) => (high - (log ? Math.log10(value) : value)) / (high - low) * height;
    const places = apart(ends.map((end) => pixel(end[0])), font + 3, height);
    ends.forEach(([, text, color], i) => annotations.push({
      xref: "paper", x: 1, xanchor: "left", xshift: 5, yref: "paper", y: 1 - places[i] / height, yanchor: "middle",
      text: plain(text), showarrow: false, font: { size: font, color }, align: "left",
    }));
    const axis = { gridcolor: shade.grid, zerolinecolor: shade.grid, linecolor: shade.faint, color: shade.text };
    return { data, layout: { margin, annotations, shapes,
      xaxis: { ...axis, title: { text: plain(chart.x), standoff: 6 }, tickformat: ".3~s", nticks: few ? 5 : 8, automargin: false },
      yaxis: { ...axis, range: [low, high], type: log ? "log" : "linear", title: { text: size.height > 250 ? plain(chart.y) : "", standoff: 4 }, nticks: 6, automargin: "left" },
      legend: { orientation: "h", traceorder: "normal", y: -46 / height, yanchor: "top", x: 0, font: { size: 11 } },
    } };
  }

  function dotsFigure(chart, colors, shade, size) {
    const rows = [...chart.p.map((dot) => dot[0]), ...(chart.i ? [chart.i[0]] : [])];
    const shapes = [];
    const data = [{
      type: "scatter", mode: "markers", x: chart.p.map((dot) => dot[1]), y: chart.p.map((_, i) => i), showlegend: false,
      marker: { size: 10, color: chart.p.map((dot) => styled(colors, dot[2])), symbol: chart.p.map((dot) => styled(MARKERS, dot[2])) },
      text: chart.p.map((dot) => plain(dot[0])), hovertemplate: "%{text}: %{x:.6~g}<extra></extra>",
    }];
    if (chart.i) {
      const [name, value, low, high] = chart.i;
      data.push({ type: "scatter", mode: "markers", x: [value], y: [rows.length - 1], showlegend: false,
        marker: { size: 14, symbol: "line-ns", line: { width: 3, color: shade.text } },
        error_x: { type: "data", symmetric: false, array: [high - value], arrayminus: [value - low], color: shade.text, thickness: 2, width: 6 },
        hovertemplate: `${plain(name)}: %{x:.6~g}<extra></extra>` });
    }
    for (const [value] of chart.r) {
      shapes.push({ type: "line", yref: "paper", y0: 0, y1: 1, x0: value, x1: value, layer: "below", line: { color: shade.faint, width: 1.2, dash: "dot" } });
    }
    const axis = { gridcolor: shade.grid, zerolinecolor: shade.grid, color: shade.text };
    return { data, layout: { margin: { l: 64, r: 18, t: 10, b: 40 }, shapes,
      xaxis: { ...axis, title: { text: plain(chart.y), standoff: 6 }, nticks: 5 },
      yaxis: { ...axis, tickvals: rows.map((_, i) => i), ticktext: rows.map(plain), range: [rows.length - 0.4, -0.6], showgrid: false, zeroline: false, automargin: true },
    } };
  }

  function figureOf(chart, name, size, log) {
    const shade = ink(name), colors = COLORS[name];
    const figure = chart.p.length ? dotsFigure(chart, colors, shade, size) : linesFigure(chart, colors, shade, size, log);
    Object.assign(figure.layout, {
      width: size.width, height: size.height, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: "system-ui, sans-serif", size: size.width < 480 ? 11 : 12, color: shade.text },
      dragmode: touch ? false : "zoom", hovermode: "closest",
      hoverlabel: { font: { family: "system-ui, sans-serif", size: 12 } },
    });
    return figure;
  }

  const specs = new Map(); // of the places that are or were drawn
  const drawn = new Set();
  const isLog = (place) => place.dataset.log === "true";
  function draw(place, size, name) {
    const chart = specs.get(place);
    const box = size ?? { width: place.clientWidth, height: place.clientHeight };
    if (!box.width) return;
    const { data, layout } = figureOf(chart, name ?? theme(), box, isLog(place));
    place.querySelector(".waiting")?.remove();
    window.Plotly.react(place, data, layout, {
      displaylogo: false, displayModeBar: false, // the buttons below a chart can be reached by keyboard
    });
    drawn.add(place);
  }
  async function prepared(place) {
    await plotly();
    const charts = await chartsOf(place.dataset.group);
    specs.set(place, charts[Number(place.dataset.nr)]);
  }
  function forget(place) {
    drawn.delete(place);
    window.Plotly.purge(place);
    place.replaceChildren();
  }

  // Only what is near the screen is drawn, one chart at a time, and of many those that are far away go again.
  const visible = new Set(), waiting = [];
  let busy = false;
  async function work() {
    if (busy) return;
    busy = true;
    while (waiting.length) {
      const place = waiting.shift();
      if (!visible.has(place) || drawn.has(place)) continue;
      try {
        await prepared(place);
        draw(place);
      } catch (error) {
        console.error(error);
        place.replaceChildren(Object.assign(document.createElement("p"), {
          className: "waiting", textContent: `${place.getAttribute("aria-label")} (This browser cannot draw it: ${error.message})` }));
      }
      for (const other of drawn) {
        if (drawn.size <= MOST_DRAWN) break;
        if (!visible.has(other)) forget(other);
      }
      await new Promise((done) => setTimeout(done));
    }
    busy = false;
  }
  const watcher = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      if (isIntersecting) { visible.add(target); waiting.push(target); } else visible.delete(target);
    }
    work();
  }, { rootMargin: "400px 0px" });
  const places = [...document.querySelectorAll(".chart")];
  places.forEach((place) => watcher.observe(place));

  let resized = 0;
  const width = () => root.clientWidth;
  let lastWidth = width();
  addEventListener("resize", () => {
    clearTimeout(resized);
    resized = setTimeout(() => {
      if (width() === lastWidth) return; // a phone's address bar came or went
      lastWidth = width();
      for (const place of drawn) draw(place);
    }, 150);
  });

  // --- Print: every chart that is not folded away, on white, as wide as the paper --------------------------
  const paper = (place) => place.parentElement.className === "little" ? { width: 330, height: 190 } : { width: 680, height: 330 };
  const toPrint = () => places.filter((place) => !place.closest("details:not([open])"));
  function beforePrint() {
    for (const place of toPrint()) if (specs.has(place)) draw(place, paper(place), "light");
  }
  function afterPrint() {
    for (const place of [...drawn]) if (visible.has(place)) draw(place); else forget(place);
  }
  addEventListener("beforeprint", beforePrint);
  addEventListener("afterprint", afterPrint);
  // What a print from the browser's menu needs must be unpacked before, for it cannot wait.
  const whenIdle = window.requestIdleCallback ?? ((work) => setTimeout(work, 1500));
  async function prepareAll() {
    for (const place of places) {
      if (!specs.has(place)) {
        try { await prepared(place); } catch { return; }
        await new Promise((done) => whenIdle(done));
      }
    }
    root.dataset.prepared = "true";
  }
  addEventListener("load", () => whenIdle(prepareAll));
  byId("print").addEventListener("click", async () => {
    for (const place of toPrint()) await prepared(place);
    print();
  });

  // --- Buttons below a chart -----------------------------------------------------------------------------
  function offer(url, name) {
    const link = Object.assign(document.createElement("a"), { href: url, download: name });
    document.body.append(link);
    link.click();
    link.remove();
  }
  async function save(place, format) {
    await prepared(place);
    const chart = specs.get(place), size = { width: 800, height: 480 };
    const figure = figureOf(chart, "light", size, isLog(place));
    Object.assign(figure.layout, { paper_bgcolor: "#ffffff", title: { text: plain(chart.t), font: { size: 14 }, x: 0.02 } });
    figure.layout.margin.t = 44;
    const url = await window.Plotly.toImage(figure, { format, ...size, scale: format === "png" ? 3 : 1 });
    offer(url, `${chart.k}.${format}`);
  }
  document.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    const place = button.closest("figure")?.querySelector(".chart");
    if (button.dataset.save) save(place, button.dataset.save);
    if ("log" in button.dataset && specs.has(place)) {
      const lowest = Math.min(...specs.get(place).l.flatMap((line) => [...line.v, ...line.a]));
      if (lowest <= 0) { button.disabled = true; button.title = "not all values are above zero"; return; }
      place.dataset.log = String(!isLog(place));
      button.setAttribute("aria-pressed", place.dataset.log);
      draw(place);
    }
    if (button.dataset.copy) copy(button);
    if (button.dataset.sort) sort(button);
  });
  byId("theme").addEventListener("click", () => {
    wish = wishes[(wishes.indexOf(wish) + 1) % wishes.length];
    try { localStorage.setItem("report-colours", wish); } catch { /* stays for this page alone */ }
    applyTheme();
  });
  system.addEventListener("change", applyTheme);

  async function copy(button) {
    const text = button.textContent;
    try {
      await navigator.clipboard.writeText(button.dataset.copy);
      button.textContent = "copied";
    } catch { // not everywhere allowed for files: then it is there to be selected
      button.textContent = button.dataset.copy;
      return;
    }
    setTimeout(() => { button.textContent = text; }, 1500);
  }

  // --- Tables --------------------------------------------------------------------------------------------
  function sort(button) {
    const head = button.closest("th"), body = head.closest("table").tBodies[0];
    const column = head.cellIndex, numbers = button.dataset.sort === "number";
    const ascending = head.getAttribute("aria-sort") !== "ascending";
    const key = (row) => row.cells[column].dataset.v ?? row.cells[column].textContent.trim();
    const missing = (value) => value === "" || (numbers && Number.isNaN(Number(value)));
    const rows = [...body.rows].map((row) => [key(row), row]);
    rows.sort(([a], [b]) => {
      if (missing(a) || missing(b)) return missing(a) - missing(b); // what has no value comes last either way
      const order = numbers ? a - b : a.localeCompare(b, "en", { numeric: true });
      return ascending ? order : -order;
    });
    head.parentElement.querySelectorAll("th[aria-sort]").forEach((other) => other.setAttribute("aria-sort", "none"));
    head.setAttribute("aria-sort", ascending ? "ascending" : "descending");
    body.append(...rows.map(([, row]) => row));
  }
  byId("filter").addEventListener("input", (event) => {
    const wanted = event.target.value.trim().toLowerCase();
    const rows = [...byId("table-runs").tBodies[0].rows];
    for (const row of rows) row.hidden = !row.textContent.toLowerCase().includes(wanted);
    byId("found").textContent = wanted ? `${rows.filter((row) => !row.hidden).length} of ${rows.length}` : "";
  });

  // --- Films: made from their text when they come near the screen -------------------------------------------
  const filmWatcher = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      if (!isIntersecting) continue;
      filmWatcher.unobserve(target);
      const holder = target.nextElementSibling;
      const bytes = Uint8Array.from(atob(holder.textContent), (letter) => letter.charCodeAt(0));
      holder.remove();
      target.src = URL.createObjectURL(new Blob([bytes], { type: "video/mp4" }));
    }
  }, { rootMargin: "400px 0px" });
  document.querySelectorAll("video").forEach((film) => filmWatcher.observe(film));

  // A link to something inside a folded part opens it.
  function unfold() {
    const target = location.hash.length > 1 && byId(decodeURIComponent(location.hash.slice(1)));
    if (!target) return;
    for (let part = target.closest("details"); part; part = part.parentElement.closest("details")) part.open = true;
    target.scrollIntoView();
  }
  addEventListener("hashchange", unfold);
  applyTheme();
  unfold();
})();
