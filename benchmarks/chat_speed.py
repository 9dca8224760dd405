"""Measures tokens per second of the tiny chat recipe, padded and packed: Lockstep, and TRL's SFTTrainer.

    python benchmarks/chat_speed.py --trl FOLDER/bin/python [--rounds 3] [--steps 20] [--precision fp32]

The interpreter is of an environment that has TRL; it also reads the packages of this one:

    python -m venv FOLDER
    python -c 'import site; print(*site.getsitepackages())' > FOLDER/lib/python3.11/site-packages/here.pth
    FOLDER/bin/pip install --no-deps trl==1.16.0

All train the same Llama from the same weights on the same conversations and answers, with the recipe's micro-batches,
accumulation, fused AdamW, schedule and clipping, on one core. The loss of held-out answers shows that they learned
alike; the order of samples differs. Only tokens of conversations count, not padding, as both count and log them every
10 steps. Prints the table and writes results/chat_speed.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rounds import (
    DidNotRun,
    Spread,
    about_here,
    in_processes,
    interleaved,
    markdown,
    provenance,
    report,
    save,
    within_rounds,
)

EXAMPLE = Path(__file__).parents[1] / "examples" / "chat_data.py"
PRECISIONS, STEPS, ROUNDS, WARM_UP = ("fp32", "bf16"), 20, 3, 10
OURS, THEIRS = "Lockstep", "SFTTrainer"
CONTESTANTS = tuple(f"{who}, {how}" for how in ("padded", "packed") for who in (OURS, THEIRS))
HELD_OUT, CHATS, GLOBAL, MICRO, RATE, LENGTH = 32, 320, 64, 4, 1e-3, 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--trl", metavar="PYTHON", default=sys.executable)
    parser.add_argument(
        "--precision", choices=PRECISIONS, help="only this one; results/chat_speed.json keeps the other"
    )
    parser.add_argument("--contestant", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.contestant:
        folder, how, precision = arguments.contestant
        report(sft_trainer(Path(folder), arguments.steps, packed=how == "packed", precision=precision))
        return
    results = measure(arguments)
    if arguments.steps == STEPS:
        save("chat_speed", results)
    print(table(results))


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the results in the form of results/chat_speed.json."""
    file = Path(__file__).parent / "results" / "chat_speed.json"
    asked = [arguments.precision] if arguments.precision else PRECISIONS
    rows = json.loads(file.read_text())["rows"] if arguments.precision and file.exists() else {}
    machine = about_here(["torch", "transformers"])
    version = [arguments.trl, "-c", "import importlib.metadata as m; print(m.version('trl'))"]
    machine["versions"]["trl"] = subprocess.run(version, capture_output=True, text=True, check=True).stdout.strip()
    for precision in asked:
        with tempfile.TemporaryDirectory() as folder:
            make(Path(folder))
            run = partial(one_run, Path(folder), arguments, precision)
            runs, refused = interleaved(CONTESTANTS, arguments.rounds, run)
        assert not refused, refused
        rows[precision] = {
            name: {what: Spread.over([run[what] for run in of_it]) for what in of_it[0]}
            | {"ratio": within_rounds(of_it, runs[_peer(name)], "tokens_per_second", lambda own, peer: own / peer)}
            for name, of_it in runs.items()
        }
    command = f"python benchmarks/chat_speed.py --trl PYTHON --rounds {arguments.rounds}"
    return {"command": command, "rounds": arguments.rounds, "machine": machine, "rows": rows}


def _peer(name: str) -> str:
    return name.replace(OURS, THEIRS)


def make(folder: Path) -> None:
    """Write conversations and tokenizer of the recipe, and its model with random weights."""
    import torch
    import yaml
    from transformers import AutoConfig, AutoModelForCausalLM

    subprocess.run([sys.executable, str(EXAMPLE), str(folder)], check=True)
    recipe = yaml.safe_load((EXAMPLE.parents[1] / "recipes" / "tiny" / "chat.yaml").read_text())
    torch.manual_seed(0)
    config = AutoConfig.for_model(**recipe["model"]["architecture"], vocab_size=1024)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")


def one_run(folder: Path, arguments: argparse.Namespace, precision: str, name: str) -> Mapping[str, float]:
    """Return a contestant's figures of one round."""
    who, how = name.split(", ")
    if who == OURS:
        return lockstep(folder, arguments.steps, packed=how == "packed", precision=precision)
    command = ["--contestant", str(folder), how, precision, "--steps", str(arguments.steps)]
    return in_processes(__file__, command, 1, python=arguments.trl)


