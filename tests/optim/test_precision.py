"""The precision of a forward, and the loss scale compared with torch's."""

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.failures import fails
from torch import nn

from lockstep.config.schema import LossScale
from lockstep.core.errors import RunFailed
from lockstep.optim import precision
from lockstep.optim.precision import LossScaler, autocast_context, products_in, resolve_compute, set_tf32

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("compute", "has_bf16", "expected"),
    [
        ("auto", True, torch.bfloat16),
        ("auto", False, None),
        ("fp32", True, None),
        ("bf16", False, torch.bfloat16),
        ("fp16", False, torch.float16),
    ],
)
def test_auto_is_bf16_where_the_processor_has_it(compute, has_bf16, expected, monkeypatch):
    monkeypatch.setattr(precision, "has_bf16", lambda device: has_bf16)
    assert resolve_compute(compute, CPU) is expected


@pytest.mark.parametrize(
    ("cpuinfo", "expected"),
    [
        ("processor : 0\nflags : fpu avx512f avx512_bf16\n", True),
        ("flags : fpu amx_bf16 amx_tile\n", True),
        ("Features : fp asimd i8mm bf16\n", True),
        ("model name : bf16 avx512_bf16\nflags : fpu avx2\n", False),
    ],
)
def test_bf16_is_detected_from_the_processors_flags(cpuinfo, expected, monkeypatch):
    monkeypatch.setattr(precision.Path, "read_text", lambda path: cpuinfo)
    assert precision._cpu_has_bf16.__wrapped__() is expected


def test_autocast_sets_the_precision_of_the_forward_and_parameters_stay_fp32():
    layer, x = nn.Linear(4, 4), torch.randn(2, 4)
    for dtype in (torch.bfloat16, torch.float16):
        make = autocast_context(dtype, CPU)
        for _ in range(2):  # the factory can be used again
            with make():
                y = layer(x)
            assert y.dtype is dtype
            y.float().sum().backward()
        assert layer.weight.grad.dtype is torch.float32
    assert layer(x).dtype is torch.float32


def test_fp32_uses_no_autocast():
    make = autocast_context(None, CPU)
    assert make() is make()
    with make():
        assert not torch.is_autocast_enabled("cpu")


def test_tf32_is_set_only_with_a_gpu_and_without_a_warning(monkeypatch):
    before = torch.get_float32_matmul_precision()
    set_tf32(True)
    assert torch.cuda.is_available() or torch.get_float32_matmul_precision() == before
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            for allowed, precision_name in ((True, "high"), (False, "highest")):
                set_tf32(allowed)
                assert torch.get_float32_matmul_precision() == precision_name  # torch.compile reads it
                assert torch.backends.cudnn.allow_tf32 is allowed
        finally:
            torch.set_float32_matmul_precision(before)
            torch.backends.cudnn.allow_tf32 = True


# --- loss scale ---------------------------------------------------------------------------------------------------

SECTION = LossScale(initial=1024.0, growth_factor=2.0, backoff_factor=0.5, growth_interval=3)


def gradscaler_sequence(section, kept):
    scaler = torch.amp.GradScaler(
        "cpu", section.initial, section.growth_factor, section.backoff_factor, section.growth_interval
    )
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    scales = []
    for keep in kept:
        scaler.scale(torch.zeros(1))
        parameter.grad = torch.full((1,), 0.0 if keep else float("inf"))
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


def device_scaler():
    """Return a scaler that works as on a GPU, with its tensors on the CPU."""
    scaler = LossScaler(SECTION, enabled=True, device=torch.device("meta"))
    scaler.scale, scaler._streak = torch.tensor(SECTION.initial), torch.tensor(0, dtype=torch.int32)
    return scaler


@settings(deadline=None, max_examples=40)
@given(st.lists(st.sampled_from([True, True, True, False]), max_size=40))
def test_the_scale_follows_torchs_gradscaler(kept):
    host, device = LossScaler(SECTION, enabled=True, device=CPU), device_scaler()
    expected = gradscaler_sequence(SECTION, kept)
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


def test_an_update_does_not_change_a_scale_that_was_read_before():
    scaler = device_scaler()
    read = scaler.scale
    scaler.update(torch.tensor(False))
    assert (float(read), float(scaler.scale)) == (1024.0, 512.0)


@pytest.mark.parametrize("make", [lambda: LossScaler(SECTION, enabled=True, device=CPU), device_scaler])
def test_a_restored_scaler_continues(make):
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
    scaler.restore({"scale": 4.0, "streak": 1})  # saved by a run in fp16, resumed in bf16
    assert scaler.scale == 1.0


def test_a_state_with_other_keys_is_refused():
    with fails(RunFailed, "_scale", "scale and streak"):
        LossScaler(SECTION, enabled=True, device=CPU).restore({"_scale": 1.0})


@pytest.mark.parametrize(
    ("dtype", "kind", "switch", "expected"),
    [
        (None, "cuda", "high", "tf32"),
        (None, "cuda", "medium", "tf32"),
        (None, "cuda", "highest", "fp32"),
        (None, "cpu", "high", "fp32"),
        (torch.bfloat16, "cuda", "high", "bf16"),
        (torch.float16, "cuda", "highest", "fp16"),
    ],
)
def test_products_are_in_tf32_where_torch_may_round_to_it(dtype, kind, switch, expected, monkeypatch):
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: switch)
    assert products_in(dtype, torch.device(kind)) == expected
