"""Each optimizer updates as torch's (or its paper's) does, and a discarded update changes nothing."""

import copy
import subprocess
import sys
import weakref
from typing import get_args

import pytest
import torch
from kit.failures import fails
from torch import is_tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import lockstep.optim.adafactor
import lockstep.optim.chunks
from lockstep.config.schema import Optim, ParameterRule
from lockstep.core.errors import ConfigError, RunFailed
from lockstep.optim import fused, stepping
from lockstep.optim.groups import parameter_groups, user_groups
from lockstep.optim.optimizers import _OF_PACKAGES, adapt_optimizer, build_optimizer
from lockstep.plan.optimizers import OPTIMIZERS

OPTIMS = {
    "adamw": Optim(name="adamw", weight_decay=0.1),
    "adam": Optim(name="adam", weight_decay=0.1),
    "sgd": Optim(name="sgd", weight_decay=0.1),
    "sgd without momentum": Optim(name="sgd", momentum=0.0),
    "sgd with nesterov": Optim(name="sgd", nesterov=True),
    "lion": Optim(name="lion", weight_decay=0.1, betas=(0.9, 0.99)),
    "muon": Optim(name="muon", weight_decay=0.1),
    "adafactor": Optim(name="adafactor", weight_decay=0.1),
}
NAMES = list(OPTIMS)


def test_torchs_compiler_is_not_imported_by_a_run_nor_by_building_an_optimizer():
    """Importing it takes longer than importing torch."""
    code = (
        "import sys; import lockstep.training.job; import torch; from lockstep.config.schema import Optim; "
        "from lockstep.optim.optimizers import build_optimizer; from lockstep.optim.groups import parameter_groups; "
        "named = list(torch.nn.Linear(2, 2).named_parameters()); "
        "[build_optimizer(optim, parameter_groups(named, optim)) for optim in (Optim(), Optim(name='sgd'))]; "
        "plain = torch.optim.Optimizer.add_param_group.__wrapped__; "
        "print('torch._dynamo' in sys.modules, '__dynamo_disable' in vars(plain))"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout == "False False\n"


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3), nn.LayerNorm(3))


def build(model, optim, compute=None):
    return build_optimizer(optim, parameter_groups(model.named_parameters(), optim), compute=compute)


def set_gradients(model, seed, scale=1.0, without=()):
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        grad = torch.randn(parameter.shape, generator=generator) * scale
        parameter.grad = None if name in without else grad


def weights(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def assert_same(left, right):
    """Check that the tensors are bitwise identical, NaN included."""
    torch.testing.assert_close(left, right, rtol=0, atol=0, equal_nan=True)


# --- compared with torch ------------------------------------------------------------------------------------------


def reference(name, model):
    """Return torch's optimizer with the same groups: only matrices have weight decay."""
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": OPTIMS[name].weight_decay},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    make = {
        "adamw": lambda: torch.optim.AdamW(groups),
        "adam": lambda: torch.optim.Adam(groups),
        "sgd": lambda: torch.optim.SGD(groups, momentum=0.9),
        "sgd without momentum": lambda: torch.optim.SGD(groups),
        "sgd with nesterov": lambda: torch.optim.SGD(groups, momentum=0.9, nesterov=True),
        "adafactor": lambda: torch.optim.Adafactor(groups),
    }
    return make[name]()


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd", "sgd without momentum", "sgd with nesterov", "adafactor"])
def test_updates_are_the_same_as_torchs(name):
    model, reference_model = make_model(), make_model()
    optimizer, oracle = build(model, OPTIMS[name]), reference(name, reference_model)
    for step in range(20):
        rate = 0.01 * (step + 1)
        set_gradients(model, step, scale=3.0)
        set_gradients(reference_model, step, scale=3.0 / 8.0)
        optimizer.update(rate, 8.0, True)
        for group in oracle.param_groups:
            group["lr"] = rate
        oracle.step()
    torch.testing.assert_close(weights(model), weights(reference_model), rtol=1e-5, atol=1e-6)


