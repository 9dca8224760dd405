"""Normal draws of a part of a tensor, without the draws before it: bitwise those of torch's generator on a CPU.

    whole tensor      torch.empty(n).normal_(mean, std, generator=g)        n draws of g, in the order of its elements
    elements a to b   g jumps to draw a, and draws b - a of them

torch's CPU generator is the Mersenne Twister MT19937, and each element takes one 32-bit draw, in blocks of 16 (Box and
Muller); if n isn't divisible by 16, the last 16 elements are drawn again at the end. A jump by n draws multiplies the
state, a vector of 19,937 bits, by the n-th power of the transition matrix. That is a polynomial in the matrix: t^n
modulo its characteristic polynomial (Haramoto, Matsumoto, Nishimura, Panneton and L'Ecuyer 2008, "Efficient jump ahead
for F2-linear random number generators", INFORMS J. on Computing 20(3)).
"""

from __future__ import annotations

from functools import cache, lru_cache

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from torch import Tensor

BLOCK = 16
"""Elements that torch draws together; smaller tensors are drawn in another way."""
_CHUNK = 2**20  # elements that are drawn at once where the memory isn't that of the values; a multiple of BLOCK
_SHORT = 2**22  # draws that are faster made than jumped over

# MT19937 (Matsumoto and Nishimura 1998), in the names of its paper
_N, _M, _R = 624, 397, 31
_A = 0x9908B0DF
_UPPER, _LOWER = np.uint32(0x80000000), np.uint32(0x7FFFFFFF)
_DEGREE = 19937
_STATE = slice(3, 3 + _N)  # in the 64-bit words of `Generator.get_state()`: seed, left and seeded, next, state


def draws_of(elements: int) -> int:
    """Return the number of draws of a normal tensor of at least `BLOCK` elements."""
    return elements + (BLOCK if elements % BLOCK else 0)


def normal_slice(target: Tensor, start: int, elements: int, mean: float, std: float, seed: int, skip: int = 0) -> None:
    """Fill a contiguous tensor with elements from `start` of a normal tensor.

    Args:
        target: fp32, on any device.
        elements: Elements of the whole tensor, at least `BLOCK`.
        seed: Seed of the generator.
        skip: Draws that were made before those of the tensor.
    """
    flat, stop = target.view(-1), start + target.numel()
    redrawn = elements - BLOCK if elements % BLOCK else elements
    stream = _Stream(seed, mean, std)
    body = min(stop, elements // BLOCK * BLOCK)
    if start < body:
        stream.fill(flat[: body - start], skip + start // BLOCK * BLOCK, start % BLOCK)
    if stop > redrawn:
        tail = torch.empty(BLOCK)
        stream.fill(tail, skip + elements, 0)
        first = max(start, redrawn)
        flat[first - start :].copy_(tail[first - redrawn : stop - redrawn])


class _Stream:
    """The normal draws of a generator, in increasing order."""

    def __init__(self, seed: int, mean: float, std: float) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._at = 0
        self._mean, self._std = mean, std

    def fill(self, target: Tensor, at: int, offset: int) -> None:
        """Fill with the draws from `at` on, leaving the first `offset` ones out."""
        self._skip(at - self._at)
        if offset == 0 and target.is_cpu and target.numel() % BLOCK == 0:
            target.normal_(self._mean, self._std, generator=self._generator)
            self._at = at + target.numel()
            return
        self._at = at
        while target.numel():
            length = min(_CHUNK, -(-(offset + target.numel()) // BLOCK) * BLOCK)
            drawn = torch.empty(length).normal_(self._mean, self._std, generator=self._generator)[offset:]
            self._at += length
            used = min(len(drawn), target.numel())
            target[:used].copy_(drawn[:used])
            target, offset = target[used:], 0

    def _skip(self, draws: int) -> None:
        assert draws >= 0, "a stream is read forwards"
        if draws > _SHORT:
            jump(self._generator, draws)
            return
        while draws >= BLOCK:
            length = min(draws, _CHUNK) // BLOCK * BLOCK
            torch.empty(length).normal_(generator=self._generator)
            draws -= length
        torch.empty(draws, dtype=torch.int32).random_(generator=self._generator)


# --- the jump -----------------------------------------------------------------------------------------------------


def jump(generator: torch.Generator, draws: int) -> None:
    """Advance a CPU generator as that many 32-bit draws would; at least 624."""
    state = generator.get_state()
    words = state.numpy().view(np.uint64)
    left, following = int(state.numpy()[8:12].view(np.int32)[0]), int(words[2])
    position = _N if left == 1 else following  # of the next draw, from the beginning of the state
    sequence = _sequence(words[_STATE].astype(np.uint32))
    windows = sliding_window_view(sequence, _N)[_exponents(_power(position + draws - _N))]
    words[_STATE] = np.bitwise_xor.reduce(windows, axis=0)
    words[2] = 0
    state.numpy()[8:12].view(np.int32)[0] = 1  # the next draw makes the next 624 words
    generator.set_state(state)


def _sequence(state: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Return the words that follow from a state, itself included: enough for every power below the degree."""
    words = np.empty(_DEGREE + _N, dtype=np.uint32)
    words[:_N] = state
    for start in range(_N, len(words), _N - _M):
        stop = min(start + _N - _M, len(words))
        upper, lower = words[start - _N : stop - _N], words[start - _N + 1 : stop - _N + 1]
        mixed = (upper & _UPPER) | (lower & _LOWER)
        twisted = (mixed >> np.uint32(1)) ^ (np.uint32(_A) * (mixed & np.uint32(1)))
        words[start:stop] = words[start - _N + _M : stop - _N + _M] ^ twisted
    return words


def _exponents(polynomial: int) -> NDArray[np.int64]:
    data = np.frombuffer(polynomial.to_bytes(_DEGREE // 8 + 1, "little"), dtype=np.uint8)
    return np.flatnonzero(np.unpackbits(data, bitorder="little"))


@cache
def _characteristic() -> tuple[int, ...]:
    """Return the exponents of the transition's characteristic polynomial below its degree (section 3.1 of the paper).

    Polynomials over F2 are integers, whose bits are the coefficients.
    """
    powers = [1]
    for _ in range(_R):
        powers.append((powers[-1] << (_N - 1)) ^ (powers[-1] << (_M - 1)))
    polynomial = (powers[_R] << _N) ^ (powers[_R] << _M)
    for bit in range(_R):
        if _A >> bit & 1:
            term = powers[_R - 1 - bit]
            polynomial ^= (term << _N) ^ (term << _M)
    polynomial ^= _A >> _R & 1
    return tuple(exponent for exponent in range(_DEGREE) if polynomial >> exponent & 1)


_SPREAD = np.array([sum((byte >> bit & 1) << 2 * bit for bit in range(8)) for byte in range(256)], dtype=np.uint16)


@lru_cache(maxsize=256)
def _power(exponent: int) -> int:
    """Return t^exponent modulo the characteristic polynomial."""
    result = 1
    for digit in bin(exponent)[2:]:
        data = np.frombuffer(result.to_bytes(_DEGREE // 8 + 1, "little"), dtype=np.uint8)
        result = int.from_bytes(_SPREAD[data].tobytes(), "little")  # the square: a bit between any two
        result = _reduced(result << 1 if digit == "1" else result)
    return result


def _reduced(polynomial: int) -> int:
    while high := polynomial >> _DEGREE:
        polynomial &= (1 << _DEGREE) - 1
        for exponent in _characteristic():
            polynomial ^= high << exponent
    return polynomial
