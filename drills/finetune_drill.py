"""Compare each part of fine-tuning under each strategy with a single process: `python drills/finetune_drill.py`.

    part        column           command
    chat        ddp ... context  lockstep verify chat tiny/chat --strategies ddp,... --ranks 2
    chat        checkpointing    the same under ddp, with memory.activation_checkpointing.mode: full
    chat        other ranks      fsdp on 2 ranks, resumed in its middle by one process, beside that process alone

    --only TEXT    parts whose name contains the text; the others keep their results
    --tables       no part: the page alone, from the results

Writes results/finetune_drill.json and the table of docs/finetune-table.md; fails (exit code 1) if a run differs.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from attempts import machine

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).parent / "results" / "finetune_drill.json"
PAGE = ROOT / "docs" / "finetune-table.md"
STRATEGIES = ("ddp", "fsdp", "zero2", "zero3", "pipeline-1f1b", "tensor", "context")
COLUMNS = ("single", *STRATEGIES, "checkpointing", "other ranks")
_CHAT, _LORA = ("chat", "tiny/chat"), ("chat-lora", "tiny/chat", "--model.adapter.dropout=0")
_CHECKPOINTING = "--memory.activation_checkpointing.mode=full"
_LOSSES_AGREE = {"fp32": 1e-5, "bf16": 1e-3}
_KINDS = ("dpo", "ipo", "orpo", "simpo")
_REWARD = ("--objective.kind=reward", "--objective.beta=null", "--model.task=sequence-classification")
PARTS: dict[str, Sequence[str]] = {
    "chat": _CHAT,
    "packed chats": (*_CHAT, "--data.train.packed=true"),
    "LoRA": _LORA,
    "DoRA": (*_LORA, "--model.adapter.use_dora=true"),
    "LoRA on packed chats": (*_LORA, "--data.train.packed=true"),
    "IA3": (*_CHAT, "--model.adapter.kind=ia3"),
    "nf4": (*_LORA, "--model.quantization.kind=nf4"),
    "int8": (*_LORA, "--model.quantization.kind=int8"),
    "EMA": (*_CHAT, "--optim.ema.decay=0.5"),
    "bf16 parameters": (*_CHAT, "--precision.parameters=bf16"),
    "AdamW in 8 bits": (*_CHAT, "--optim.name=adamw-8bit"),
    "schedule-free": (*_CHAT, "--optim.name=schedule-free", "--optim.betas=[0.9,0.999]", "--schedule.kind=constant"),
    **{kind: ("dpo", "tiny/dpo", f"--objective.kind={kind}") for kind in _KINDS},
    "reward": ("dpo", "tiny/dpo", *_REWARD),
    "kto": ("kto", "tiny/kto"),
    "distill": ("distill", "tiny/distill", "--model.architecture.num_hidden_layers=2"),
}
"""The recipe and overrides of each part."""
_REFUSED, _SAME, _DIFFERS = "refused", "same", "differs"
Result = Mapping[str, tuple[str, str]]
"""Of each column, the outcome and the reason or difference."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--tables", action="store_true")
    arguments = parser.parse_args()
    saved = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"parts": {}}
    results: dict[str, Any] = {name: saved["parts"][name] for name in PARTS if name in saved["parts"]}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        if not arguments.tables:
            _lockstep(place, sys.executable, ROOT / "examples" / "chat_data.py")
            _lockstep(place, *_train("chat", "tiny/chat"), "--run.folder=chat/teacher")
        for name, words in PARTS.items():
            if arguments.tables or arguments.only not in name:
                continue
            began = time.monotonic()
            results[name] = result = {**verified(place, words), **resumed(place, words, name)}
            print(
                f"{name}: {time.monotonic() - began:.0f} s",
                {at: outcome for at, (outcome, _) in result.items()},
                flush=True,
            )
            command = "python drills/finetune_drill.py"
            RESULTS.write_text(
                json.dumps({"command": command, "machine": machine(), "parts": results}, indent=1) + "\n"
            )
    PAGE.write_text(
        re.sub(
            r"(<!-- table -->\n).*(<!-- /table -->)",
            lambda at: f"{at[1]}{table(results)}\n{at[2]}",
            PAGE.read_text(),
            flags=re.DOTALL,
        )
    )
    faults = [
        f"{name}, {at}: {why}"
        for name, result in results.items()
        for at, (how, why) in result.items()
        if how == _DIFFERS
    ]
    print("\n".join(faults) or f"{len(results)} parts, none differs")
    sys.exit(bool(faults))


