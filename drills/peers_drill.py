"""What a kill during a save costs, here and elsewhere: `python drills/peers_drill.py`, some 4 minutes on 2 cores.

HF Trainer, Accelerate, Lightning and Lockstep train the same model (7.1 M parameters, with Adam's moments 85 MB) in one
process on the CPU, save after every step and keep two, each as its documentation shows. SIGKILL hits at a random moment
between a save's begin and its end; then the same program is started again, which asks for its newest checkpoint. It
either

    goes on     from the last save that was done, or from the one that the kill hit, with that step's very state
    falls back  from an older step: finished work is lost
    errs        with a state that no step has had, and no word of it; or from the beginning
    fails       until somebody removes what the kill has left (the newest checkpoint is deleted here, and counted)

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
PARTS = 5  # of a save's length, in the histogram


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=25, help="of each")
    parser.add_argument("--contestants", nargs="+", choices=list(CONTESTANTS), default=list(CONTESTANTS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=RESULTS)
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    rows = {}
    for name in asked.contestants:
        with tempfile.TemporaryDirectory(prefix="drill-") as folder:
            rows[name] = Drill(name, Path(folder), random.Random(asked.seed)).run(asked.kills)
    found = {
        "command": f"python drills/peers_drill.py --kills {asked.kills} --seed {asked.seed}",
        "machine": {**machine(), **{name: version(name) for name in ("transformers", "accelerate", "lightning")}},
        "rows": rows,
    }
    asked.results.mkdir(parents=True, exist_ok=True)
    (asked.results / "peers_drill.json").write_text(json.dumps(found, indent=2) + "\n")
    print(table(found))
    ours = rows.get("Lockstep")
    sys.exit(1 if ours is not None and ours["goes on"] != ours["kills"] else 0)


def table(found: Mapping[str, Any]) -> str:
    """Markdown."""
    outcomes = ("goes on", "falls back", "errs", "fails")
    lines = [f"|  | kills | {' | '.join(outcomes)} | a save, s | kills by fifths of it |", "|---|" + "--:|" * 7]
    for name, row in found["rows"].items():
        cells = [row["kills"], *(row[one] for one in outcomes), f"{row['seconds']:.2f}", row["fifths"]]
        lines.append(f"| {name} | {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


# --- the drill ----------------------------------------------------------------------------------------------------


@dataclass
class Drill:
    """Of one contestant.

    Attributes:
        states: hash of what was saved, by step; of the last save of that step.
        lengths: seconds that undisturbed saves took.
        done: step of the last save known to be done.
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
            part = min(range(PARTS), key=lambda one: (fifths[one], self.rng.random()))
            with Child(self.name, self.folder) as child:
                start = self._started(child)
                if sum(outcomes.values()) < made:  # there was a kill before
                    outcomes[self._judged(start)] += 1
                    print(f"{self.name}: kill {made} of {kills}: {start.said}", file=sys.stderr, flush=True)
                if made == kills or start.failure is not None:
                    self._mend(start)
                    continue
                hit = self._kill(child, part)
            made, missed = made + hit, missed + (not hit)
            fifths[part] += hit
        return {
            "kills": made,
            **{one: outcomes[one] for one in ("goes on", "falls back", "errs", "fails")},
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
        return Start(0, "", "ended without a word")

    def _judged(self, start: Start) -> str:
        found = self._outcome(start)
        if found != "goes on":
            self.examples.setdefault(found, f"{start.said} (step {self.done} was done)")
        return found

    def _outcome(self, start: Start) -> str:
        if start.failure is not None:
            return "fails"
        if start.step == 0 or start.state != self.states.get(start.step):
            return "errs"
        return "goes on" if start.step >= self.done else "falls back"

    def _mend(self, start: Start) -> None:
        """What a person does whose run doesn't start: deletes the newest checkpoint."""
        if start.failure is None:
            return
        left = saves_in(self.folder)
        if not left:
            raise SystemExit(f"{self.name} does not run here: {start.failure}")
        newest = max(left, key=lambda path: path.stat().st_mtime)
        shutil.rmtree(newest) if newest.is_dir() else newest.unlink()
        self.done = 0  # what this kill has cost is counted

    def _kill(self, child: Child, part: int) -> bool:
        """Lets some saves pass, waits for one to write, and for a moment in it; whether the kill fell into it."""
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
    """How an attempt begins.

    Attributes:
        step: that it goes on from; 0 if it begins anew.
        state: hash of what it goes on with.
        failure: why it doesn't begin; None if it does.
    """

    step: int
    state: str
    failure: str | None = None

    @property
    def said(self) -> str:
        return f"goes on from step {self.step}" if self.failure is None else self.failure


class Child:
    """One attempt, in a process of its own that tells what it does in a file."""

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
        """As they come; ends when the process does."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            alive = self._process.is_alive()
            yield from self.rest()
            if not alive:
                return
            time.sleep(0.0002)
        raise SystemExit("an attempt hangs")

    def rest(self) -> Iterator[list[str]]:
        """Those that have come since."""
        with self._events.open("rb") as file:
            file.seek(self._read)
            while (line := file.readline()).endswith(b"\n"):
                self._read += len(line)
                yield line.decode(errors="replace").split()


def saves_in(folder: Path) -> list[Path]:
    """What looks like a checkpoint of any contestant."""
    name = re.compile(r"(step[-=]|checkpoint[-_])\d+|last.*\.ckpt")
    return [path for path in (folder / "saves").rglob("*") if name.match(path.name)]


# --- what all contestants have ------------------------------------------------------------------------------------


class Tell:
    """An attempt's word to the drill."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND)

    def __call__(self, *words: object) -> None:
        os.write(self._file, (" ".join(map(str, words)).replace("\n", " ") + "\n").encode())

    def begin(self, step: int, state: Mapping[str, Tensor]) -> None:
        self("begin", step, fingerprint(state), time.monotonic())

    def end(self, step: int) -> None:
        self("end", step, time.monotonic())


def fingerprint(state: Mapping[str, Tensor]) -> str:
    found = xxhash.xxh3_128()
    for name, tensor in sorted(state.items()):
        found.update(name.encode())
        found.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())
    return found.hexdigest()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    moments = {
        f"{index}.{name}": value
        for index, one in enumerate(model.parameters())
        for name, value in optimizer.state.get(one, {}).items()
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
    """The body of an attempt."""
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    torch.set_num_threads(1)
    tell = Tell(events)
    os.chdir(folder)
    try:
        CONTESTANTS[name](Path(folder) / "saves", tell)
    except BaseException as error:
        tell("failed", type(error).__name__, error)


# --- contestants --------------------------------------------------------------------------------------------------


def lockstep_(folder: Path, tell: Tell) -> None:
    import lockstep

    config = {
        "batch": {"global_size": BATCH},
        "optim": {"clip_norm": None, "lr": 1e-4},
        "precision": {"compute": "fp32"},
        "launch": {"device": "cpu"},
        "checkpoint": {"keep_last": 2},
        "run": {"steps": ENDLESS},
    }
    given: dict[str, Any] = {"model": make_model(), "train_dataset": Pairs(), "objective": nn.MSELoss(reduction="sum")}
    with lockstep.session(config, **given) as session:
        checkpoints = session.checkpoints(folder)
        tell("resumed", checkpoints.resumed_from or 0, fingerprint(session.state().tensors))
        under_way: int | None = None
        for report in session:
            if under_way is not None and (folder / f"step-{under_way:08d}").exists():
                tell.end(under_way)
                under_way = None
            if under_way is None:
                under_way = report.step
                tell.begin(report.step, session.state().tensors)
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


def hf_trainer(folder: Path, tell: Tell) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments
    from transformers.trainer_utils import get_last_checkpoint

    class Telling(TrainerCallback):
        said = False

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if not self.said:
                tell("resumed", state.global_step, fingerprint(now()))
                self.said = True

    class Saving(Trainer):
        def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
            tell.begin(self.state.global_step, now())
            super()._save_checkpoint(*args, **kwargs)
            tell.end(self.state.global_step)

    def now() -> dict[str, Tensor]:
        return state_of(trainer.model, getattr(trainer.optimizer, "optimizer", trainer.optimizer))

    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=ENDLESS, per_device_train_batch_size=BATCH, learning_rate=1e-4,
        save_strategy="steps", save_steps=1, save_total_limit=2, logging_strategy="no", report_to=[], use_cpu=True,
        disable_tqdm=True, ignore_data_skip=True, dataloader_num_workers=0,
    )  # fmt: skip
    trainer = Saving(ForTrainer(), arguments, train_dataset=Noise(), callbacks=[Telling()])
    there = folder.is_dir() and get_last_checkpoint(str(folder)) is not None
    trainer.train(resume_from_checkpoint=there or None)


