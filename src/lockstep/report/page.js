"use strict";
const parse = (path, top) => {
  const width = path.ownerSVGElement.viewBox.baseVal.width;
  const places = [...path.getAttribute("d").matchAll(/[ML]([\d.]+) ([\d.]+)/g)];
  let step = 0;
  return path.dataset.points.split(",").map((point, index) => {
    const space = point.indexOf(" "), [, x, y] = places[index];
    step += +point.slice(0, space);
    return {step, text: point.slice(space + 1), x: 100 * x / width + "%", y: +top + +y};
  });
};
const nearest = (points, step) => {
  let low = 0, high = points.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (points[middle].step < step) low = middle + 1; else high = middle;
  }
  return low && step - points[low - 1].step < points[low].step - step ? points[low - 1] : points[low];
};
const make = (svg, tag, name) => {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  made.setAttribute("class", name);
  return svg.appendChild(made);
};
const charts = [...document.querySelectorAll("figure.curve")].map(figure => {
  const svg = figure.querySelector("svg.chart"), at = figure.querySelector(".at");
  const {first, last, top, plot} = svg.dataset;
  const values = [...figure.querySelectorAll(".reading b")], before = values.map(value => value.textContent);
  svg.setAttribute("tabindex", 0);
  svg.setAttribute("role", "slider");
  for (const [name, value] of [["min", first], ["max", last], ["now", last]]) svg.setAttribute("aria-value" + name, value);
  const names = [...figure.querySelectorAll(".reading .name")].map(name => name.textContent + " ");
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
        series = paths.map(path => parse(path, top));
        hair = make(svg, "line", "hair");
        dots = paths.map(path => make(svg, "circle", "dot " + path.classList[1]));
      }
      const main = nearest(series[0], step);
      at.textContent = "step " + main.step.toLocaleString("en");
      for (const [name, value] of [["x1", main.x], ["x2", main.x], ["y1", top], ["y2", +top + +plot]])
        hair.setAttribute(name, value);
      series.forEach((points, number) => {
        const point = nearest(points, step);
        values[number].textContent = point.text;
        for (const [name, value] of [["cx", point.x], ["cy", point.y], ["r", 4]])
          dots[number].setAttribute(name, value);
      });
      const read = values.map((value, number) => (names[number] || "") + value.textContent);
      svg.setAttribute("aria-valuenow", main.step);
      svg.setAttribute("aria-valuetext", at.textContent + ": " + read.join(", "));
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
  const {first, last} = chart.svg.dataset;
  let place = +last;
  chart.svg.addEventListener("keydown", event => {
    const move = {ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1, PageDown: -10, PageUp: 10, Home: -1e9, End: 1e9}[event.key];
    if (!move || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    place = Math.min(+last, Math.max(+first, place + move * Math.max(1, (last - first) / 100)));
    for (const other of charts) other.show(place);
  });
  chart.svg.addEventListener("blur", () => { for (const other of charts) other.rest(); });
}
