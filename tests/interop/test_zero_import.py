"""Checkpoints of DeepSpeed are imported bitwise identical; damaged or hostile ones are refused by name."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import small
from kit.commands import run_lockstep
from kit.failures import fails, gives
from kit.worlds import in_world
from safetensors.torch import load_file, save_file
from zero_saves import TAG, Save, save_all

import lockstep
from lockstep.checkpoint.local import LocalStorage
from lockstep.config.loading import validate
from lockstep.core.errors import ConfigError
from lockstep.interop.peers import import_weights
from lockstep.interop.runs import import_run
from lockstep.interop.zero_checkpoint import STAND_INS, _joined, read_zero
from lockstep.loop.session import components_of
from lockstep.models.weight_files import read_torch, read_weights
from lockstep.resuming.checkpoints import Checkpoints
from lockstep.resuming.resuming import Resume

if find_spec("deepspeed") is None:  # importing it takes seconds, and its ranks have it
    pytest.skip("deepspeed is not installed", allow_module_level=True)

ON_ANY_RANKS = [
    *(Save(f"{stage}-fp32", stage) for stage in (1, 2, 3)),
    *(Save(f"{stage}-one-element", stage, width=1) for stage in (1, 3)),
]
ON_TWO_RANKS = [
    *ON_ANY_RANKS,
    Save("0-fp32", 0),
    *(Save(f"{stage}-bf16", stage, "bf16") for stage in (0, 1, 2, 3)),
    Save("1-bf16-fp32-gradients", 1, "bf16", top={"data_types": {"grad_accum_dtype": "fp32"}}),
    Save("1-elastic", 1, zero={"elastic_checkpoint": True}),
    Save("2-round-robin", 2, zero={"round_robin_gradients": True}, width=9),
    Save("3-sub-groups", 3, zero={"sub_group_size": 10}, width=9),
]
SAVES = {1: ON_ANY_RANKS, 2: ON_TWO_RANKS, 3: ON_ANY_RANKS}
EACH = [(ranks, save) for ranks, several in SAVES.items() for save in several]


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save with DeepSpeed's engines to RANKS/NAME."""
    folder = tmp_path_factory.mktemp("saves")
    for ranks, several in SAVES.items():
        in_world(ranks, save_all, several, folder / str(ranks))
    return folder


@pytest.fixture
def copied(saves: Path, tmp_path: Path) -> Callable[[str], Path]:
    """Copy a save of two ranks, to damage it; return the folder of its tag."""
    return lambda name: Path(shutil.copytree(saves / "2" / name, tmp_path / "saved")) / TAG


@pytest.mark.parametrize(("ranks", "save"), EACH, ids=[f"{ranks}-ranks-{save.name}" for ranks, save in EACH])
def test_weights_are_bitwise_identical_to_the_engine_s(saves: Path, ranks: int, save: Save, tmp_path: Path) -> None:
    folder = saves / str(ranks) / save.name
    held = {name: value for name, value in torch.load(folder.with_suffix(".held")).items() if " " not in name}
    imported = import_weights(folder, tmp_path / "out")
    tensors = load_file(imported.file)
    assert set(tensors) == set(held)
    for name, value in held.items():
        assert tensors[name].dtype == value.dtype, name
        assert torch.equal(tensors[name], value), name
    assert tensors["body.weight"].dtype == (torch.float32 if save.stage or save.compute == "fp32" else torch.bfloat16)
    stage = f" ZeRO stage {save.stage} on {ranks} rank" if save.stage else ""
    assert f"{len(held)} tensors of {folder / TAG}: DeepSpeed{stage}" in str(imported)
    assert {"the optimizer's state", "mine", "global_steps"} <= set(imported.skipped)


# --- a run ------------------------------------------------------------------------------------------------------------


