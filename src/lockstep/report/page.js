"use strict";
const format = (value, unit) => {
  if (unit === "percent") return (100 * value).toFixed(2) + " %";
  const size = Math.abs(value);
  if (unit === "rate") {
    const magnitudes = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];
    const [scale, letter] = magnitudes.find(([limit]) => size >= .9995 * limit) || [1, ""];
    const number = value / scale;
    return number.toFixed(Math.abs(number) >= 99.95 ? 0 : Math.abs(number) >= 9.995 ? 1 : 2) + letter;
  }
  if (size && (size < 1e-3 || size >= 1e5)) return value.toExponential(2).replace(/([+-])(\d)$/, "$10$2");
  return String(Number(value.toPrecision(4)));
};
const parse = path => {
  let step = 0;
  return path.dataset.points.split(",").map(pair => {
    const [since, value] = pair.split(" ").map(Number);
    return [step += since, value];
  });
};
const nearest = (points, step) => {
  let low = 0, high = points.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (points[middle][0] < step) low = middle + 1; else high = middle;
  }
  return low && step - points[low - 1][0] < points[low][0] - step ? points[low - 1] : points[low];
};
const make = (svg, tag, name) => {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  made.setAttribute("class", name);
  return svg.appendChild(made);
};
const charts = [...document.querySelectorAll("figure.curve")].map(figure => {
  const svg = figure.querySelector("svg.chart"), at = figure.querySelector(".at");
  const {first, last, low, high, logarithmic, top, plot, unit} = svg.dataset;
  const across = step => 100 * (step - first) / Math.max(1, last - first) + "%";
  const share = logarithmic === undefined
    ? value => (value - low) / (high - low) : value => Math.log(value / low) / Math.log(high / low);
  const down = value => +top + (1 - Math.min(1, Math.max(0, share(value)))) * plot;
  const values = [...figure.querySelectorAll(".reading b")], before = values.map(value => value.textContent);
  const paths = [...svg.querySelectorAll("[data-points]")].reverse(), lastStep = at.textContent;
  let series, hair, dots;
  return {
    svg,
    step: event => {
      const box = svg.getBoundingClientRect();
      return +first + (event.clientX - box.left) / box.width * (last - first);
    },
    show: step => {
      if (!series) {
        series = paths.map(parse);
        hair = make(svg, "line", "hair");
        dots = paths.map(path => make(svg, "circle", "dot " + path.classList[1]));
      }
      const main = nearest(series[0], step);
      at.textContent = "step " + main[0].toLocaleString("en");
      for (const [name, value] of [["x1", across(main[0])], ["x2", across(main[0])], ["y1", top], ["y2", +top + +plot]])
        hair.setAttribute(name, value);
      series.forEach((points, number) => {
        const [where, value] = nearest(points, step);
        values[number].textContent = format(value, unit);
        for (const [name, place] of [["cx", across(where)], ["cy", down(value)], ["r", 4]])
          dots[number].setAttribute(name, place);
      });
    },
    rest: () => {
      if (!series) return;
      at.textContent = lastStep;
      values.forEach((value, number) => { value.textContent = before[number]; });
      hair.setAttribute("y2", top);
      dots.forEach(dot => dot.setAttribute("r", 0));
    },
  };
});
for (const chart of charts) {
  chart.svg.addEventListener("pointermove", event => {
    const step = chart.step(event);
    for (const other of charts) other.show(step);
  });
  chart.svg.addEventListener("pointerleave", () => { for (const other of charts) other.rest(); });
}
