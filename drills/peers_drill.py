"""Compares what a kill during a save costs, by library: `python drills/peers_drill.py`, about 4 minutes on 2 cores.

HF Trainer, Accelerate, Lightning and Lockstep train the same model (7.1 M parameters, with Adam's moments 85 MB) in one
process on the CPU, save after every step and keep two, each as its documentation shows. SIGKILL hits at a random moment
between a save's begin and its end; then the same program is started again and loads its newest checkpoint. It either

    resumes     from the last finished save, or from the one that the kill hit, with exactly that step's state
    falls back  from an older step: finished work is lost
    errs        with a state that no step has had, silently; or from the beginning
    fails       until the files that the kill has left are removed (the drill deletes the newest checkpoint)

    python drills/peers_drill.py --kills 300      needs the packages of '.[hf,benchmark]'

Prints a table and writes results/peers_drill.json. Moments are drawn from --seed, evenly over the length of a save.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import xxhash
from attempts import PATIENCE, machine
from torch import Tensor, nn
from torch.nn import functional as F

RESULTS = Path(__file__).parent / "results"
WIDTH, LAYERS, BATCH = 1088, 6, 4
ENDLESS = 1_000_000
RESUMES = "goes on"  # as results/peers_drill.json spells it
OUTCOMES = (RESUMES, "falls back", "errs", "fails")
PARTS = 5  # of a save's duration, in the histogram


def _versions() -> dict[str, str]:
    return {name: version(name) for name in ("transformers", "accelerate", "lightning") if find_spec(name)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=25, help="of each")
    parser.add_argument("--contestants", nargs="+", choices=list(CONTESTANTS), default=list(CONTESTANTS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    rows = {}
    for name in arguments.contestants:
        with tempfile.TemporaryDirectory(prefix="drill-") as folder:
            rows[name] = Drill(name, Path(folder), random.Random(arguments.seed)).run(arguments.kills)
    results = {
        "command": f"python drills/peers_drill.py --kills {arguments.kills} --seed {arguments.seed}",
        "machine": {**machine(), **_versions()},
        "rows": rows,
    }
    arguments.results.mkdir(parents=True, exist_ok=True)
    (arguments.results / "peers_drill.json").write_text(json.dumps(results, indent=2) + "\n")
    print(table(results))
    own = rows.get("Lockstep")
    sys.exit(1 if own is not None and own[RESUMES] != own["kills"] else 0)


def table(results: Mapping[str, Any]) -> str:
    """Return the table in Markdown."""
    heads = ["kills", "resumes", *OUTCOMES[1:], "a save, s", "kills by fifths of it"]
    lines = [f"|  | {' | '.join(heads)} |", "|---|" + "--:|" * len(heads)]
    for name, row in results["rows"].items():
        cells = [row["kills"], *(row[outcome] for outcome in OUTCOMES), f"{row['seconds']:.2f}", row["fifths"]]
        lines.append(f"| {name} | {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


# --- the drill ----------------------------------------------------------------------------------------------------


@dataclass
class Drill:
    """The drill of a contestant.

    Attributes:
        states: Hash of the state in the last save of each step.
        lengths: Durations of undisturbed saves, in seconds.
        done: Step of the last save known to be done.
    """

    name: str
    folder: Path
    rng: random.Random
    states: dict[int, str] = field(default_factory=dict)
    lengths: list[float] = field(default_factory=list)
    done: int = 0
    examples: dict[str, str] = field(default_factory=dict)

    def run(self, kills: int) -> dict[str, Any]:
        outcomes: Counter[str] = Counter()
        fifths = [0] * PARTS
        made, missed = 0, 0
        while made < kills or sum(outcomes.values()) < made:
            part = min(range(PARTS), key=lambda number: (fifths[number], self.rng.random()))
            with Child(self.name, self.folder) as child:
                start = self._started(child)
                if sum(outcomes.values()) < made:  # there was a kill before
                    outcomes[self._checked(start)] += 1
                    print(f"{self.name}: kill {made} of {kills}: {start.description}", file=sys.stderr, flush=True)
                if made == kills or start.failure is not None:
                    self._mend(start)
                    continue
                hit = self._kill(child, part)
            made, missed = made + hit, missed + (not hit)
            fifths[part] += hit
        return {
            "kills": made,
            **{outcome: outcomes[outcome] for outcome in OUTCOMES},
            "seconds": round(statistics.median(self.lengths), 3),
            "fifths": " ".join(map(str, fifths)),
            "between_two_saves": missed,
            "examples": self.examples,
        }

    def _started(self, child: Child) -> Start:
        for words in child.events():
            if words[0] == "resumed":
                return Start(int(words[1]), words[2])
            if words[0] == "failed":
                return Start(0, "", " ".join(words[1:]))
        return Start(0, "", "ended silently")

    def _checked(self, start: Start) -> str:
        outcome = self._outcome(start)
        if outcome != RESUMES:
            self.examples.setdefault(outcome, f"{start.description} (step {self.done} was done)")
        return outcome

    def _outcome(self, start: Start) -> str:
        if start.failure is not None:
            return "fails"
        if start.step == 0 or start.state != self.states.get(start.step):
            return "errs"
        return RESUMES if start.step >= self.done else "falls back"

    def _mend(self, start: Start) -> None:
        """Delete the newest checkpoint, as a user would, if the run didn't start."""
        if start.failure is None:
            return
        left = saves_in(self.folder)
        if not left:
            raise SystemExit(f"{self.name} does not run here: {start.failure}")
        newest = max(left, key=lambda path: path.stat().st_mtime)
        shutil.rmtree(newest) if newest.is_dir() else newest.unlink()
        self.done = 0  # what this kill has cost is counted

    def _kill(self, child: Child, part: int) -> bool:
        """Kill during this part of a later save; return whether the kill hit the save."""
        passing = self.rng.randrange(1, 3) if self.lengths else 6
        began = 0.0
        for words in child.events():
            if words[0] == "failed":
                raise SystemExit(f"{self.name} failed while it trained: {' '.join(words[1:])}")
            if words[0] == "begin":
                began, step = float(words[3]), int(words[1])
                self.states[step] = words[2]
                if passing <= 0:
                    break
            elif words[0] == "end":
                self.done = int(words[1])
                self.lengths.append(float(words[2]) - began)
                passing -= 1
        length = statistics.median(self.lengths[-20:])
        until = began + length * (part + self.rng.random()) / PARTS
        while time.monotonic() < until:
            time.sleep(max(0.0, min(0.0005, until - time.monotonic())))
        child.kill()
        ended = [int(words[1]) for words in child.rest() if words[0] == "end"]
        self.done = max([self.done, *ended])
        return not ended