def config_for(save: Save, **sections: Any) -> dict[str, Any]:
    model = {
        "kind": "custom",
        "target": "interop.zero_saves:Net",
        "arguments": {"width": save.width},
        "freeze": ["still.*"],
    }
    data = {"train": {"kind": "custom", "target": "interop.zero_saves:Sentences"}}
    return {**small.config(), "model": model, "data": data, "batch": {"global_size": 4}, **sections}


WITH_MOMENTS = [(ranks, save) for ranks, save in EACH if save.stage > 0]


@pytest.mark.parametrize(
    ("ranks", "save"), WITH_MOMENTS, ids=[f"{ranks}-ranks-{save.name}" for ranks, save in WITH_MOMENTS]
)
def test_a_run_starts_with_the_moments_and_steps(saves: Path, ranks: int, save: Save, tmp_path: Path) -> None:
    folder = saves / str(ranks) / save.name
    held = torch.load(folder.with_suffix(".held"))
    config = validate(config_for(save)).config
    imported = import_run(folder, tmp_path / "run", config, "mine")
    assert (imported.source, imported.steps) == (folder / TAG, 2)
    with lockstep.session(config) as session:
        checkpoints = Checkpoints(session, LocalStorage(tmp_path / "run" / "checkpoints"), {})
        checkpoints.begin(Resume())
        assert checkpoints.resumed_from == 2
        assert (session.progress.steps, session.progress.samples) == (2, 4 * ranks)  # two samples a rank and update
        state = session.state().tensors
        for name, value in components_of(session).sharding.state.model.state_dict().items():
            assert torch.equal(value, held[name].to(value.dtype)), name
        moments = {key for key in held if " " in key}
        assert {key for key in state if key.startswith("optimizer.exp")} == {
            f"optimizer.{key.replace(' ', '.')}" for key in moments
        }
        for key in moments:
            entry, name = key.split(" ")
            assert torch.equal(state[f"optimizer.{entry}.{name}"], held[key]), key
            assert state[f"optimizer.step.{name}"] == 2