def accelerate_(folder: Path, tell: Tell) -> None:
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
    bare = make_model()
    model, optimizer, batches = accelerator.prepare(
        bare, torch.optim.AdamW(bare.parameters(), lr=1e-4), torch.utils.data.DataLoader(Noise(), batch_size=BATCH)
    )
    steps = Steps()
    accelerator.register_for_checkpointing(steps)
    if list(folder.glob("checkpoints/checkpoint_*")):
        accelerator.load_state()
        accelerator.project_configuration.iteration = steps.done
    tell("resumed", steps.done, fingerprint(state_of(bare, optimizer.optimizer)))
    for batch in batches:
        accelerator.backward(F.mse_loss(model(batch["x"]), batch["labels"]))
        optimizer.step()
        optimizer.zero_grad()
        steps.done += 1
        tell.begin(steps.done, state_of(bare, optimizer.optimizer))
        accelerator.save_state()
        tell.end(steps.done)


def lightning_(folder: Path, tell: Tell) -> None:
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
            tell("resumed", self.global_step, fingerprint(now()))

    class Saving(ModelCheckpoint):
        def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
            tell.begin(trainer.global_step, now())
            super().on_train_batch_end(trainer, *args, **kwargs)
            tell.end(trainer.global_step)

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


CONTESTANTS: Mapping[str, Callable[[Path, Tell], None]] = {
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
