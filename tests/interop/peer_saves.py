"""Checkpoints that other programs write of a small training, and the losses of their next updates.

Each update has all samples, so that losses don't depend on the order of samples.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import small
from kit.worlds import in_world
from torch import Tensor, nn
from torch.nn import functional as F

SAMPLES, DONE, NEXT = 8, 2, 3
RATE, DECAY = 0.05, 0.1


class Texts(small.Texts):
    def __len__(self) -> int:
        return SAMPLES


def groups(net: nn.Module) -> list[dict[str, Any]]:
    """Matrices with weight decay, the others without."""
    parameters = list(net.parameters())
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": DECAY},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


def loss_of(net: nn.Module) -> Tensor:
    points, classes = small.points(SAMPLES).tensors
    return F.cross_entropy(net(points), classes)


def update(net: nn.Module, optimizer: torch.optim.Optimizer, schedule: Any = None) -> float:
    loss = loss_of(net)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if schedule is not None:
        schedule.step()
    return loss.item()


def made(seed: int = 0, kind: Callable[[], nn.Module] = small.Net) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(seed)
    net = kind()
    optimizer = torch.optim.AdamW(groups(net), lr=RATE)
    return net, optimizer, torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, DONE + NEXT)


Saved = tuple[dict[str, Tensor], list[float]]
"""Weights and moments in a checkpoint, and the losses of the next updates."""


def _held(net: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """Return weights, and moments as a run of Lockstep names them."""
    held: dict[str, Any] = dict(net.state_dict())
    for name, parameter in net.named_parameters():
        held |= {f"optimizer.{entry}.{name}": optimizer.state[parameter][entry] for entry in ("exp_avg", "exp_avg_sq")}
    whole = {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in held.items()}
    return {name: value.detach().clone() for name, value in whole.items()}


def _after(net: nn.Module, save: Callable[[], object], optimizer: Any, schedule: Any) -> Saved:
    for _ in range(DONE):
        update(net, optimizer, schedule)
    save()
    return _held(net, optimizer), [update(net, optimizer, schedule) for _ in range(NEXT)]


def plain(place: Path) -> Saved:
    net, optimizer, schedule = made()

    def save() -> None:
        content = {"model_state_dict": net.state_dict(), "optimizer_state_dict": optimizer.state_dict(), "epoch": 2}
        torch.save({**content, "scheduler": schedule.state_dict(), "loss": torch.tensor(0.5)}, place)

    return _after(net, save, optimizer, schedule)


def under_net(place: Path) -> Saved:
    net, optimizer, schedule = made()
    content = lambda: {"net": net.state_dict(), "opt": optimizer.state_dict(), "iter_num": DONE}  # noqa: E731
    return _after(net, lambda: torch.save(content(), place), optimizer, schedule)


def accelerate(place: Path) -> Saved:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    net, optimizer, schedule = accelerator.prepare(*made())
    return _after(net, lambda: accelerator.save_state(str(place)), optimizer, schedule)


def dcp(place: Path, *, flat: bool, top: bool = False) -> Saved:
    """As torch's tutorial does, or torchtitan: flat, in later versions with the weights at the top."""
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    net, optimizer, schedule = made()

    def save() -> None:
        weights, state = get_state_dict(net, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=flat))
        content = {"optimizer": state, "train_state": {"step": torch.tensor(DONE, dtype=torch.int32)}}
        checkpoint.save({**content, **(weights if top else {"model": weights})}, checkpoint_id=str(place), no_dist=True)

    return _after(net, save, optimizer, schedule)


def older_dcp(place: Path) -> Saved:
    """With metadata as torch wrote it up to 2.2: properties of another module, and no fields that came later."""
    from torch.distributed._shard.sharded_tensor.metadata import TensorProperties
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    saved = dcp(place, flat=False)
    metadata: Any = FileSystemReader(place).read_metadata()
    for entry in metadata.state_dict_metadata.values():
        if hasattr(entry, "properties"):
            entry.properties = TensorProperties(dtype=entry.properties.dtype)
    for info in metadata.storage_data.values():
        vars(info).pop("transform_descriptors", None)
    for later in ("storage_meta", "version"):
        vars(metadata).pop(later, None)
    (place / ".metadata").write_bytes(pickle.dumps(metadata))
    return saved