def lockstep(folder: Path, steps: int, *, packed: bool, precision: str) -> dict[str, float]:
    """Run the recipe by the command, with all that it writes but checkpoints, and one evaluation afterwards."""
    overrides = {"run.steps": steps, "evaluation.every": "null", "checkpoint.every": "null", "optim.lr": RATE,
                 "schedule.warmup_ratio": 0, "precision.compute": precision, "batch.global_size": GLOBAL,
                 "batch.micro_size": MICRO, "model.pretrained": folder / "model",
                 "model.architecture": "null"}  # fmt: skip
    for key in ("data.train", "data.evaluation.test"):
        overrides |= {f"{key}.name": folder / "chats.jsonl", f"{key}.tokenizer": folder / "tokenizer"}
    overrides |= {"data.train.packed": str(packed).lower(), "data.train.split": f"train[{HELD_OUT}:{HELD_OUT + CHATS}]"}
    with tempfile.TemporaryDirectory() as run:
        overrides["run.folder"] = run
        command = [sys.executable, "-m", "lockstep", "train", "chat", "tiny/chat", "--ranks", "1"]
        command += [f"--{key}={value}" for key, value in overrides.items()]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        if done.returncode != 0:
            raise DidNotRun(done.stderr.strip()[-400:] or f"exit code {done.returncode}")
        lines = [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]
        summary = json.loads((Path(run) / "summary.json").read_text())
    logged = [(line["step"], line["tokens"], line["seconds"]) for line in lines if "grad_norm" in line]
    return {"tokens_per_second": _rate(logged), "loss": summary["evaluation"]["test"]["loss"]}


def _rate(logged: list[tuple[int, int, float]]) -> float:
    """Return tokens per second after the warmup, from what was logged: step, tokens and seconds so far."""
    (_, first, began), *_, (_, last, ended) = [line for line in logged if line[0] >= WARM_UP]
    return (last - first) / (ended - began)


def sft_trainer(folder: Path, steps: int, *, packed: bool, precision: str) -> dict[str, float]:
    """Train by TRL, with the same settings."""
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    rows = load_dataset("json", data_files=str(folder / "chats.jsonl"), split="train")
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    with tempfile.TemporaryDirectory() as run:
        options = SFTConfig(
            output_dir=run, max_steps=steps, per_device_train_batch_size=MICRO,
            gradient_accumulation_steps=GLOBAL // MICRO, max_length=LENGTH, packing=packed, assistant_only_loss=True,
            learning_rate=RATE, lr_scheduler_type="cosine", weight_decay=0.0,
            max_grad_norm=1.0, optim="adamw_torch_fused", bf16=precision == "bf16", gradient_checkpointing=False,
            use_cpu=True, save_strategy="no", report_to="none", disable_tqdm=True, dataloader_pin_memory=False,
        )  # fmt: skip
        logged: list[tuple[int, int, float]] = []

        class Stopwatch(TrainerCallback):
            def on_log(self, args: Any, state: Any, control: Any, logs: Any, **others: Any) -> None:
                if "num_tokens" in logs:
                    logged.append((state.global_step, logs["num_tokens"], time.perf_counter()))

        data = rows.select(range(HELD_OUT, HELD_OUT + CHATS))
        trainer = SFTTrainer(model, options, train_dataset=data, processing_class=tokenizer, callbacks=[Stopwatch()])
        trainer.train()
    return {"tokens_per_second": _rate(logged), "loss": _held_out(model, tokenizer, rows.select(range(HELD_OUT)))}


def _held_out(model: Any, tokenizer: Any, rows: Any) -> float:
    """Return the mean loss of the answers' tokens."""
    import torch
    from torch.nn import functional as F

    total, count = 0.0, 0
    for messages in rows["messages"]:
        made = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        ids, marks = torch.tensor(made["input_ids"]), torch.tensor(made["assistant_masks"]).bool()
        with torch.no_grad():
            logits = model.eval()(ids[None]).logits[0].float()
        total += F.cross_entropy(logits[:-1][marks[1:]], ids[1:][marks[1:]], reduction="sum").item()
        count += int(marks[1:].sum())
    return total / count


def table(results: Mapping[str, Any]) -> str:
    """Return the table in Markdown, from what `measure` returned or results/chat_speed.json holds."""
    columns = ["", "tokens/s", f"times {THEIRS}'s", "loss of held-out answers"]
    forms = {"tokens_per_second": "{:,.0f}", "ratio": "{:.2f}", "loss": "{:.3f}"}
    lines = []
    for precision, rows in results["rows"].items():
        for name, row in rows.items():
            spreads = [row[what] if isinstance(row[what], Spread) else Spread(**row[what]) for what in forms]
            cells = [spread.text(form) for spread, form in zip(spreads, forms.values(), strict=True)]
            lines.append([f"{name}, {precision}", *cells])
    return f"{markdown(columns, lines)}\n\n{provenance(results)}"


if __name__ == "__main__":
    main()
