"""torch's private kernels do what its public API does. If a test fails, change kernels.py."""

import pytest
import torch

from lockstep.optim import kernels


def lists(seed=0):
    torch.manual_seed(seed)
    parameters = [torch.randn(8, 8), torch.randn(5)]
    return parameters, [torch.randn_like(tensor) for tensor in parameters]


def run_adam(kernel, grad_scale=None, found_inf=None):
    parameters, grads = lists()
    first, second = [[torch.rand_like(tensor) for tensor in parameters] for _ in range(2)]
    steps = [torch.tensor(3.0) for _ in parameters]
    tensors = [*parameters, *first, *second, *steps]
    before = [tensor.clone() for tensor in tensors]
    kernel(
        parameters, grads, first, second, [], steps, lr=0.1, beta1=0.9, beta2=0.99, weight_decay=0.1, eps=1e-8,
        amsgrad=False, maximize=False, grad_scale=grad_scale, found_inf=found_inf,
    )  # fmt: skip
    return before, tensors


@pytest.mark.parametrize("kernel", [kernels.fused_adamw, kernels.fused_adam])
def test_adam_divides_by_grad_scale_and_stops_at_found_inf(kernel):
    _, plain = run_adam(kernel)
    _, scaled = run_adam(kernel, torch.tensor(2.0))
    assert not torch.equal(plain[0], scaled[0])
    _, scaled_by_one = run_adam(kernel, torch.tensor(1.0), torch.tensor(0.0))
    assert all(torch.equal(left, right) for left, right in zip(plain, scaled_by_one, strict=True))
    before, after = run_adam(kernel, torch.tensor(2.0), torch.tensor(1.0))
    assert all(torch.equal(left, right) for left, right in zip(before, after, strict=True))


def test_sgd_divides_by_grad_scale_and_stops_at_found_inf():
    def run(**options):
        parameters, grads = lists()
        moments = [torch.ones_like(tensor) for tensor in parameters]
        kernels.fused_sgd(
            parameters, grads, moments, weight_decay=0.0, momentum=0.5, lr=1.0, dampening=0.0, nesterov=False,
            maximize=False, is_first_step=False, **options,
        )  # fmt: skip
        return parameters, moments

    start, grads = lists()
    parameters, moments = run(grad_scale=torch.tensor(4.0))
    torch.testing.assert_close(moments, [0.5 + grad / 4 for grad in grads])
    torch.testing.assert_close(parameters, [old - moment for old, moment in zip(start, moments, strict=True)])
    parameters, moments = run(grad_scale=torch.tensor(4.0), found_inf=torch.tensor(1.0))
    torch.testing.assert_close(parameters, start, rtol=0, atol=0)
    torch.testing.assert_close(moments, [torch.ones_like(tensor) for tensor in start], rtol=0, atol=0)


def test_torchs_fused_sgd_needs_moments_before_a_discarded_first_update():
    """Show why `fused_sgd` makes them. If this fails, torch has fixed the state after a discarded first update."""
    parameter = torch.nn.Parameter(torch.zeros(4096))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9, fused=True)
    parameter.grad = torch.ones(4096)
    optimizer.found_inf, optimizer.grad_scale = torch.tensor(1.0), None
    optimizer.step()
    assert optimizer.state[parameter]["momentum_buffer"] is not None
    optimizer.found_inf = torch.tensor(0.0)
    optimizer.state[parameter]["momentum_buffer"].fill_(7.0)  # stands for uninitialized memory
    optimizer.step()
    assert not torch.allclose(optimizer.state[parameter]["momentum_buffer"], torch.ones(4096))


def test_flatten_concatenates():
    tensors = [torch.randn(2, 3), torch.randn(4), torch.randn(2, 2).T, torch.randn(())]
    torch.testing.assert_close(kernels.flatten(tensors), torch.cat([tensor.reshape(-1) for tensor in tensors]))


def test_scale_update_backs_off_and_grows():
    scale, streak = torch.tensor(8.0), torch.tensor(0, dtype=torch.int32)
    kernels.scale_update(scale, streak, torch.tensor(1.0), 2.0, 0.5, 2)
    assert (float(scale), int(streak)) == (4.0, 0)
    kernels.scale_update(scale, streak, torch.tensor(0.0), 2.0, 0.5, 2)
    kernels.scale_update(scale, streak, torch.tensor(0.0), 2.0, 0.5, 2)
    assert (float(scale), int(streak)) == (8.0, 0)