def test_muon_updates_hidden_matrices_as_torch_does_and_the_rest_by_adamw():
    model, reference_model = make_model(), make_model()
    optim = OPTIMS["muon"]
    optimizer = build(model, optim, torch.bfloat16)
    matrices = [p for p in reference_model.parameters() if p.dim() == 2]
    muon = torch.optim.Muon(matrices, 0.01, optim.weight_decay, optim.momentum, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW([p for p in reference_model.parameters() if p.dim() != 2], 0.01, weight_decay=0.0)
    for step in range(5):
        set_gradients(model, step, scale=4.0)
        set_gradients(reference_model, step)
        optimizer.update(0.01, torch.tensor(4.0, dtype=torch.float64), torch.tensor(True))
        muon.step()
        adamw.step()
    torch.testing.assert_close(weights(model), weights(reference_model), rtol=1e-5, atol=1e-6)


def test_muon_in_fp32_makes_no_more_of_rounding_than_rounding():
    """Strategies sum gradients in different orders."""
    weights = []
    for off in (0.0, 3e-7):
        generator, parameter = torch.Generator().manual_seed(0), nn.Parameter(torch.zeros(96, 128))
        optimizer = build_optimizer(OPTIMS["muon"], parameter_groups([("layer.weight", parameter)], OPTIMS["muon"]))
        for _ in range(3):
            grad, noise = torch.randn(2, 96, 128, generator=generator)
            parameter.grad = grad * (1 + off * noise)
            optimizer.update(0.1, 1.0, True)
        weights.append(parameter.detach())
    assert (weights[1] - weights[0]).abs().max() < 1e-5 * weights[0].abs().max()


def test_lion_follows_its_paper():
    parameter = nn.Parameter(torch.tensor([[1.0, -2.0], [3.0, -4.0]]))
    optim = OPTIMS["lion"]
    optimizer = build_optimizer(optim, parameter_groups([("w", parameter)], optim))
    value, moment = parameter.detach().double().clone(), torch.zeros(2, 2, dtype=torch.float64)
    for step in range(12):
        grad = torch.randn(2, 2, generator=torch.Generator().manual_seed(step))
        parameter.grad = grad.clone()
        optimizer.update(0.01, 1.0, True)
        direction = torch.sign(0.9 * moment + 0.1 * grad.double())
        value = value - 0.01 * (direction + 0.1 * value)
        moment = 0.99 * moment + 0.01 * grad.double()
    torch.testing.assert_close(parameter.detach().double(), value, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(optimizer.state_dict()["parameters"]["w"]["exp_avg"].double(), moment)


@pytest.mark.parametrize("name", NAMES)
def test_the_lr_scale_of_a_rule_scales_the_learning_rate(name):
    optim = OPTIMS[name].model_copy(update={"rules": (ParameterRule(match=("0.*",), lr_scale=0.0),)})
    model = make_model()
    optimizer, before = build(model, optim), weights(model)
    set_gradients(model, 1)
    optimizer.update(0.1, 1.0, True)
    after = weights(model)
    assert {key for key in after if torch.equal(after[key], before[key])} == {"0.weight", "0.bias"}
    assert {(group["lr_scale"], group["lr"]) for group in optimizer.groups} == {(0.0, 0.0), (1.0, 0.1)}


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_cleared_by_an_update(name):
    model = make_model()
    optimizer = build(model, OPTIMS[name])
    for keep in (True, False, torch.tensor(True), torch.tensor(False)):
        set_gradients(model, 1)
        optimizer.update(0.1, 2.0, keep)
        assert all(parameter.grad is None for parameter in model.parameters())


# --- discarded updates --------------------------------------------------------------------------------------------


@pytest.fixture(params=["host-gated", "device-gated"])
def gating(request, monkeypatch):
    """Run a test also as on a GPU, where the host doesn't read the tensor `keep`."""
    if request.param == "device-gated":
        for module in (fused, stepping):
            monkeypatch.setattr(module, "decided", lambda keep: keep)
    return request.param


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1.0])
@pytest.mark.parametrize("name", NAMES)
def test_a_discarded_update_changes_nothing(name, bad, gating):
    """Compare parameters, moments and step counts, at the first update and later."""
    model = make_model()
    optimizer = build(model, OPTIMS[name])
    for step in range(3):
        before, state = weights(model), copy.deepcopy(optimizer.state_dict())
        set_gradients(model, step, scale=bad)
        optimizer.update(0.1, torch.tensor(0.5), torch.tensor(False))
        assert_same(weights(model), before)
        assert_same(optimizer.state_dict(), state)
        set_gradients(model, step)
        optimizer.update(0.1, torch.tensor(1.0), torch.tensor(True))
        assert not torch.equal(weights(model)["0.weight"], before["0.weight"])