def accelerate_of_rank(place: Path, form: str) -> None:
    """FSDP2's state by Accelerate's own functions, which it calls on accelerators only; in each of two processes."""
    from accelerate import PartialState
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import save_fsdp_model, save_fsdp_optimizer
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo")
    own: Any = PartialState(cpu=True)
    net, _, _ = made()
    fully_shard(net)
    optimizer = torch.optim.AdamW(groups(net), lr=RATE)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, DONE + NEXT)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=form, cpu_offload=False)

    def save() -> None:
        save_fsdp_model(plugin, own, net, str(place))
        save_fsdp_optimizer(plugin, own, optimizer, net, str(place))

    torch.save(_after(net, save, optimizer, schedule), place / f"{own.process_index}.held")


def accelerate_of_two_ranks(place: Path, form: str) -> Saved:
    in_world(2, accelerate_of_rank, place, f"{form}_STATE_DICT")
    saved: Saved = torch.load(place / "0.held")
    return saved


def lightning(place: Path) -> Saved:
    from lightning.pytorch import LightningModule, Trainer

    net, optimizer, schedule = made()

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net
            self.save_hyperparameters({"width": 8})

        def training_step(self, batch: Any) -> Tensor:
            return loss_of(self.net)

        def configure_optimizers(self) -> Any:
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    module = Module()
    data = torch.utils.data.DataLoader(small.points(SAMPLES), batch_size=SAMPLES)
    words = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "accelerator": "cpu"}
    trainer = Trainer(max_epochs=DONE, enable_checkpointing=False, **words)
    trainer.fit(module, data)
    trainer.save_checkpoint(place)
    optimizer.zero_grad()  # Lightning does before an update
    return _held(net, optimizer), [update(net, optimizer, schedule) for _ in range(NEXT)]