@dataclass(frozen=True)
class Start:
    """The start of an attempt.

    Attributes:
        step: The step from which it resumes; 0 if it starts from the beginning.
        state: Hash of the state with which it resumes.
        failure: Why it doesn't start; None if it does.
    """

    step: int
    state: str
    failure: str | None = None

    @property
    def description(self) -> str:
        return f"resumes from step {self.step}" if self.failure is None else self.failure


class Child:
    """An attempt in its own process, which writes its events to a file."""

    def __init__(self, name: str, folder: Path) -> None:
        self._events = folder / "events"
        self._events.write_text("")
        self._process = _FORKS.Process(target=_be, args=(name, str(folder), str(self._events)))
        self._process.start()
        self._read = 0

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        if self._process.is_alive():
            os.kill(self._process.pid or 0, signal.SIGKILL)
        self._process.join()

    def events(self) -> Iterator[list[str]]:
        """Yield events as they are written, until the process ends."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            alive = self._process.is_alive()
            yield from self.rest()
            if not alive:
                return
            time.sleep(0.0002)
        raise SystemExit("an attempt hangs")

    def rest(self) -> Iterator[list[str]]:
        """Yield the events that have been written since the last call."""
        with self._events.open("rb") as file:
            file.seek(self._read)
            while (line := file.readline()).endswith(b"\n"):
                self._read += len(line)
                yield line.decode(errors="replace").split()


def saves_in(folder: Path) -> list[Path]:
    """Return the files that look like a checkpoint of any contestant."""
    name = re.compile(r"(step[-=]|checkpoint[-_])\d+|last.*\.ckpt")
    return [path for path in (folder / "saves").rglob("*") if name.match(path.name)]


# --- shared by contestants ---------------------------------------------------------------------------------------


class Events:
    """Writes an attempt's events for the drill."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND)

    def __call__(self, *words: object) -> None:
        os.write(self._file, (" ".join(map(str, words)).replace("\n", " ") + "\n").encode())

    def begin(self, step: int, state: Mapping[str, Tensor]) -> None:
        self("begin", step, fingerprint(state), time.monotonic())

    def end(self, step: int) -> None:
        self("end", step, time.monotonic())


def fingerprint(state: Mapping[str, Tensor]) -> str:
    digest = xxhash.xxh3_128()
    for name, tensor in sorted(state.items()):
        digest.update(name.encode())
        digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    moments = {
        f"{index}.{name}": value
        for index, parameter in enumerate(model.parameters())
        for name, value in optimizer.state.get(parameter, {}).items()
    }
    return {**model.state_dict(), **moments}


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))