@pytest.mark.parametrize("name", NAMES)
def test_discarded_updates_do_not_change_later_ones(name, gating):
    undisturbed, disturbed = make_model(), make_model()
    first, second = build(undisturbed, OPTIMS[name]), build(disturbed, OPTIMS[name])
    for step in range(6):
        set_gradients(undisturbed, step)
        first.update(0.1, torch.tensor(2.0), torch.tensor(True))
        for scale in (float("nan"), 1e30):
            set_gradients(disturbed, 100 + step, scale)
            second.update(0.1, torch.tensor(2.0), torch.tensor(False))
        set_gradients(disturbed, step)
        second.update(0.1, torch.tensor(2.0), torch.tensor(True))
    assert_same(weights(disturbed), weights(undisturbed))
    assert_same(second.state_dict(), first.state_dict())


class Watched(TorchDispatchMode):
    """Refuses operations that make the host wait, and measures the bytes of the tensors that were made meanwhile."""

    def __init__(self):
        super().__init__()
        self.peak = self._live = 0
        self._seen = weakref.WeakKeyDictionary()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default), func
        known = {tensor.untyped_storage().data_ptr() for tensor in tree_leaves((args, kwargs)) if is_tensor(tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            storage = tensor.untyped_storage() if is_tensor(tensor) else None
            if storage is not None and storage.data_ptr() not in known and storage not in self._seen:
                self._seen[storage] = True
                self._live += storage.nbytes()
                weakref.finalize(storage, self._freed, storage.nbytes())
        self.peak = max(self.peak, self._live)
        return result

    def _freed(self, size):
        self._live -= size


def test_copies_and_waits_are_noticed():
    tensors = [torch.ones(100) for _ in range(3)]
    with Watched() as watched:
        copies = [tensor.clone() for tensor in tensors]
        del copies
        torch.ones(100)
    assert watched.peak == 1200
    with pytest.raises(AssertionError, match="_local_scalar_dense"), Watched():
        tensors[0][0].item()


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "discarded"])
@pytest.mark.parametrize("name", NAMES)
def test_an_update_that_the_device_gates_copies_nothing_and_does_not_wait(name, kept, monkeypatch):
    """Matrices are larger than a chunk; what Muon needs for its iteration is that of one matrix in bf16."""
    for module in (fused, stepping):
        monkeypatch.setattr(module, "decided", lambda keep: keep)
    for module in (lockstep.optim.chunks, lockstep.optim.adafactor):
        monkeypatch.setattr(module, "CHUNK_BYTES", 40_000)
    model = nn.Sequential(*(nn.Linear(160, 160) for _ in range(6)))
    optimizer = build(model, OPTIMS[name], torch.bfloat16)
    sizes = [parameter.nbytes for parameter in model.parameters()]
    limit = max(sizes) * (2.5 if name == "muon" else 1)
    set_gradients(model, 1)
    optimizer.update(0.1, torch.tensor(2.0), torch.tensor(True))
    before, state = weights(model), copy.deepcopy(optimizer.state_dict())
    set_gradients(model, 2, scale=1.0 if kept else float("nan"))
    with Watched() as watched:
        optimizer.update(0.1, torch.tensor(2.0), torch.tensor(kept))
    assert watched.peak < limit < sum(sizes) / 2
    if not kept:
        assert_same(weights(model), before)
        assert_same(optimizer.state_dict(), state)