def deepspeed_of_rank(place: Path, stage: int) -> Saved:
    """ZeRO, in each of two processes; `test_zero_import` compares its moments."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled first
    deepspeed.init_distributed("gloo", verbose=False)
    settings = {
        "train_micro_batch_size_per_gpu": SAMPLES // 2,
        "zero_optimization": {"stage": stage},
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
    }
    net, optimizer, schedule = made()
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, lr_scheduler=schedule, config=settings)
    points, classes = (whole.chunk(2)[engine.global_rank] for whole in small.points(SAMPLES).tensors)

    def step() -> float:
        loss = F.cross_entropy(engine(points), classes)
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone()
        torch.distributed.all_reduce(total)
        return total.item() / 2

    for _ in range(DONE):
        step()
    engine.save_checkpoint(str(place))
    weights = {name: safe_get_full_fp32_param(parameter) for name, parameter in engine.module.named_parameters()}
    held = {name: value.detach().clone().numpy() for name, value in weights.items()}
    return held, [step() for _ in range(NEXT)]  # type: ignore[return-value]


def deepspeed_of_two_ranks(place: Path, stage: int) -> Saved:
    held, losses = in_world(2, deepspeed_of_rank, place, stage)[0]
    return {name: torch.from_numpy(value) for name, value in held.items()}, losses


# --- continuing with a run's export -----------------------------------------------------------------------------------


def run_of_rank(settings: dict[str, Any], folder: Path) -> list[float]:
    """Train with Lockstep, save after some updates, and return the losses of the later ones; on each rank."""
    import lockstep
    from lockstep.checkpoint.local import LocalStorage
    from lockstep.resuming.checkpoints import Checkpoints
    from lockstep.resuming.resuming import Resume

    losses = []
    with lockstep.session(settings) as session:
        checkpoints = Checkpoints(session, LocalStorage(folder), {})
        checkpoints.begin(Resume())
        for report in session:
            losses.append(report.loss)
            if report.step == DONE:
                checkpoints.save()
        assert all(ended.failure is None for ended in checkpoints.finish())
    return losses[DONE:]


def from_plain(file: Path, kind: Callable[[], nn.Module] = small.Net) -> list[float]:
    net, _, _ = made(1, kind)
    content = torch.load(file, weights_only=True)
    net.load_state_dict(content["model_state_dict"])
    named, saved = dict(net.named_parameters()), content["optimizer_state_dict"]
    optimizer = torch.optim.AdamW(
        [{"params": [named[name] for name in g["param_names"]]} for g in saved["param_groups"]]
    )
    optimizer.load_state_dict(saved)
    assert (content["step"], content["samples"], content["epoch"]) == (DONE, DONE * SAMPLES, DONE)
    return _next_losses(net, optimizer)


def _next_losses(net: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for step in range(DONE, DONE + NEXT):
        for group in optimizer.param_groups:
            assert group["lr"] == pytest.approx(RATE * (1 - step / (DONE + NEXT))) or step > DONE
            group["lr"] = RATE * (1 - step / (DONE + NEXT))
        losses.append(update(net, optimizer))
    return losses


def from_accelerate(file: Path, kind: Callable[[], nn.Module] = small.Net) -> list[float]:
    from accelerate import Accelerator

    net, _, _ = made(1, kind)
    content = torch.load(file, weights_only=True)
    named, saved = dict(net.named_parameters()), content["optimizer_state_dict"]
    optimizer = torch.optim.AdamW(
        [{"params": [named[name] for name in g["param_names"]]} for g in saved["param_groups"]]
    )
    accelerator = Accelerator(cpu=True)
    net, optimizer = accelerator.prepare(net, optimizer)
    accelerator.unwrap_model(net).load_state_dict(content["model_state_dict"])
    optimizer.load_state_dict(saved)
    return _next_losses(net, optimizer)


def from_dcp(folder: Path, kind: Callable[[], nn.Module] = small.Net, *, top: bool = True) -> list[float]:
    """As torchtitan loads it; in later versions with the weights at the top."""
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

    net, optimizer, _ = made(1, kind)
    for group in optimizer.param_groups:
        group["initial_lr"] = RATE  # of a schedule
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    weights, state = get_state_dict(net, optimizer, options=options)
    content = {"optimizer": state, "train_state": {"step": torch.tensor(0)}}
    content |= weights if top else {"model": weights}
    checkpoint.load(content, checkpoint_id=str(folder), no_dist=True)
    weights = {name: content[name] for name in weights} if top else content["model"]
    set_state_dict(net, optimizer, model_state_dict=weights, optim_state_dict=content["optimizer"], options=options)
    assert content["train_state"]["step"] == DONE
    return _next_losses(net, optimizer)


# --- transformers' Trainer --------------------------------------------------------------------------------------------

LLAMA = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 24, "max_position_embeddings": 32, "num_key_value_heads": 2, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def trainer(folder: Path, resume: Path | None = None) -> list[float]:
    """Train to the end, with a checkpoint after two updates; return the losses of all updates."""
    from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

    torch.manual_seed(1 if resume else 0)
    words = dict(LLAMA)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(words.pop("model_type"), **words))
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=DONE + NEXT, save_steps=DONE, logging_steps=1, learning_rate=RATE,
        weight_decay=DECAY, per_device_train_batch_size=SAMPLES, max_grad_norm=0.0, report_to=[], disable_tqdm=True,
        lr_scheduler_type="linear", use_cpu=True,
    )  # fmt: skip
    worker = Trainer(model=model, args=arguments, train_dataset=Texts())
    worker.train(resume_from_checkpoint=None if resume is None else str(resume))
    return [row["loss"] for row in worker.state.log_history if "loss" in row]
