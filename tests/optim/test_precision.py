"""The arithmetic of a forward, and the loss scale against torch's."""

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lockstep.config.schema import LossScale
from lockstep.core.errors import RunFailed
from lockstep.optim import precision
from lockstep.optim.precision import LossScaler, autocast_context, resolve_compute, set_tf32

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("asked", "bf16", "found"),
    [
        ("auto", True, torch.bfloat16),
        ("auto", False, None),
        ("fp32", True, None),
        ("bf16", False, torch.bfloat16),
        ("fp16", False, torch.float16),
    ],
)
def test_auto_is_bf16_where_the_processor_has_it(asked, bf16, found, monkeypatch):
    monkeypatch.setattr(precision, "has_bf16", lambda device: bf16)
    assert resolve_compute(asked, CPU) is found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("processor : 0\nflags : fpu avx512f avx512_bf16\n", True),
        ("flags : fpu amx_bf16 amx_tile\n", True),
        ("Features : fp asimd i8mm bf16\n", True),
        ("model name : bf16 avx512_bf16\nflags : fpu avx2\n", False),
    ],
)
def test_the_processors_flags_decide(text, found, monkeypatch):
    monkeypatch.setattr(precision.Path, "read_text", lambda path: text)
    assert precision._cpu_has_bf16.__wrapped__() is found


def test_a_forward_runs_in_the_precision_and_its_parameters_stay_fp32():
    layer, x = nn.Linear(4, 4), torch.randn(2, 4)
    for dtype in (torch.bfloat16, torch.float16):
        make = autocast_context(dtype, CPU)
        for _ in range(2):  # as often as it is asked for
            with make():
                y = layer(x)
            assert y.dtype is dtype
            y.float().sum().backward()
        assert layer.weight.grad.dtype is torch.float32
    assert layer(x).dtype is torch.float32


def test_fp32_needs_no_context():
    make = autocast_context(None, CPU)
    assert make() is make()
    with make():
        assert not torch.is_autocast_enabled("cpu")


def test_tf32_is_set_on_gpus_alone_and_leaves_torch_in_order(monkeypatch):
    before = torch.get_float32_matmul_precision()
    set_tf32(True)
    assert torch.cuda.is_available() or torch.get_float32_matmul_precision() == before
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            for allowed, said in ((True, "high"), (False, "highest")):
                set_tf32(allowed)
                assert torch.get_float32_matmul_precision() == said  # torch.compile asks for it
                assert torch.backends.cudnn.allow_tf32 is allowed
        finally:
            torch.set_float32_matmul_precision(before)
            torch.backends.cudnn.allow_tf32 = True


# --- loss scale ---------------------------------------------------------------------------------------------------

SECTION = LossScale(initial=1024.0, growth_factor=2.0, backoff_factor=0.5, growth_interval=3)


def torchs_sequence(section, kept):
    scaler = torch.amp.GradScaler(
        "cpu", section.initial, section.growth_factor, section.backoff_factor, section.growth_interval
    )
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    found = []
    for keep in kept:
        scaler.scale(torch.zeros(1))
        parameter.grad = torch.full((1,), 0.0 if keep else float("inf"))
        scaler.step(optimizer)
        scaler.update()
        found.append(scaler.get_scale())
    return found


def on_the_device():
    """A scaler as it is on a GPU, its tensors on the CPU."""
    scaler = LossScaler(SECTION, enabled=True, device=torch.device("meta"))
    scaler._scale, scaler._streak = torch.tensor(SECTION.initial), torch.tensor(0, dtype=torch.int32)
    return scaler


@settings(deadline=None, max_examples=40)
@given(st.lists(st.sampled_from([True, True, True, False]), max_size=40))
def test_the_scale_is_that_of_torchs_gradscaler(kept):
    host, device = LossScaler(SECTION, enabled=True, device=CPU), on_the_device()
    expected = torchs_sequence(SECTION, kept)
    for keep, scale in zip(kept, expected, strict=True):
        host.update(keep)
        device.update(torch.tensor(keep))
        assert host.scale == float(device.scale) == scale
        assert host.state() == device.state()


def test_the_scale_never_becomes_infinite():
    scaler = LossScaler(LossScale(initial=2.0**127, growth_interval=1), enabled=True, device=CPU)
    for _ in range(3):
        scaler.update(True)
    assert scaler.scale == 2.0**127


def test_a_scale_that_was_read_stays_what_it_was():
    scaler = on_the_device()
    read = scaler.scale
    scaler.update(torch.tensor(False))
    assert (float(read), float(scaler.scale)) == (1024.0, 512.0)


@pytest.mark.parametrize("make", [lambda: LossScaler(SECTION, enabled=True, device=CPU), on_the_device])
def test_state_goes_on(make):
    first, second = make(), make()
    for keep in (True, False, True, True):
        first.update(keep)
    second.restore(first.state())
    assert second.state() == {"scale": 512.0, "streak": 2}
    first.update(True)
    second.update(True)
    assert float(first.scale) == float(second.scale) == 1024.0


def test_without_fp16_the_scale_is_one():
    scaler = LossScaler(SECTION, enabled=False, device=CPU)
    scaler.update(False)
    assert (scaler.scale, scaler.state()) == (1.0, {})
    scaler.restore({"scale": 4.0, "streak": 1})  # saved by a run in fp16, gone on with in bf16
    assert scaler.scale == 1.0


def test_a_foreign_state_is_refused():
    with pytest.raises(RunFailed, match="should hold scale and streak, but holds _scale"):
        LossScaler(SECTION, enabled=True, device=CPU).restore({"_scale": 1.0})
