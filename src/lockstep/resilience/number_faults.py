"""Faults in the numbers of a run: a NaN that doesn't come again or comes with a sample, a bit that flips in memory.

nan        the first layer's next output in training is NaN, once   --> `recovery.bad_numbers.bisect`
badsample  the first layer's output in training is NaN
           for one sample, whenever it is used                      --> `bisect`, or `nonfinite: rollback`
diverge    a bit of a parameter is another one on this rank alone
           after an update                                          --> `recovery.compare_every`

The first layer is the first module with parameters that a forward calls: a model may call some in another order than it
holds them, and others never, whose parameters it uses itself.

Where the optimizer's state is sharded, an update writes all parameters again: a bit that flips before it is gone then.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

from lockstep.distributed.forward_mode import current_sequences
from lockstep.distributed.shard_boxes import live_part

if TYPE_CHECKING:
    from torch import Tensor, nn

NAN, BAD_SAMPLE, DIVERGE = "nan", "badsample", "diverge"
_NAN = float("nan")
_BIT = 1 << 20  # of a float32: an eighth of the number, as its exponent stays


def make_nan(model: nn.Module, fired: Callable[[], None]) -> None:
    """Let the next output of the first layer in training be NaN; of a compiled model, that of the whole.

    Args:
        fired: Called when it is.
    """
    compiled = getattr(model, "_compiled_call_impl", None)
    if compiled is not None:  # a hook would come too late for what is compiled

        def call(*inputs: Any, **named: Any) -> Any:
            output = compiled(*inputs, **named)
            if not model.training:
                return output
            model._compiled_call_impl = compiled
            fired()
            return _spoiled(output)

        model._compiled_call_impl = call
        return

    def spoil(module: nn.Module, inputs: object, output: Any) -> Any:
        if not module.training:
            return None
        for handle in handles:
            handle.remove()
        fired()
        return _spoiled(output)

    handles = [layer.register_forward_hook(spoil) for layer in _layers(model)]


def _spoiled(output: Any) -> Any:
    """Return an output with NaN in its first tensor, or in all tensors of a mapping."""
    if isinstance(output, MutableMapping):
        for name, value in output.items():
            if _is_of_numbers(value):
                output[name] = value * _NAN
        return output
    return (output[0] * _NAN, *output[1:]) if isinstance(output, tuple) else output * _NAN


def _is_of_numbers(value: object) -> bool:
    import torch

    return isinstance(value, torch.Tensor) and value.is_floating_point()


def make_sample_nan(
    model: nn.Module, alone: Sequence[Tensor], drawn: Collection[Sequence[Tensor]], fired: Callable[[], None]
) -> None:
    """Let the output of the first layer in training be NaN for a sample, which is recognized by its values.

    Args:
        alone: The inputs of the sample, as the model's forward takes them.
        drawn: The same in micro-batches that are on their way; a dataset may draw others for each.
        fired: Called whenever the sample is used.
    """
    import torch

    of_forward: list[Tensor | None] = [None]
    spoils = True  # until the first layer of a forward has done so

    def rows(parts: Sequence[Any]) -> Tensor | None:
        """Return which rows are the sample, or this rank's positions of it, [samples]; None: it can't be seen."""
        sequences, mask = current_sequences(), None
        for own in (alone, *drawn):
            if sequences is not None:
                positions = sequences.positions.cpu()
                own = [value[:, positions] for value in own if value.shape[1:2] == (sequences.length,)]
            same = _rows_like(own, parts)
            if same is not None:
                mask = same if mask is None else mask | same
        return mask

    def enter(module: nn.Module, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        nonlocal spoils
        of_forward[0], spoils = rows((*arguments, *named.values())), module.training

    def spoil(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> Any:
        nonlocal spoils
        mask = of_forward[0] if of_forward[0] is not None else rows(arguments)
        first = output[0] if isinstance(output, tuple) else output
        if not spoils or mask is None or not _is_of_numbers(first) or len(first) % len(mask):
            return None
        spoils = False
        if not bool(mask.any()):
            return None
        fired()
        mask = mask.repeat_interleave(len(first) // len(mask)).view(-1, *[1] * (first.ndim - 1))
        spoiled = torch.where(mask, first * _NAN, first)
        return (spoiled, *output[1:]) if isinstance(output, tuple) else spoiled

    model.register_forward_pre_hook(enter, with_kwargs=True)
    for layer in _layers(model):
        layer.register_forward_hook(spoil)


def _rows_like(own: Iterable[Tensor], parts: Iterable[Any]) -> Tensor | None:
    """Return which rows of the first input that can be compared are a sample's, [samples]; None: there is none."""
    import torch

    for part in parts:
        if isinstance(part, torch.Tensor) and part.ndim > 1:
            for sample in own:
                if sample.shape[2:] == part.shape[2:] and sample.ndim == part.ndim:
                    length = min(part.shape[1], sample.shape[1])  # of texts that are padded with others, or alone
                    same: Tensor = (part[:, :length] == sample[:, :length].to(part)).flatten(1).all(1)
                    return same
    return None


def _layers(model: nn.Module) -> list[nn.Module]:
    """Return the modules that may be the first layer: those with parameters of their own, and the whole."""
    layers = [module for module in model.modules() if next(module.parameters(recurse=False), None) is not None]
    return [*layers, model] if model not in layers else layers


def flip_bit(model: nn.Module, fired: Callable[[], None]) -> None:
    """Flip a bit of the largest trained parameter that this rank holds.

    Args:
        fired: Called when it is done.
    """
    import torch

    held = [live_part(parameter).data for parameter in model.parameters() if parameter.requires_grad]
    largest: Tensor = max(held, key=lambda tensor: tensor.numel())
    if not largest.numel():
        return
    numbers = largest.view(-1)[:1].float().view(torch.int32) ^ _BIT
    largest.view(-1)[:1] = numbers.view(torch.float32).to(largest.dtype)
    fired()


NUMBER_FAULTS: Mapping[str, Callable[[nn.Module, Callable[[], None]], None]] = {NAN: make_nan, DIVERGE: flip_bit}