class Noise(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        draws = torch.Generator().manual_seed(index)
        return {"x": torch.randn(WIDTH, generator=draws), "labels": torch.randn(WIDTH, generator=draws)}


def _be(name: str, folder: str, events: str) -> None:
    """Run an attempt."""
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    torch.set_num_threads(1)
    events = Events(events)
    os.chdir(folder)
    try:
        CONTESTANTS[name](Path(folder) / "saves", events)
    except BaseException as error:
        events("failed", type(error).__name__, error)


# --- contestants --------------------------------------------------------------------------------------------------


def lockstep_(folder: Path, events: Events) -> None:
    import lockstep

    config = {
        "batch": {"global_size": BATCH},
        "optim": {"clip_norm": None, "lr": 1e-4},
        "precision": {"compute": "fp32"},
        "launch": {"device": "cpu"},
        "checkpoint": {"keep_last": 2},
        "run": {"steps": ENDLESS},
    }
    loss = nn.MSELoss(reduction="sum")
    with lockstep.session(config, model=make_model(), train_dataset=Pairs(), objective=loss) as session:
        checkpoints = session.checkpoints(folder)
        events("resumed", checkpoints.resumed_from or 0, fingerprint(session.state().tensors))
        under_way: int | None = None
        for report in session:
            if under_way is not None and (folder / f"step-{under_way:08d}").exists():
                events.end(under_way)
                under_way = None
            if under_way is None:
                under_way = report.step
                events.begin(report.step, session.state().tensors)
                checkpoints.save()


class Pairs(Noise):
    def __getitem__(self, index: int) -> Any:
        return tuple(super().__getitem__(index).values())


class ForTrainer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = make_model()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": F.mse_loss(self.body(x), labels)}


def hf_trainer(folder: Path, events: Events) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments
    from transformers.trainer_utils import get_last_checkpoint

    class Reporting(TrainerCallback):
        has_reported = False

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if not self.has_reported:
                events("resumed", state.global_step, fingerprint(now()))
                self.has_reported = True

    class Saving(Trainer):
        def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
            events.begin(self.state.global_step, now())
            super()._save_checkpoint(*args, **kwargs)
            events.end(self.state.global_step)

    def now() -> dict[str, Tensor]:
        return state_of(trainer.model, getattr(trainer.optimizer, "optimizer", trainer.optimizer))

    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=ENDLESS, per_device_train_batch_size=BATCH, learning_rate=1e-4,
        save_strategy="steps", save_steps=1, save_total_limit=2, logging_strategy="no", report_to=[], use_cpu=True,
        disable_tqdm=True, ignore_data_skip=True, dataloader_num_workers=0,
    )  # fmt: skip
    trainer = Saving(ForTrainer(), arguments, train_dataset=Noise(), callbacks=[Reporting()])
    there = folder.is_dir() and get_last_checkpoint(str(folder)) is not None
    trainer.train(resume_from_checkpoint=there or None)


def accelerate_(folder: Path, events: Events) -> None:
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    class Steps:
        done = 0

        def state_dict(self) -> dict[str, int]:
            return {"done": self.done}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.done = state["done"]

    naming = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(cpu=True, project_config=naming)
    module = make_model()
    model, optimizer, batches = accelerator.prepare(
        module, torch.optim.AdamW(module.parameters(), lr=1e-4), torch.utils.data.DataLoader(Noise(), batch_size=BATCH)
    )
    steps = Steps()
    accelerator.register_for_checkpointing(steps)
    if list(folder.glob("checkpoints/checkpoint_*")):
        accelerator.load_state()
        accelerator.project_configuration.iteration = steps.done
    events("resumed", steps.done, fingerprint(state_of(module, optimizer.optimizer)))
    for batch in batches:
        accelerator.backward(F.mse_loss(model(batch["x"]), batch["labels"]))
        optimizer.step()
        optimizer.zero_grad()
        steps.done += 1
        events.begin(steps.done, state_of(module, optimizer.optimizer))
        accelerator.save_state()
        events.end(steps.done)


def lightning_(folder: Path, events: Events) -> None:
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.body = make_model()

        def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
            return F.mse_loss(self.body(batch["x"]), batch["labels"])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-4)

        def on_train_start(self) -> None:
            events("resumed", self.global_step, fingerprint(now()))

    class Saving(ModelCheckpoint):
        def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
            events.begin(trainer.global_step, now())
            super().on_train_batch_end(trainer, *args, **kwargs)
            events.end(trainer.global_step)

    def now() -> dict[str, Tensor]:
        return state_of(module, module.optimizers(use_pl_optimizer=False))  # type: ignore[arg-type]

    module = Module()
    saving = Saving(
        folder, filename="{step}", every_n_train_steps=1, save_top_k=2, monitor="step", mode="max", save_last=True
    )
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_steps=ENDLESS, logger=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[saving], default_root_dir=folder.parent,
    )  # fmt: skip
    batches = torch.utils.data.DataLoader(Noise(), batch_size=BATCH)
    left = sorted(folder.glob("*.ckpt"), key=lambda path: path.stat().st_mtime)
    newest = "last" if any(path.name.startswith("last") for path in left) else str(left[-1]) if left else None
    trainer.fit(module, batches, ckpt_path=newest)


CONTESTANTS: Mapping[str, Callable[[Path, Events], None]] = {
    "Lockstep": lockstep_,
    "HF Trainer": hf_trainer,
    "Accelerate": accelerate_,
    "Lightning": lightning_,
}

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["torch", "xxhash", "attempts", "lockstep.training.api", "transformers.trainer",
                               "accelerate", "lightning"])  # fmt: skip

if __name__ == "__main__":
    main()
