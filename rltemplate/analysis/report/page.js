const draw = (chart) => {
  if (chart.dataset.drawn) return;
  chart.dataset.drawn = "true";
  const { data, layout } = JSON.parse(chart.nextElementSibling.textContent);
  const saved = { format: "svg", filename: chart.id };
  Plotly.newPlot(chart, data, layout, { responsive: true, displaylogo: false, toImageButtonOptions: saved });
};
const charts = [...document.querySelectorAll(".chart")];
const watcher = new IntersectionObserver(
  (seen) => seen.filter((one) => one.isIntersecting).forEach((one) => draw(one.target)), { rootMargin: "500px" });
charts.forEach((chart) => watcher.observe(chart));
addEventListener("beforeprint", () => charts.filter((chart) => chart.offsetParent).forEach(draw));
document.querySelectorAll("th button").forEach((button) => button.addEventListener("click", () => {
  const head = button.closest("th"), body = head.closest("table").tBodies[0];
  const text = (row) => row.cells[head.cellIndex].textContent.replaceAll(",", "").trim();
  const sign = head.ariaSort === "ascending" ? -1 : 1;
  head.parentElement.querySelectorAll("th").forEach((other) => { other.ariaSort = "none"; });
  head.ariaSort = sign === 1 ? "ascending" : "descending";
  body.append(...[...body.rows].sort((a, b) => sign * text(a).localeCompare(text(b), "en", { numeric: true })));
}));