@pytest.mark.parametrize("strategy", ["single", "deepspeed"])
def test_an_imported_run_can_be_trained(saves: Path, tmp_path: Path, strategy: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(json.dumps(config_for(ON_TWO_RANKS[0], run={"steps": 5}, parallel={"strategy": strategy})))

    def lockstep_output(*words: object) -> str:
        done = run_lockstep(*words, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    output = lockstep_output("ckpt", "import", saves / "2" / "3-fp32", "run", "--config", file, "--optim.lr", "0.02")
    assert gives(output.replace("\n", " "), "2 steps", "step 2", "sample 8")
    assert "resumes from step 2" in lockstep_output("train", "run")
    assert gives(lockstep_output("ckpt", "audit", "run"), "complete")
    saved = load_file(next((tmp_path / "run/checkpoints/step-00000005").glob("*.safetensors")))
    assert {tensor.max().item() for key, tensor in saved.items() if "optimizer.step." in key} == {5.0}


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"optim": {"name": "sgd", "lr": 0.1}}, "keeps exp_avg, exp_avg_sq of .*, but sgd keeps momentum_buffer"),
        ({"model": {"kind": "custom", "target": "kit.small:Net"}}, "missing: inner.weight"),
        ({"model": {"kind": "custom", "target": "zero_saves:Net", "freeze": ["still.*", "body.*"]}}, "train body.bias"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(
    saves: Path, tmp_path: Path, sections: dict[str, Any], message: str
) -> None:
    config = validate(config_for(ON_TWO_RANKS[0], **sections)).config
    with pytest.raises(ConfigError, match=message):
        import_run(saves / "2" / "1-fp32", tmp_path / "run", config, "mine")
    assert not (tmp_path / "run").exists()


def test_moments_of_another_optimizer_are_refused(copied: Callable[[str], Path], tmp_path: Path) -> None:
    folder = copied("2-fp32")

    def rename(contents: Any) -> None:
        for state in contents["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
            state["momentum_buffer"] = state.pop("exp_avg")

    changed(folder / OPTIM.format(1), rename)
    config = validate(config_for(ON_TWO_RANKS[0])).config
    with fails(ConfigError, OPTIM.format(1), "Adam or AdamW", "momentum_buffer"):
        import_run(folder, tmp_path / "run", config, "mine")


def test_different_numbers_of_steps_are_refused(copied: Callable[[str], Path], tmp_path: Path) -> None:
    folder = copied("2-fp32")

    def advance(contents: Any) -> None:
        for state in contents["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
            state["step"] += 1

    changed(folder / OPTIM.format(1), advance)
    config = validate(config_for(ON_TWO_RANKS[0])).config
    with fails(ConfigError, "steps: 2, 3"):
        import_run(folder, tmp_path / "run", config, "mine")


def test_a_folder_that_is_not_empty_is_refused(saves: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").touch()
    with fails(ConfigError, tmp_path, "new folder"):
        import_run(saves / "2" / "1-fp32", tmp_path, validate(config_for(ON_TWO_RANKS[0])).config, "mine")


def test_a_checkpoint_folder_of_another_run_is_refused(saves: Path, tmp_path: Path) -> None:
    kept = {"folder": str(tmp_path / "kept")}
    config = validate(config_for(ON_TWO_RANKS[0], checkpoint=kept)).config
    import_run(saves / "2" / "1-fp32", tmp_path / "one", config, "mine")
    before = sorted(path.name for path in (tmp_path / "kept").iterdir())
    with fails(ConfigError, tmp_path / "kept", key="checkpoint.folder"):
        import_run(saves / "2" / "2-fp32", tmp_path / "two", config, "mine")
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == before
    assert not (tmp_path / "two").exists()


# --- refused checkpoints ----------------------------------------------------------------------------------------------

OPTIM = "zero_pp_rank_{}_mp_rank_00_optim_states.pt"
MODEL = "mp_rank_00_model_states.pt"


def refused(folder: Path, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        import_weights(folder, folder.parent / "out")
    assert not (folder.parent / "out").exists()


def changed(file: Path, change: Callable[[Any], object]) -> None:
    """Change the contents of a file of torch."""
    contents = torch.load(file, weights_only=False)
    change(contents)
    torch.save(contents, file)


class Hostile:
    """An object that is pickled as a call."""

    def __init__(self, function: Any, *arguments: object) -> None:
        self._call = function, arguments

    def __reduce__(self) -> Any:
        return self._call


@pytest.mark.parametrize("rank", [None, 0, 1])
def test_a_hostile_file_is_refused_by_name(copied: Callable[[str], Path], rank: int | None) -> None:
    folder = copied("2-fp32")
    mark = folder / "executed"
    file = folder / (MODEL if rank is None else OPTIM.format(rank))
    changed(file, lambda contents: contents.update(more=Hostile(os.system, f"touch {mark}")))
    refused(folder, rf"{file.name} needs posix\.system to be unpickled.*\n  python -m deepspeed\.utils\.zero_to_fp32")
    assert not mark.exists()


def test_a_class_of_deepspeed_that_is_not_listed_is_refused(copied: Callable[[str], Path]) -> None:
    from deepspeed.runtime.fp16.loss_scaler import LossScalerBase

    folder = copied("3-fp32")
    changed(folder / OPTIM.format(1), lambda contents: contents.update(more=LossScalerBase(2.0)))
    refused(folder, r"needs deepspeed\.runtime\.fp16\.loss_scaler\.LossScalerBase to be unpickled")


def test_the_loss_scaler_of_fp16_is_ignored(copied: Callable[[str], Path], saves: Path) -> None:
    """Put an fp16 loss scaler into another engine's file, because no engine trains in fp16 on a CPU."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    scaler = DynamicLossScaler(2**16, 2.0, 1000, 1.0, 2, False, dtype=torch.float16)
    folder = copied("2-bf16")
    for file in folder.glob("*_optim_states.pt"):
        changed(file, lambda contents: contents["optimizer_state_dict"].update(loss_scaler=scaler))
    tensors, expected = read_zero(folder).weights.tensors, read_zero(saves / "2" / "2-bf16").weights.tensors
    assert {name: tensor.tolist() for name, tensor in tensors.items()} == {
        name: tensor.tolist() for name, tensor in expected.items()
    }


def test_a_stand_in_keeps_numbers_at_most(tmp_path: Path) -> None:
    assert all(not hasattr(stand_in(), "__dict__") for stand_in in STAND_INS.values())
    address = STAND_INS["deepspeed.utils.tensor_fragment.fragment_address"]()
    address.__setstate__({"start": 0, "numel": 4, "__class__": Hostile, "more": 1})
    assert (type(address).__name__, address.place) == ("FragmentAddress", (0, 4))


def test_stand_ins_apply_to_deepspeed_checkpoints_only(saves: Path) -> None:
    file = saves / "2" / "2-fp32" / TAG / OPTIM.format(0)
    read_zero(file.parent)
    with pytest.raises(ConfigError, match=r"deepspeed\..* unpickled"):
        read_torch(file)


def test_a_missing_file_of_a_rank_is_named(copied: Callable[[str], Path]) -> None:
    folder = copied("2-fp32")
    (folder / OPTIM.format(1)).unlink()
    refused(folder.parent, rf"{TAG} was saved by 2 ranks and lacks {OPTIM.format(1)}; copy")


def test_a_missing_model_of_a_rank_is_named(copied: Callable[[str], Path]) -> None:
    folder = copied("3-fp32")
    (folder / f"zero_pp_rank_0_{MODEL}").unlink()
    refused(folder, rf"was saved by 2 ranks and lacks zero_pp_rank_0_{MODEL}")


@pytest.mark.parametrize("lost", ["optim", "model"])
def test_a_missing_kind_of_file_is_named(copied: Callable[[str], Path], lost: str) -> None:
    folder = copied("2-fp32")
    for file in folder.glob(f"*_{lost}_states.pt"):
        file.unlink()
    refused(folder, r"has no \*_optim_states\.pt, where ZeRO keeps" if lost == "optim" else "with their shapes")


def test_a_file_of_a_further_rank_is_refused(copied: Callable[[str], Path]) -> None:
    folder = copied("1-fp32")
    shutil.copy(folder / OPTIM.format(1), folder / OPTIM.format(2))
    refused(folder, "was saved by 2 ranks but has files of 3; move the files of another save away")


def test_files_of_two_saves_are_refused(copied: Callable[[str], Path], saves: Path) -> None:
    folder = copied("2-fp32")
    shutil.copy(saves / "2" / "1-fp32" / TAG / OPTIM.format(1), folder)
    refused(folder, "has files of different saves: .*stage 2 on 2 ranks.* and .*stage 1 on 2 ranks")


@pytest.mark.parametrize("size", [0, 100, 3000])
def test_a_truncated_file_is_refused(copied: Callable[[str], Path], size: int) -> None:
    folder = copied("2-fp32")
    os.truncate(folder / OPTIM.format(1), size)
    refused(folder, f"{OPTIM.format(1)} isn't a file of torch.save, or is damaged")


@pytest.mark.parametrize(("stage", "group"), [(2, 0), (2, 1), (3, 0)])
def test_shapes_that_are_too_large_are_refused(copied: Callable[[str], Path], stage: int, group: int) -> None:
    folder = copied(f"{stage}-fp32")
    file = folder / (MODEL if stage == 2 else f"zero_pp_rank_0_{MODEL}")

    def grow(contents: Any) -> None:
        shapes = contents["param_shapes"][group]
        shapes[list(shapes)[-1]] = torch.Size([2**20, 2**10])

    changed(file, grow)
    refused(folder, r"is \[1048576, 1024\], but .* values of it exist")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("param_shapes", None, "isn't in DeepSpeed's format"),
        ("param_shapes", [], "has 2 groups of values, but mp_rank_00_model_states.pt has 0"),
        ("param_shapes", [{"a": (-1,)}, {}], "but 0 values of it exist"),
        ("module", [1], "isn't in DeepSpeed's format"),
        ("module", {"a": 3}, "isn't in DeepSpeed's format"),
        ("shared_params", ["a"], "isn't in DeepSpeed's format"),
        ("frozen_param_fragments", {}, "still.weight"),
    ],
)
def test_a_malformed_model_file_is_refused(copied: Callable[[str], Path], key: str, value: Any, message: str) -> None:
    folder = copied("2-fp32")
    changed(folder / MODEL, lambda contents: contents.update({key: value}))
    refused(folder, message)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("partition_count", "two", "isn't in DeepSpeed's format"),
        ("partition_count", [2, 3], "sharded over different ranks"),
        ("single_partition_of_fp32_groups", [torch.ones(3)], "has 1 groups of values"),
        (
            "single_partition_of_fp32_groups",
            [torch.ones(3, 2), torch.ones(2)],
            r"holds a torch.float32 of shape \[3, 2\]",
        ),
        ("param_slice_mappings", [{}, {}], "values of it exist"),
    ],
)
def test_a_malformed_optimizer_file_is_refused(
    copied: Callable[[str], Path], key: str, value: Any, message: str
) -> None:
    folder = copied("2-fp32")
    changed(folder / OPTIM.format(0), lambda contents: contents["optimizer_state_dict"].update({key: value}))
    refused(folder, message)


@pytest.mark.parametrize(
    ("latest", "message"),
    [
        ("global_step9", f"names global_step9, which isn't there .*{TAG}"),
        ("../elsewhere", "doesn't name a folder beside it: '../elsewhere'"),
        ("", "doesn't name a folder beside it: ''"),
    ],
)
def test_latest_must_name_a_checkpoint(copied: Callable[[str], Path], latest: str, message: str) -> None:
    folder = copied("1-fp32")
    (folder.parent / "latest").write_text(latest)
    refused(folder.parent, message)
    assert "stage 1" in read_zero(folder).description


def test_init_from_reports_how_to_import_it(saves: Path) -> None:
    for folder in (saves / "2" / "2-fp32", saves / "2" / "2-fp32" / TAG):
        with pytest.raises(ConfigError, match=rf"`lockstep ckpt import {folder} WEIGHTS"):
            read_weights(folder)


def test_full_weights_in_the_folder_are_read_if_there_is_no_tag(copied: Callable[[str], Path]) -> None:
    folder = copied("1-bf16").parent
    save_file({"whole": torch.ones(3)}, folder / "model.safetensors")
    assert import_weights(folder, folder / "out").tensors == 9
    shutil.rmtree(folder / TAG)
    assert import_weights(folder, folder / "out", force=True).tensors == 1


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", r"empty has none of model\.safetensors")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mp_rank_01_model_states.pt", "tensor parallelism"),
        ("layer_00-model_00-model_states.pt", "pipelines and experts"),
        ("layer_1_expert_0_mp_rank_00_model_states.pt", "pipelines and experts"),
    ],
)
def test_model_parallel_checkpoints_are_refused(copied: Callable[[str], Path], name: str, message: str) -> None:
    folder = copied("1-fp32")
    shutil.copy(folder / MODEL, folder / name)
    refused(folder, rf"{name}: .*{message}")


def test_the_docs_list_the_stand_ins() -> None:
    text = (Path(__file__).parents[2] / "docs" / "weights.md").read_text(encoding="utf-8")
    table = text.partition("<!-- stand-ins -->")[2].partition("<!-- end of stand-ins -->")[0]
    assert re.findall(r"^\| `(\S+)` \|", table, re.MULTILINE) == list(STAND_INS)


def test_a_scalar_parameter_is_joined() -> None:
    assert _joined([torch.tensor([2.5])], (), Path("a"), "scale").item() == 2.5