def verified(place: Path, words: Sequence[str]) -> Result:
    """Return the outcomes of `lockstep verify` on the strategies' columns, and with checkpointed activations."""
    rows = _verify(place, words, "single", 1) + _verify(place, words, ",".join(STRATEGIES), 2)
    rows += [{**row, "strategy": "checkpointing"} for row in _verify(place, (*words, _CHECKPOINTING), "ddp", 2)]
    of = defaultdict(list)
    for row in rows:
        of[row["strategy"]].append(row)
    return {name: _outcome(of[name]) for name in COLUMNS[:-1]}


def resumed(place: Path, words: Sequence[str], name: str) -> Result:
    """Train under fsdp on 2 ranks, resume from its middle in one process; compare the last loss with one process."""
    stem = re.sub(r"\W", "-", name)
    compute = "bf16" if "--precision.parameters=bf16" in words else "fp32"
    common = (
        *_train(*words),
        "--checkpoint.every=2 steps",
        "--checkpoint.keep_last=9",
        f"--precision.compute={compute}",
    )
    alone = _summary(place, *common, f"--run.folder={stem}-alone", "--ranks=1")
    many = _summary(place, *common, f"--run.folder={stem}-many", "--ranks=2", "--parallel.strategy=fsdp")
    if isinstance(many, str) or isinstance(alone, str):
        return {"other ranks": (_REFUSED, many if isinstance(many, str) else str(alone))}
    fork = ("--from", "2", "--fork", f"{stem}-fork", "--ranks=1", "--parallel.strategy=single", "--json")
    last = _summary(place, "lockstep", "train", f"{stem}-many", *fork)
    if isinstance(last, str):
        return {"other ranks": (_DIFFERS, last)}
    difference = abs(last["loss"] - alone["loss"]) / abs(alone["loss"])
    return {"other ranks": (_SAME if difference <= _LOSSES_AGREE[compute] else _DIFFERS, f"{difference:.1e}")}


def table(results: Mapping[str, Result]) -> str:
    """Return the page's table, with a note for each reason of a refusal."""
    notes: list[str] = []
    lines = [f"| part | {' | '.join(COLUMNS)} |", f"|---|{'---|' * len(COLUMNS)}"]
    for name, result in results.items():
        cells = []
        for how, why in (result[column] for column in COLUMNS):
            if how == _REFUSED and why not in notes:
                notes.append(why)
            cells.append(
                {_SAME: why, _REFUSED: f"[{notes.index(why) + 1}]" if how == _REFUSED else ""}.get(how, f"**{why}**")
            )
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *(f"{number}. {why}" for number, why in enumerate(notes, 1))])


def _outcome(rows: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    failed = [row for row in rows if row["status"] in ("failed", "crashed")]
    if failed:
        return _DIFFERS, str(failed[0]["what"] or failed[0]["reason"])
    own = [row for row in rows if row.get("optimizer") != "sgd"]  # under SGD a strategy may go that its own doesn't
    rows = own or rows
    passed = [row["max_loss_difference"] for row in rows if row["status"] == "passed"]
    if passed:
        return _SAME, f"{max(passed):.0e}"
    return _REFUSED, str(rows[0]["reason"]).partition("\n")[0] if rows else "no run"


def _train(*words: str) -> tuple[str, ...]:
    return ("lockstep", "train", *words, "--launch.device=cpu", "--monitor.progress=none", "--json")


def _verify(place: Path, words: Sequence[str], strategies: str, ranks: int) -> list[dict[str, Any]]:
    options = ("--strategies", strategies, "--ranks", str(ranks), "--steps", "3", "--launch.device=cpu", "--json")
    done = _lockstep(place, "lockstep", "verify", *words, *options)
    try:
        return list(json.loads(done.stdout))
    except json.JSONDecodeError:
        reason = _reason(done) or "no output"
        return [
            {
                "strategy": name,
                "status": "refused" if done.returncode == 2 else "crashed",
                "what": reason,
                "reason": reason,
            }
            for name in strategies.split(",")
        ]


def _summary(place: Path, *words: str) -> dict[str, Any] | str:
    """Return a run's summary, or the sentence with which it was refused."""
    done = _lockstep(place, *words)
    if done.returncode == 0:
        return dict(json.loads(done.stdout))
    return _reason(done) or f"exit code {done.returncode}"


def _reason(done: subprocess.CompletedProcess[str]) -> str:
    return (done.stderr.strip().splitlines() or [""])[-1].removeprefix("lockstep: ")


def _lockstep(place: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [*map(str, words)]
    if command[0] == "lockstep":
        command[:1] = [sys.executable, "-m", "lockstep"]
    return subprocess.run(command, cwd=place, capture_output=True, text=True, check=False)


if __name__ == "__main__":
    main()