@pytest.mark.parametrize("name", NAMES)
def test_the_device_makes_the_same_updates_as_the_host(name, monkeypatch):
    models, states = [], []
    for gates in (False, True):
        if gates:
            for module in (fused, stepping):
                monkeypatch.setattr(module, "decided", lambda keep: keep)
            for module in (lockstep.optim.chunks, lockstep.optim.adafactor):
                monkeypatch.setattr(module, "CHUNK_BYTES", 64)
        models.append(make_model())
        optimizer = build(models[-1], OPTIMS[name])
        for step in range(10):
            set_gradients(models[-1], step)
            optimizer.update(0.05, torch.tensor(2.0), torch.tensor(step != 4))
        states.append(optimizer.state_dict())
    torch.testing.assert_close(weights(models[1]), weights(models[0]), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(states[1], states[0], rtol=1e-5, atol=1e-6)


def test_negative_zeros_survive_a_discarded_update():
    parameter = nn.Parameter(torch.tensor([[-0.0, 0.0], [1.0, -1.0]]))
    for name in NAMES:
        optimizer = build_optimizer(OPTIMS[name], parameter_groups([("layer.weight", parameter)], OPTIMS[name]))
        parameter.grad = torch.ones(2, 2)
        with pytest.MonkeyPatch.context() as patch:
            for module in (fused, stepping):
                patch.setattr(module, "decided", lambda keep: keep)
            optimizer.update(0.1, torch.tensor(1.0), torch.tensor(False))
        assert torch.signbit(parameter.detach()).tolist() == [[True, False], [False, True]], name


@pytest.mark.parametrize("sizes", [[3, 2], [100, 3, 50, 60], [16], []])
def test_chunks_have_every_element_once_and_no_more_than_their_bytes(sizes, monkeypatch):
    monkeypatch.setattr(lockstep.optim.chunks, "CHUNK_BYTES", 64)
    tensors = [torch.arange(size, dtype=torch.float32) + 1000 * place for place, size in enumerate(sizes)]
    rows = list(lockstep.optim.chunks.chunks((tensors, [tensor.clone() for tensor in tensors])))
    assert all(sum(tensor.nbytes for tensor in column) <= 64 for row in rows for column in row)
    for place in range(2):
        elements = [tensor for row in rows for tensor in row[place]]
        assert sizes == [] or torch.equal(torch.cat(elements), torch.cat(tensors))


# --- parameters without a gradient --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_parameter_without_a_gradient_is_not_updated_and_not_counted(name, gating):
    model = make_model()
    optimizer = build(model, OPTIMS[name])
    before = weights(model)
    set_gradients(model, 1, without=("0.weight", "2.bias"))
    optimizer.update(0.1, torch.tensor(2.0), torch.tensor(True))
    after = weights(model)
    assert {key for key in after if torch.equal(after[key], before[key])} == {"0.weight", "2.bias"}
    state = optimizer.state_dict()["parameters"]
    if "step" in state["2.weight"]:
        assert float(state["2.weight"]["step"]) == 1
        assert float(state["0.weight"].get("step", 0)) == 0


def test_an_update_without_gradients_changes_nothing():
    model = make_model()
    optimizer, before = build(model, OPTIMS["adamw"]), weights(model)
    optimizer.update(0.1, 2.0, True)
    assert_same(weights(model), before)


def test_parameters_of_several_precisions_are_updated():
    model = make_model()
    model[2].to(torch.bfloat16)
    optimizer, before = build(model, OPTIMS["adamw"]), weights(model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.update(0.1, 2.0, True)
    assert all(not torch.equal(value, before[key]) for key, value in weights(model).items())


# --- state --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_state_is_resumed_by_name_in_other_groups(name):
    """Make half of the updates, then the rest in a new optimizer with other groups."""
    uninterrupted, resumed = make_model(), make_model()
    first, second = build(uninterrupted, OPTIMS[name]), build(resumed, OPTIMS[name])
    for step in range(6):
        if step == 3:
            saved = copy.deepcopy(second.state_dict())
            regrouped = (ParameterRule(match=("2.*",), weight_decay=0.0), ParameterRule(match=("0.*",), lr_scale=1.0))
            keep_decay = tuple(rule.model_copy(update={"weight_decay": None}) for rule in regrouped)
            second = build(resumed, OPTIMS[name].model_copy(update={"rules": keep_decay[::-1]}))
            second.load_state_dict(saved)
            saved["parameters"]["0.weight"].clear()
        for model, optimizer in ((uninterrupted, first), (resumed, second)):
            set_gradients(model, step)
            optimizer.update(0.1, 1.0, True)
    assert_same(weights(resumed), weights(uninterrupted))
    assert_same(second.state_dict(), first.state_dict())


@pytest.mark.parametrize("name", NAMES)
def test_loading_copies_the_saved_tensors(name):
    model = make_model()
    optimizer = build(model, OPTIMS[name])
    set_gradients(model, 0)
    optimizer.update(0.1, 1.0, True)
    saved = copy.deepcopy(optimizer.state_dict())
    kept = copy.deepcopy(saved)
    optimizer = build(model, OPTIMS[name])
    optimizer.load_state_dict(saved)
    set_gradients(model, 1)
    optimizer.update(0.1, 1.0, True)
    assert_same(saved, kept)


def test_state_has_the_names_of_torchs_entries():
    model = make_model()
    state = build(model, OPTIMS["adamw"]).state_dict()["parameters"]
    assert list(state) == ["0.weight", "2.weight", "0.bias", "2.bias", "3.weight", "3.bias"]
    assert {tuple(sorted(entries)) for entries in state.values()} == {("exp_avg", "exp_avg_sq", "step")}


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_an_update_after_torchs_load_state_dict_uses_the_new_tensors(name):
    """torch replaces the tensors of the state; an update of the old ones would be lost."""
    model, twin = make_model(), make_model()
    optimizer, other = build(model, OPTIMS[name]), build(twin, OPTIMS[name])
    for step in range(4):
        if step == 2:
            other._torch.load_state_dict(copy.deepcopy(other._torch.state_dict()))
        for module, updated in ((model, optimizer), (twin, other)):
            set_gradients(module, step)
            updated.update(0.1, 1.0, True)
    assert_same(weights(twin), weights(model))
    assert_same(other.state_dict(), optimizer.state_dict())


def test_state_of_another_model_is_refused_and_nothing_is_loaded():
    model = make_model()
    optimizer = build(model, OPTIMS["adamw"])
    before = copy.deepcopy(optimizer.state_dict())
    other_model = copy.deepcopy(before)
    other_model["parameters"]["head.weight"] = other_model["parameters"].pop("3.bias")
    with fails(RunFailed, "3.bias", "head.weight"):
        optimizer.load_state_dict(other_model)
    reshaped = copy.deepcopy(before)
    reshaped["parameters"]["0.weight"]["exp_avg"].fill_(5.0)
    reshaped["parameters"]["3.bias"]["exp_avg"] = torch.ones(4)
    with fails(RunFailed, "3.bias: exp_avg", "[3]", "[4]"):
        optimizer.load_state_dict(reshaped)
    with pytest.raises(RunFailed, match=r" has no (step|exp_avg):"):
        optimizer.load_state_dict(build(make_model(), OPTIMS["sgd"]).state_dict())
    assert_same(optimizer.state_dict(), before)


# --- a user's optimizer -------------------------------------------------------------------------------------------


class Counting(torch.optim.SGD):
    """An optimizer that keeps a number in its groups, as schedule-free optimizers do."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1


def test_updates_of_a_users_optimizer_can_be_discarded():
    model, reference_model = make_model(), make_model()
    groups = parameter_groups(model.named_parameters(), Optim(weight_decay=0.0))
    optimizer, _ = adapt_optimizer(Counting(groups, momentum=0.5), Optim())
    oracle = torch.optim.SGD(reference_model.parameters(), lr=0.1, momentum=0.5)
    for step in range(4):
        before, state = weights(model), copy.deepcopy(optimizer.state_dict())
        set_gradients(model, step, scale=float("nan"))
        optimizer.update(0.1, 1.0, torch.tensor(False))
        assert_same(weights(model), before)
        assert_same(optimizer.state_dict(), state)
        set_gradients(model, step, scale=2.0)
        set_gradients(reference_model, step)
        optimizer.update(0.1, torch.tensor(2.0, dtype=torch.float64), True)
        oracle.step()
    torch.testing.assert_close(weights(model), weights(reference_model))
    assert optimizer.state_dict()["groups"][0]["k"] == 4
    new = Counting(parameter_groups(model.named_parameters(), Optim(weight_decay=0.0)), momentum=0.5)
    resumed, _ = adapt_optimizer(new, Optim())
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert_same(resumed.state_dict(), optimizer.state_dict())


class Slowing(Counting):
    """An optimizer that keeps a number for all parameters in `state`, and one in an attribute that it saves itself."""

    k = 0

    def step(self, closure=None):
        super().step(closure)
        self.k += 1
        self.state["shared"] = self.state.get("shared", 0) + 2

    def state_dict(self):
        return {**super().state_dict(), "k": self.k}

    def load_state_dict(self, state_dict):
        own = dict(state_dict)
        self.k = own.pop("k")
        super().load_state_dict(own)


def test_what_a_users_optimizer_keeps_of_its_own_is_saved():
    def make():
        model = make_model()
        groups = parameter_groups(model.named_parameters(), Optim(weight_decay=0.0))
        made = Slowing(groups, momentum=0.5)
        return model, made, adapt_optimizer(made, Optim())[0]

    (model, _, optimizer), (_, second, resumed) = make(), make()
    for step in range(3):
        set_gradients(model, step)
        optimizer.update(0.1, 1.0, True)
    saved = copy.deepcopy(optimizer.state_dict())
    assert saved["own"] == {"shared": {"shared": 6}, "entries": {"k": 3}}
    groups = second.param_groups
    second.state["later"] = 1
    resumed.load_state_dict(saved)
    assert (second.k, second.state["shared"]) == (3, 6)
    assert second.param_groups is groups
    assert_same(resumed.state_dict(), optimizer.state_dict())
    second.state[7] = 1
    with fails(RunFailed, "key 7"):
        resumed.state_dict()


def test_state_of_a_users_optimizer_without_names_is_keyed_by_indices():
    model = make_model()
    optimizer, _ = adapt_optimizer(torch.optim.Adagrad(model.parameters()), Optim())
    assert list(optimizer.state_dict()["parameters"])[:2] == ["0.0", "0.1"]
    set_gradients(model, 0)
    optimizer.update(0.25, 1.0, True)
    assert [group["lr"] for group in optimizer.groups] == [0.25]


def test_optimizers_that_need_a_closure_and_other_objects_are_refused():
    with fails(ConfigError, "LBFGS"):
        adapt_optimizer(torch.optim.LBFGS(make_model().parameters()), Optim())
    with fails(ConfigError, "torch.optim.Optimizer", "Linear"):
        adapt_optimizer(nn.Linear(2, 2), Optim())


def test_muon_without_a_matrix_is_refused():
    with fails(ConfigError, "muon", key="optim.name"):
        build(nn.LayerNorm(4), OPTIMS["muon"])


def test_a_model_on_two_devices_is_refused():
    model = make_model()
    model[2].to("meta")
    with fails(ConfigError, "cpu and meta"):
        build(model, OPTIMS["adamw"])


class _Lion(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})


class _Hides(_Lion):
    """Its base's defaults, behind `**kwargs`."""

    def __init__(self, params, **kwargs):
        super().__init__(params, **kwargs)


@pytest.mark.parametrize("kind", [_Lion, _Hides])
def test_the_defaults_of_a_users_class_do_not_contradict_the_config(kind):
    def settled(optim, **arguments):
        groups = user_groups(parameter_groups(make_model().named_parameters(), optim), optim)
        return adapt_optimizer(kind(groups, **arguments), optim)

    optimizer, used = settled(Optim(name="custom", target="m:N", weight_decay=0.3, lr=0.002))
    assert (used.lr, used.weight_decay) == (0.002, 0.3)
    assert {group["weight_decay"] for group in optimizer.groups} == {0.3, 0.0}
    with fails(ConfigError, 0.3, 0.1, key="optim.weight_decay"):
        settled(Optim(name="custom", target="m:N", weight_decay=0.3), weight_decay=0.1)


def test_every_value_of_optim_name_has_facts_and_all_but_the_users_a_builder():
    names = set(get_args(Optim.model_fields["name"].annotation))
    assert set(OPTIMIZERS) == names
    model = make_model()
    for name in names - {"custom", "given", *_OF_PACKAGES}:
        optim = Optim(name=name)
        assert build_optimizer(optim, parameter_groups(model.named_parameters(), optim)).groups
