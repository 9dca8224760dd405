"""The chart of the README: one run on 1 rank and on 2, really trained, drawn as SVG by hand.

    python docs/make_chart.py                    trains both (about two minutes on two cores), then draws
    python docs/make_chart.py RUN1 RUN2          draws two runs that are there (`monitor.every` 1)

loss |  wide pale line    1 rank          difference |      .   .
     |  thin dark line    2 ranks         / loss     |  . ..  .. .
     +---------------- update                        +---------------- update
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

TARGET = Path(__file__).parent / "same-run.svg"
OVERRIDES = (
    "--precision.compute=fp32",
    "--model.layers=2",
    "--model.width=64",
    "--run.steps=120",
    "--monitor.every=1",
    "--data.evaluation.held-out.samples=256",
)

WIDTH, HEIGHT = 760, 420
LEFT, RIGHT = 62, 742
LOSS_TOP, LOSS_BOTTOM = 72, 262
DIFFERENCE_TOP, DIFFERENCE_BOTTOM = 312, 372

STYLE = """
  .surface { fill: #fcfcfb } .title { fill: #0b0b0b; font-weight: 600; font-size: 15px }
  text { fill: #52514e; font: 12px system-ui, sans-serif } .grid { stroke: #e4e3df; stroke-width: 1 }
  .one { stroke: #a9c8f0; stroke-width: 7 } .two { stroke: #12438c; stroke-width: 1.6 } .dot { fill: #12438c }
  .one, .two { fill: none; stroke-linejoin: round; stroke-linecap: round }
  @media (prefers-color-scheme: dark) {
    .surface { fill: #1a1a19 } .title { fill: #ffffff } text { fill: #c3c2b7 } .grid { stroke: #383835 }
    .one { stroke: #2f5f9e } .two { stroke: #d3e6ff } .dot { fill: #9dc5f8 }
  }
"""


def train(ranks: int, folder: Path) -> Path:
    """Train on this number of ranks; return the run's folder."""
    run = folder / f"ranks-{ranks}"
    place = [f"--run.folder={run}", f"--ranks={ranks}"]
    subprocess.run([sys.executable, "-m", "lockstep", "train", "stdlib-lm", *OVERRIDES, *place], check=True)
    return run


def losses(run: Path) -> list[float]:
    """Return the unrounded loss of each update."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [record["loss"] for record in map(json.loads, lines) if "grad_norm" in record]


def scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    """Return the linear function that maps low to start and high to end."""
    return lambda value: start + (value - low) / (high - low) * (end - start)


def text(x: float, y: float, words: str, anchor: str = "start", kind: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}">{words}</text>'


def short(value: float) -> str:
    """Return 2.5e-7, not 2.5e-07."""
    digits, power = f"{value:.1e}".split("e")
    return f"{digits}e{int(power)}"


def rule(y: float, label: str) -> str:
    """Return a grid line with its label."""
    line = f'<line x1="{LEFT}" x2="{RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>'
    return line + text(LEFT - 8, y + 4, label, "end")


def curve(points: Sequence[tuple[float, float]], kind: str) -> str:
    joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{joined}" class="{kind}"/>'


def draw(single: Sequence[float], double: Sequence[float]) -> str:
    """Return the chart as SVG text."""
    differences = [abs(a - b) / a for a, b in zip(single, double, strict=True)]
    across = scale(1, len(single), LEFT, RIGHT)
    down = scale(2, 6, LOSS_BOTTOM, LOSS_TOP)
    top = 4e-7
    tiny = scale(0, top, DIFFERENCE_BOTTOM, DIFFERENCE_TOP)
    dots = [
        f'<circle cx="{across(step):.1f}" cy="{tiny(min(value, top)):.1f}" r="2" class="dot"/>'
        for step, value in enumerate(differences, 1)
    ]
    steps = [1, *range(20, len(single) + 1, 20)]
    parts = [
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="8" class="surface"/>',
        text(20, 28, "The same run on 1 rank and on 2", kind="title"),
        text(20, 48, f"loss of each update; largest difference {short(max(differences))} of the loss"),
        *[rule(down(value), str(value)) for value in (2, 3, 4, 5, 6)],
        curve([(across(step), down(value)) for step, value in enumerate(single, 1)], "one"),
        curve([(across(step), down(value)) for step, value in enumerate(double, 1)], "two"),
        '<line x1="560" x2="584" y1="84" y2="84" class="one"/>' + text(592, 88, "1 rank, single process"),
        '<line x1="560" x2="584" y1="106" y2="106" class="two"/>' + text(592, 110, "2 ranks, ddp over gloo"),
        text(LEFT, DIFFERENCE_TOP - 14, "difference between the two, as a share of the loss"),
        *[rule(tiny(value), label) for value, label in ((0, "0"), (2e-7, "2e-7"), (4e-7, "4e-7"))],
        *dots,
        *[text(across(step), DIFFERENCE_BOTTOM + 20, str(step), "middle") for step in steps],
        text((LEFT + RIGHT) / 2, DIFFERENCE_BOTTOM + 38, "update", "middle"),
    ]
    label = f"Loss curves of 1 rank and of 2 ranks coincide; they differ by {short(max(differences))} at most"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">'
    return "\n".join([head, f"<title>{label}</title>", f"<style>{STYLE}</style>", *parts, "</svg>", ""])


def main(arguments: Sequence[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        runs = [Path(run) for run in arguments] or [train(ranks, Path(folder)) for ranks in (1, 2)]
        single, double = map(losses, runs)
    TARGET.write_text(draw(single, double))
    largest = max(abs(a - b) / a for a, b in zip(single, double, strict=True))
    print(f"{TARGET}: {len(single)} updates, largest relative difference of the loss {short(largest)}")


if __name__ == "__main__":
    main(sys.argv[1:])
