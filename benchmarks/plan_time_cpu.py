"""Predicted and measured time of a step on this machine's CPU: models, sizes, precisions, strategies on 1 and 2 ranks.

python benchmarks/plan_time_cpu.py --measure             a round: real runs of all rows, 10 minutes
python benchmarks/plan_time_cpu.py                       predict them, and show the errors
python benchmarks/plan_time_cpu.py --only "llama fsdp"   rows whose name contains each word
python benchmarks/plan_time_cpu.py --search              measure what `plan --search` finds, and what it left out

Measured: the fastest fifth of the steps of a real run of some seconds, in the fastest of the rounds, because other
programs run on this machine, too. Predicted: with the file of `lockstep plan --calibrate --out calibrated.toml`, which
knows none of the rows.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from plan_memory import CLASSES, MODELS, OTHERS, _custom
from rounds import about_here, markdown

from lockstep.assembly.user_objects import UserObjects
from lockstep.config.loading import load, validate
from lockstep.config.schema import Config
from lockstep.core.errors import ConfigError
from lockstep.core.processes import in_fork
from lockstep.launch.local import launch
from lockstep.plan.gpus import parse_cluster
from lockstep.simulation.estimate import estimator_of
from lockstep.simulation.search import search, title
from lockstep.training.job import opened

RESULTS = Path(__file__).parent / "results" / "plan_time_cpu.json"
FASTEST = 0.2  # of the steps
WARM_STEPS, SECONDS, LEAST_STEPS = 3, 2.0, 4
SEARCHED, NEXT_BEST = ("decoder", "wide decoder", "gpt2"), 5


def _decoder(layers: int, width: int, vocabulary: int = 256, length: int = 128) -> dict[str, Any]:
    return {
        "model": {"kind": "transformer", "vocabulary": vocabulary, "layers": layers, "heads": 4, "width": width},
        "data": {"train": {"kind": "stdlib-text", "length": length}},
    }


def _gpt2(layers: int, width: int, dropout: float) -> dict[str, Any]:
    sizes = {"model_type": "gpt2", "n_embd": width, "n_layer": layers, "n_head": 4, "n_positions": 128}
    drops = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), dropout)
    architecture = {**sizes, **drops, "vocab_size": 512}
    return {
        "model": {"kind": "huggingface", "task": "causal-lm", "architecture": architecture},
        "data": {"train": {"kind": "stdlib-text", "length": 128}},
    }


KINDS: Mapping[str, Mapping[str, Any]] = {
    "decoder": _decoder(4, 128),
    "small decoder": _decoder(2, 64, length=64),
    "deep decoder": _decoder(10, 96),
    "wide decoder": _decoder(2, 512, vocabulary=1024),
    "long decoder": _decoder(2, 128, length=512),
    "gpt2": _gpt2(3, 192, 0.0),
    "gpt2 with dropout": _gpt2(3, 192, 0.1),
    "llama": MODELS["llama"],
    "classifier": MODELS["classifier"],
    "encoder-decoder": OTHERS["encoder-decoder"],
    "convolutions": {"model": _custom("Convolutions"), **CLASSES, "data": {"train": _custom("Images")}},
}
LAYOUTS = {"single": 1, "ddp": 2, "fsdp": 2}
FEATURES: Mapping[str, Mapping[str, Any]] = {
    "fp32": {"precision": {"compute": "fp32"}},
    "bf16": {"precision": {"compute": "bf16"}},
    "fp32 checkpointing": {"precision": {"compute": "fp32"}, "memory": {"activation_checkpointing": {"mode": "full"}}},
}
BATCHES: Mapping[str, Mapping[str, int]] = {
    "8": {"global_size": 8, "micro_size": 8},
    "32": {"global_size": 32, "micro_size": 16},
}


def configs() -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Yield name, ranks and config of each row."""
    for (kind, model), (layout, ranks) in itertools.product(KINDS.items(), LAYOUTS.items()):
        for number, (feature, values) in enumerate(FEATURES.items()):
            small = (number + len(kind) + ranks) % 2 == 0  # half of the rows have each batch
            batch = "8" if small else "32"
            if feature == "fp32 checkpointing" and kind in ("classifier", "convolutions", "encoder-decoder"):
                continue
            sizes = {"global_size": BATCHES[batch]["global_size"], "micro_size": min(BATCHES[batch]["micro_size"],
                     BATCHES[batch]["global_size"] // ranks)}  # fmt: skip
            config = {**model, **values, "batch": sizes, "optim": {"name": "adamw", "lr": 1e-3},
                      "parallel": {"strategy": layout}, "run": {"steps": 100_000},
                      "launch": {"ranks": ranks, "device": "cpu"}}  # fmt: skip
            yield f"{kind}, {layout}, {feature}, batch {batch}", ranks, config


def measured(config: Config, ranks: int) -> float:
    """Return the milliseconds of a step of a real run."""
    with tempfile.TemporaryDirectory() as folder:
        code = launch(partial(_train, config, Path(folder)), ranks, config.launch, None, own_process=True).show()
        assert code == 0, f"exit code {code}"
        return float((Path(folder) / "0").read_text())


def _train(config: Config, folder: Path) -> int:
    times: list[float] = []
    with opened(config, UserObjects()) as session:
        began = time.perf_counter()
        for batch in session.batches():
            session.accumulate(batch)
            session.commit().result()
            now = time.perf_counter()
            times.append(now - began)
            began = now
            # every rank stops at the same step: rank 0's clock decides
            stop = sum(times) > SECONDS and len(times) >= WARM_STEPS + LEAST_STEPS
            if _agreed(stop):
                break
            began = time.perf_counter()
    rank = os.environ.get("RANK", "0")
    kept = sorted(times[WARM_STEPS:])
    fastest = kept[: max(3, int(FASTEST * len(kept)))]
    (folder / rank).write_text(str(1000 * statistics.mean(fastest)))
    return 0


def _agreed(stop: bool) -> bool:
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        return stop
    flag = torch.tensor(int(stop))
    dist.broadcast(flag, 0)
    return bool(flag)


def predicted(config: Config, ranks: int, file: Path) -> Mapping[str, Any]:
    """Return the predicted time of a step, with its parts."""
    step = estimator_of(config, ranks, None, UserObjects(), parse_cluster(f"{file}:{ranks}")).step_time(
        config, parse_cluster(f"{file}:{ranks}")
    )
    return {"milliseconds": 1000 * step.seconds, **{part: 1000 * each for part, each in step.parts.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--search", action="store_true")
    parser.add_argument("--seconds", type=float, default=440, help="with --measure: begin no row later")
    parser.add_argument("--file", type=Path, default=Path("calibrated.toml"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    for module in ("torch._dynamo", "transformers.modeling_utils"):
        importlib.import_module(module)  # once; each row's processes are forks of this one
    record = json.loads(arguments.results.read_text()) if arguments.results.exists() else {"rows": {}}
    record |= {"command": "python benchmarks/plan_time_cpu.py", "machine": about_here(["torch"])}
    if arguments.search:
        models = [name for name in SEARCHED if all(word in name for word in arguments.only.split())]
        kept = [row for row in record.get("search", ()) if row["model"] not in models]
        record["search"] = kept + [row for name in models for row in searched(name, arguments.file.resolve())]
        arguments.results.write_text(json.dumps(record, indent=1) + "\n")
        print(table(record))
        return
    rows, until = record["rows"], time.monotonic() + arguments.seconds
    chosen = [each for each in configs() if all(word in each[0] for word in arguments.only.split())]
    for name, ranks, values in sorted(chosen, key=lambda each: len(rows.get(each[0], {}).get("rounds", ()))):
        config, row = validate(values).config, rows.setdefault(name, {"ranks": ranks, "rounds": []})
        if arguments.measure and time.monotonic() < until:
            row["rounds"].append(in_fork(partial(measured, config, ranks)))
            print(f"{name:<50} {row['rounds'][-1]:>10.2f}", flush=True)
        elif not arguments.measure and row["rounds"]:
            row.update(in_fork(partial(predicted, config, ranks, arguments.file.resolve())))
            row["measured"] = min(row["rounds"])
            error = row["milliseconds"] / row["measured"] - 1
            print(f"{name:<50} {row['measured']:>10.2f} {row['milliseconds']:>10.2f} {error:+.1%}", flush=True)
        arguments.results.write_text(json.dumps(record, indent=1) + "\n")
    if not arguments.measure:
        print(table(record))


def searched(name: str, file: Path) -> Iterator[dict[str, Any]]:
    """Yield the config that the search finds for a model, and others that it left out, predicted and measured."""
    sizes = {"batch": {"global_size": 64}, "optim": {"name": "adamw", "lr": 1e-3}, "run": {"steps": 100_000}}
    values = {**KINDS[name], **sizes, "precision": {"compute": "fp32"}, "launch": {"ranks": 2, "device": "cpu"}}
    for config_name, config, milliseconds in in_fork(partial(_candidates, values, file)):
        measurement = min(in_fork(partial(measured, config, 2)) for _ in range(3))
        row = {"model": name, "config": config_name, "milliseconds": milliseconds, "measured": measurement}
        print(row, flush=True)
        yield row


def _candidates(values: Mapping[str, Any], file: Path) -> list[tuple[str, Config, float]]:
    cluster, rows = parse_cluster(f"{file}:2"), list[tuple[str, Config, float]]()
    found = search(estimator_of(validate(values).config, 2, 1 << 33, UserObjects(), cluster))
    assert found.best is not None
    for each in (found.best, *found.candidates):
        with tempfile.TemporaryDirectory() as folder, suppress(ConfigError):  # some models have no tensor parallelism
            files = [Path(folder, "run.json"), Path(folder, "found.json")]
            for path, content in zip(files, (values, each.overlay), strict=True):
                path.write_text(json.dumps(content))
            config = load(files).config
            rows.append((title(each), config, predicted(config, 2, file)["milliseconds"]))
    return rows[: NEXT_BEST + 1]


def _found(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = [[row["model"], row["config"], f"{row['milliseconds']:.1f}", f"{row['measured']:.1f}"] for row in rows]
    return markdown(["model", "config, the found one first", "predicted ms", "measured ms"], lines)


def table(results: Mapping[str, Any]) -> str:
    """Return the table of errors in Markdown, the share of pairs in the right order, and the found configs."""
    rows: dict[str, Any] = {name: row for name, row in results["rows"].items() if "milliseconds" in row}
    lines = []
    for layout in (*LAYOUTS, ""):
        errors = sorted(
            (abs(row["milliseconds"] / row["measured"] - 1), name)
            for name, row in rows.items()
            if f", {layout}" in name
        )
        if errors:
            p90 = errors[min(len(errors) - 1, round(0.9 * (len(errors) - 1)))][0]
            worst, name = errors[-1]
            median = statistics.median(error for error, _ in errors)
            lines.append([layout or "all", str(len(errors)), f"{median:.1%}", f"{p90:.1%}", f"{worst:.1%} ({name})"])
    parts = [markdown(["strategy", "rows", "median error", "p90", "largest"], lines), _order(list(rows.values()))]
    return "\n\n".join([*parts, *([_found(results["search"])] if "search" in results else [])])


def _order(rows: Sequence[Mapping[str, Any]]) -> str:
    right = total = 0
    for first, second in itertools.combinations(rows, 2):
        if max(first["measured"], second["measured"]) > 1.1 * min(first["measured"], second["measured"]):
            total += 1
            right += (first["measured"] < second["measured"]) == (first["milliseconds"] < second["milliseconds"])
    return f"{right / total:.1%} of {total:,} pairs that differ by more than 10 % are in the right order."


if __name__ == "__main__":
    main()
