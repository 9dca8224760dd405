"""The paper that a report is printed on: one HTML file that needs nothing else, today or in ten years.

No font, script or picture is fetched: a content security policy forbids it, and lets run only the script below, by its
hash. The page is complete without it; it says what is under the pointer.
"""

from __future__ import annotations

import base64
import hashlib

from lockstep.report.charts import Chart, colour, draw
from lockstep.report.markup import Markup, element, escaped, joined
from lockstep.report.scales import said
from lockstep.report.series import Series, window


def document(title: str, body: Markup) -> str:
    """The whole file."""
    allowed = base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{allowed}'"
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escaped(title)}</title>
<style>{_STYLE}</style>
</head>
<body>
{body}
<script>{_SCRIPT}</script>
</body>
</html>
"""


def section(title: str, *children: str) -> Markup:
    return element("section", element("h2", title), *children)


def figure(chart: Chart) -> Markup:
    """A chart with what it shows, above, and how to read it, below."""
    return element(
        "figure",
        element("figcaption", element("h3", chart.title), element("p", chart.finding, class_="finding")),
        _reading(chart),
        element("div", draw(chart), class_="plot"),
        _note(chart),
        class_="curve large" if chart.is_large else "curve",
    )


def _reading(chart: Chart) -> Markup:
    """The legend, with the last values; the script puts others in their place."""
    alone = len(chart.series) == 1
    entries = [
        element("span", Markup() if alone else _swatch(one), element("b", said(one.last()[1], chart.unit)))
        for one in chart.series
    ]
    step = max(one.last()[0] for one in chart.series)
    return element("p", element("span", f"step {step:,}", class_="at"), *entries, class_="reading")


def _swatch(series: Series) -> Markup:
    return joined([element("i", class_=colour(series)), f"{series.name} "])


def _note(chart: Chart) -> Markup:
    notes = []
    if chart.scale.is_logarithmic:
        notes.append("Logarithmic scale.")
    for series in chart.series:
        if series.is_smoothed:
            notes.append(f"Thin: as logged. Thick: running median of {window(series):,} values.")
        missing = len(series.values) - len(series.known)
        if missing:
            verb = "value is" if missing == 1 else "values are"
            notes.append(f"{missing:,} {verb} not finite: a gap, shaded.")
    return element("p", " ".join(notes), class_="note")


def key(entries: list[tuple[str, str]]) -> Markup:
    """What the marks mean: (kind, words)."""
    return element("p", *(element("span", _SIGNS[kind], words) for kind, words in entries), class_="key")


_SIGNS = {
    kind: element("svg", element(tag, class_=kind, **shape), width=12, height=12)
    for kind, tag, shape in (
        ("head", "path", {"d": "M1.5 2h9l-4.5 7z"}),
        ("save", "line", {"x1": 6, "x2": 6, "y1": 4, "y2": 9}),
        ("failed", "line", {"x1": 6, "x2": 6, "y1": 3, "y2": 11}),
        ("discarded", "line", {"x1": 6, "x2": 6, "y1": 2, "y2": 10}),
        ("gap", "path", {"d": "M3 0h6v12h-6z"}),
    )
}


def big_figures(entries: list[tuple[str, str, str]]) -> Markup:
    """(what, value, more about it)"""
    if not entries:
        return Markup()
    return element(
        "div",
        *(
            element("div", element("h3", what), element("p", value), element("p", more, class_="more"))
            for what, value, more in entries
        ),
        class_="figures",
    )


def facts(entries: list[tuple[str, str]], class_: str = "facts") -> Markup:
    """Terms and what they are."""
    return element(
        "dl", *(element("div", element("dt", term), element("dd", value)) for term, value in entries), class_=class_
    )


def table(head: list[str], rows: list[list[str]]) -> Markup:
    """The first column is text, the others are numbers."""
    return element(
        "div",
        element(
            "table",
            element("thead", element("tr", *(element("th", words, scope="col") for words in head))),
            element("tbody", *(element("tr", *(element("td", words) for words in row)) for row in rows)),
        ),
        class_="table",
    )


def yaml(text: str) -> Markup:
    """Columns of it, with the keys apart from their values."""
    return element("pre", joined(map(_yaml_line, text.rstrip().splitlines()), "\n"), class_="yaml")


def _yaml_line(line: str) -> Markup:
    name, colon, value = line.partition(":")
    return joined([element("span", name + colon), value]) if colon else escaped(line)


_STYLE = """
:root { --paper: #fcfcfb; --ink: #0b0b0b; --text: #33322f; --soft: #6a6963; --grid: #e4e3df; --rule: #c9c8c2;
  --wash: #f4f3ef; --alarm: #b3261e; --shade: #b3261e2b;
  --c0: #12438c; --p0: #a9c8f0; --c1: #c2571a; --p1: #f0c7a9; --c2: #0b7a6f; --p2: #a4d8d1;
  --c3: #7a3e9d; --p3: #d8bfe8; --c4: #937000; --p4: #e3d49a; --c5: #a8285e; --p5: #efb8cf; }
@media (prefers-color-scheme: dark) { :root {
  --paper: #1a1a19; --ink: #ffffff; --text: #dddcd5; --soft: #a3a299; --grid: #383835; --rule: #55544f;
  --wash: #242422; --alarm: #f2867d; --shade: #f2867d40;
  --c0: #9dc5f8; --p0: #2f5582; --c1: #f2a66f; --p1: #6b4526; --c2: #5fcdbf; --p2: #1f544e;
  --c3: #c9a0e6; --p3: #523a63; --c4: #dfc35a; --p4: #564b20; --c5: #f08fb6; --p5: #642f47; } }
* { box-sizing: border-box }
html { -webkit-text-size-adjust: 100%; text-size-adjust: 100% }
body { margin: 0; background: var(--paper); color: var(--text);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
  font-variant-numeric: tabular-nums lining-nums }
main { max-width: 1080px; margin: 0 auto; padding: 40px clamp(16px, 4vw, 40px) 64px }
h1, h2, .standfirst { font-family: Charter, "Iowan Old Style", "Source Serif 4", "Palatino Linotype", Palatino,
  "Noto Serif", Georgia, "Liberation Serif", serif }
h1, h2, h3, p, dl, dd, figure, pre { margin: 0 }
h1, h2, h3, b { color: var(--ink) }
h1 { font-size: clamp(28px, 5vw, 42px); line-height: 1.12; font-weight: 700; letter-spacing: -.01em;
  overflow-wrap: anywhere }
h2 { font-size: 22px; line-height: 1.25; font-weight: 700; margin-bottom: 20px }
h3 { font-size: 15px; font-weight: 650 }
.kicker { border-top: 4px solid var(--ink); padding-top: 10px; margin-bottom: 18px; font-size: 13px;
  color: var(--soft) }
.standfirst { font-size: 19px; line-height: 1.4; margin-top: 10px; max-width: 44em; overflow-wrap: anywhere }
.byline { margin-top: 12px; font-size: 13px; color: var(--soft) }
.byline b { font-weight: 650 }
.flaws { margin-top: 24px; padding: 12px 18px; background: var(--wash); border-left: 3px solid var(--alarm);
  overflow-wrap: anywhere }
.flaws p + p { margin-top: 4px }
section { margin-top: 48px; border-top: 1px solid var(--ink); padding-top: 14px }
section > p { max-width: 46em }
section > p + p { margin-top: 8px }
.figures, .facts { display: grid; grid-template-columns: repeat(6, 1fr); gap: 18px 24px }
.figures { margin-top: 32px;
  border-top: 1px solid var(--rule); padding-top: 16px }
.figures h3 { font-size: 13px; font-weight: 400; color: var(--soft) }
.figures p { font-size: 26px; line-height: 1.2; color: var(--ink); letter-spacing: -.015em; white-space: nowrap }
.figures .more { font-size: 13px; line-height: 1.4; color: var(--soft); letter-spacing: 0; white-space: normal }
.facts { margin-top: 20px;
  border-top: 1px solid var(--grid); padding-top: 16px; font-size: 14px }
dt { font-size: 13px; color: var(--soft) }
dd { overflow-wrap: anywhere }
.rows > div { display: grid; grid-template-columns: minmax(8em, 1fr) 5fr; gap: 4px 20px; padding: 7px 0;
  border-top: 1px solid var(--grid); font-size: 14px }
.rows > div:first-child { border-top: 0; padding-top: 0 }
.rows dd { white-space: pre-wrap }
.curves { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 296px), 1fr)); gap: 0 32px }
.curve { display: grid; grid-row: span 4; grid-template-rows: subgrid; margin-bottom: 34px }
.curves > .key, .curve.large { grid-column: 1 / -1 }
.curves > .key { margin: -18px 0 34px }
.finding { font-size: 14px }
.reading { display: flex; flex-wrap: wrap; gap: 0 16px; margin-top: 4px; font-size: 13px; color: var(--soft) }
.reading b { font-weight: 650 }
.reading i { display: inline-block; width: 14px; height: 0; border-top: 3px solid currentColor; margin-right: 6px;
  vertical-align: middle; border-radius: 2px }
