"""The optimizer and progress of a checkpoint, in the formats with which other programs continue.

torch   {"model_state_dict", "optimizer_state_dict", "step", "samples", "epoch"}
hf      optimizer.pt, scheduler.pt, trainer_state.json beside the model, as transformers' Trainer reads them
dcp     model.NAME and NAME, optimizer.state.NAME.exp_avg, optimizer.param_groups.NAME.lr, train_state.step
"""

from __future__ import annotations

import json
import pickle
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.checkpoint.manifest import Manifest
from lockstep.config.schema import Config
from lockstep.core.errors import ConfigError
from lockstep.core.progress import Progress
from lockstep.core.records import DataFacts
from lockstep.models.transformers_models import trainer_decays
from lockstep.optim.groups import parameter_groups
from lockstep.plan.schedule import fraction_done, horizon, learning_rate
from lockstep.training.ledger import segments_in

OPTIMIZER = "optimizer."
_RULES = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}


def refuse_other_optimizers(config: Config) -> None:
    """Raise ConfigError if torch has no optimizer that continues with the state."""
    if config.optim.target is not None or config.optim.name not in _RULES:
        raise ConfigError(
            f"optimizer state can be exported of optim.name {', '.join(_RULES)}; this run's is "
            f"{config.optim.target or config.optim.name}. Export the weights only: leave out --with optimizer"
        )


@dataclass(frozen=True)
class ExportedState:
    """A checkpoint's optimizer and progress.

    Attributes:
        tensors: The model's, then the optimizer's (`optimizer.exp_avg.NAME`), whole.
    """

    config: Config
    manifest: Manifest
    tensors: Mapping[str, Tensor]

    @property
    def progress(self) -> Progress:
        return Progress(**self.manifest.state["progress"])

    @property
    def epoch(self) -> float:
        return float(self.progress.samples / self._order.epoch_samples)

    @property
    def steps(self) -> int | None:
        """Updates of the whole run."""
        config = self.config
        facts = DataFacts(self._order.samples, None)
        return horizon(config.run, config.batch.global_size, facts, config.data.drop_last)

    @property
    def _order(self) -> Any:
        return segments_in(self.manifest.state["ledger"])[-1].order

    def optimizer(self, halves: Sequence[Sequence[str]] | None = None) -> torch.optim.Optimizer:
        """Return torch's optimizer with this state, in the run's parameter groups.

        Args:
            halves: Parameters of each group; None: the run's groups.
        """
        optim, trained = self.config.optim, {key.split(".", 2)[2] for key in self.tensors if key.startswith(OPTIMIZER)}
        parameters = {
            name: nn.Parameter(tensor, requires_grad=name in trained)
            for name, tensor in self.tensors.items()
            if not name.startswith(OPTIMIZER) and tensor.is_floating_point()
        }
        groups = parameter_groups(parameters.items(), optim)
        done = fraction_done(self.config.run, self.progress, self._order.epoch_samples)
        rate = learning_rate(optim, self.config.schedule, done, self.progress.steps, self.steps)
        if halves is not None:
            groups = _regrouped(groups, [[name for name in half if name in trained] for half in halves])
        torch_groups = [
            {
                "params": [(name, parameters[name]) for name in group["names"]],
                "lr": rate * group["lr_scale"],
                "initial_lr": optim.lr * group["lr_scale"],
                "weight_decay": group["weight_decay"],
            }
            for group in groups
        ]
        own: dict[str, Any] = {"betas": optim.betas, "eps": optim.eps}
        if optim.name == "sgd":
            own = {"momentum": optim.momentum, "nesterov": optim.nesterov}
        rule: Any = _RULES[optim.name]
        optimizer: torch.optim.Optimizer = rule(torch_groups, lr=optim.lr, **own)
        for key, tensor in self.tensors.items():
            if key.startswith(OPTIMIZER):
                _, entry, name = key.split(".", 2)
                optimizer.state[parameters[name]][entry] = tensor
        return optimizer

    def save_torch(self, model: Mapping[str, Tensor], file: Any) -> None:
        """Write a file of torch that any loop reads."""
        records = {"step": self.progress.steps, "samples": self.progress.samples, "epoch": self.epoch}
        state = self.optimizer().state_dict()
        torch.save({"model_state_dict": model, "optimizer_state_dict": state, **records}, file)

    def save_for_trainer(self, folder: Path, model: nn.Module) -> None:
        """Write what `Trainer.train(resume_from_checkpoint=folder)` reads beside the model."""
        decays, names = trainer_decays(model), [name for name, _ in model.named_parameters()]
        halves = [[name for name in names if (name in decays) is first] for first in (True, False)]
        optimizer, steps = self.optimizer(halves), self.progress.steps
        torch.save(optimizer.state_dict(), folder / "optimizer.pt")
        rates = {key: [group[key] for group in optimizer.param_groups] for key in ("initial_lr", "lr")}
        schedule = {"base_lrs": rates["initial_lr"], "_last_lr": rates["lr"], "last_epoch": steps}
        torch.save(
            {**schedule, "_step_count": steps + 1, "lr_lambdas": [None] * len(rates["lr"])}, folder / "scheduler.pt"
        )
        state = {"global_step": steps, "epoch": self.epoch, "max_steps": self.steps or 0, "log_history": []}
        state |= {"train_batch_size": self.config.batch.global_size, "logging_steps": 1}
        state["stateful_callbacks"] = {"TrainerControl": {"args": {}, "attributes": {}}}  # it saves into it
        (folder / "trainer_state.json").write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")

    def save_dcp(self, model: Mapping[str, Tensor], folder: Path) -> None:
        """Write a checkpoint of torch.distributed.checkpoint; weights under both of torchtitan's names for them."""
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.state_dict_saver import save

        saved = self.optimizer().state_dict()
        flat: dict[str, Any] = {}
        for group in saved["param_groups"]:
            for number, name in zip(group["params"], group["param_names"], strict=True):
                flat |= {f"state.{name}.{entry}": value for entry, value in saved["state"].get(number, {}).items()}
                settings = {key: value for key, value in group.items() if not key.startswith("param")}
                flat |= {f"param_groups.{name}.{key}": value for key, value in settings.items()}
        state = {"model": dict(model), "optimizer": flat, "train_state": {"step": torch.tensor(self.progress.steps)}}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about a single process
            save(state, checkpoint_id=folder, no_dist=True)
        metadata: Any = FileSystemReader(folder).read_metadata()
        for index, place in list(metadata.storage_data.items()):
            name = index.fqn.removeprefix("model.")
            if name != index.fqn:
                metadata.storage_data[type(index)(name, index.offset, index.index)] = place
                metadata.state_dict_metadata[name] = metadata.state_dict_metadata[index.fqn]
                metadata.planner_data[name] = (name,)
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def _regrouped(groups: list[dict[str, Any]], halves: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """Return the groups as Trainer makes them. Raises ConfigError if their parameters have different settings."""
    by_name = {name: group for group in groups for name in group["names"]}
    regrouped = []
    for half in halves:
        settings = {(by_name[name]["lr_scale"], by_name[name]["weight_decay"]) for name in half} or {(1.0, 0.0)}
        if len(settings) > 1:
            raise ConfigError(
                "--with optimizer: Trainer has one group of matrices and one of biases and norms, but this run has "
                "several weight decays or rates within one of them; use --format torch or dcp"
            )
        ((scale, decay),) = settings
        regrouped.append({"names": half, "lr_scale": scale, "weight_decay": decay})
    return regrouped