.plot { padding: 6px 8px 0 48px }
.note { padding-top: 6px; font-size: 12px; color: var(--soft) }
.key { display: flex; flex-wrap: wrap; gap: 2px 20px; font-size: 13px; color: var(--soft) }
.key svg { vertical-align: -1px; margin-right: 5px }
svg { display: block; overflow: visible }
.key svg { display: inline-block }
.chart { touch-action: pan-y }
.chart text { font-size: 12px; fill: var(--soft) }
.chart .value { text-anchor: end }
.chart .step { text-anchor: middle }
.grid { stroke: var(--grid) } .base { stroke: var(--soft) }
.line { fill: none; stroke: currentColor; stroke-width: 2; stroke-linejoin: round; stroke-linecap: round;
  vector-effect: non-scaling-stroke }
.thin { stroke-width: 1 } .again { stroke-dasharray: 6 4 } i.again { border-top-style: dashed }
.dot { fill: currentColor }
.gap { fill: var(--shade); stroke: var(--shade); stroke-width: 2; vector-effect: non-scaling-stroke }
.restart { stroke: var(--soft); stroke-dasharray: 2 3 } .head { fill: var(--text) }
.chart .label text { fill: var(--text) }
.save { stroke: var(--soft); stroke-width: 1.2 }
.failed, .discarded { stroke: var(--alarm); stroke-width: 1.6 }
.hair { stroke: var(--ink); stroke-width: 1; opacity: .45 }
.s0 { color: var(--c0) } .s1 { color: var(--c1) } .s2 { color: var(--c2) }
.s3 { color: var(--c3) } .s4 { color: var(--c4) } .s5 { color: var(--c5) }
.thin.s0 { color: var(--p0) } .thin.s1 { color: var(--p1) } .thin.s2 { color: var(--p2) }
.thin.s3 { color: var(--p3) } .thin.s4 { color: var(--p4) } .thin.s5 { color: var(--p5) }
.table { overflow-x: auto }
table { border-collapse: collapse; font-size: 14px; min-width: min(100%, 420px) }
th { font-size: 13px; font-weight: 400; color: var(--soft); border-bottom: 1px solid var(--rule) }
td { border-bottom: 1px solid var(--grid); color: var(--ink) }
th, td { text-align: right; padding: 6px 0 6px 28px; white-space: nowrap }
th:first-child, td:first-child { text-align: left; padding-left: 0 }
pre { font: 12.5px/1.55 ui-monospace, SFMono-Regular, Menlo, Consolas, "Liberation Mono", monospace;
  white-space: pre-wrap; overflow-wrap: anywhere; tab-size: 4 }
.yaml { columns: 300px; column-gap: 32px; column-rule: 1px solid var(--grid); color: var(--ink) }
.yaml span { color: var(--soft) }
.samples { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 440px), 1fr)); gap: 20px 32px;
  margin-bottom: 12px }
.sample figcaption { font-size: 13px; color: var(--soft); margin-bottom: 4px }
.sample pre { background: var(--wash); padding: 12px 16px; max-height: 24em; overflow-y: auto }
footer { margin-top: 48px; border-top: 1px solid var(--rule); padding-top: 12px; font-size: 13px; color: var(--soft);
  overflow-wrap: anywhere }
@media (max-width: 1000px) { .figures, .facts { grid-template-columns: repeat(3, 1fr) } }
@media (max-width: 600px) { main { padding-top: 20px } section { margin-top: 36px } .label { display: none }
  .figures, .facts { grid-template-columns: repeat(2, 1fr) }
  .rows > div { grid-template-columns: 1fr } }
@media print { section, figure { break-inside: avoid } .sample pre { max-height: none } }
"""

_SCRIPT = """
"use strict";
const say = (value, unit) => {
  if (unit === "percent") return (100 * value).toFixed(2) + " %";
  const size = Math.abs(value);
  if (unit === "rate") {
    const magnitudes = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];
    const [scale, letter] = magnitudes.find(([one]) => size >= .9995 * one) || [1, ""];
    const number = value / scale;
    return number.toFixed(Math.abs(number) >= 99.95 ? 0 : Math.abs(number) >= 9.995 ? 1 : 2) + letter;
  }
  if (size && (size < 1e-3 || size >= 1e5)) return value.toExponential(2).replace(/([+-])(\\d)$/, "$10$2");
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
  const paths = [...svg.querySelectorAll("[data-points]")].reverse(), said = at.textContent;
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
        values[number].textContent = say(value, unit);
        for (const [name, place] of [["cx", across(where)], ["cy", down(value)], ["r", 4]])
          dots[number].setAttribute(name, place);
      });
    },
    rest: () => {
      if (!series) return;
      at.textContent = said;
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
"""
