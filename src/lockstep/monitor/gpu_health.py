"""GPUs that are throttled, lost or report errors, each stated once.

MeterReport --> what is wrong, by rank --> new since the last report? --> lines for the console
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from lockstep.monitor.nvidia import THROTTLE_REASONS

if TYPE_CHECKING:
    from lockstep.monitor.rank_meters import MeterReport, RankNotice

_MOST_RANKS = 4  # that a line names
_XIDS = {
    13: "an error of the program on the GPU, such as an access out of bounds",
    31: "a wrong address in the GPU's memory, mostly by the program",
    43: "a program on the GPU that was stopped",
    45: "work that was ended, mostly after another error",
    48: "an uncorrectable memory error",
    62: "a halted controller of the GPU",
    63: "a row of memory that was remapped",
    64: "a row of memory that could not be remapped",
    74: "an error of NVLink",
    79: "the GPU has fallen off the bus",
    92: "many corrected memory errors",
    94: "a contained memory error",
    95: "an uncontained memory error",
    119: "no answer of the GPU's system processor",
}
"""Meanings of the Xid errors of NVIDIA's list that are seen in training."""


class GpuHealth:
    """Remembers what was stated, per rank."""

    def __init__(self) -> None:
        self._stated: set[tuple[int, str]] = set()
        self._first_errors: dict[tuple[int, str], float] = {}

    def lines(self, report: MeterReport) -> list[str]:
        """Return a line for each new fact, with its ranks and hosts."""
        ranks: dict[str, list[tuple[int, str]]] = {}
        for interval in report.ranks:
            notice = interval.notice
            for key, text in self._facts(notice.rank, notice.gauges):
                if (notice.rank, key) not in self._stated:
                    self._stated.add((notice.rank, key))
                    ranks.setdefault(text, []).append((notice.rank, notice.host))
        return [f"{_gpus(who)} {text}" for text, who in ranks.items()]

    def _facts(self, rank: int, gauges: Mapping[str, float]) -> Iterator[tuple[str, str]]:
        """Yield a key and a text for everything that is wrong now."""
        yield from _errors(gauges)
        for name, reason in THROTTLE_REASONS.values():
            if gauges.get(f"gpu_throttled_{name}"):
                yield f"throttled {name}", f"is throttled by {reason}"
        for name, kind in (("gpu_ecc_uncorrected", "uncorrected"), ("gpu_ecc_corrected", "corrected")):
            # Totals since the driver was loaded. Uncorrected ones from before the run matter, too.
            first = self._first_errors.setdefault((rank, name), gauges[name]) if name in gauges else 0.0
            if kind == "uncorrected" and first:
                yield name, f"has {first:.0f} uncorrected ECC errors of its memory from before the run; check it"
            if (new := gauges.get(name, 0.0) - first) > 0:
                yield f"{name} new", f"has {new:.0f} new {kind} ECC error{'s' if new > 1 else ''} of its memory"


def last_words(before: RankNotice, last: RankNotice) -> list[str]:
    """Return the errors that a rank's GPU had between two notices, of those that end ranks."""
    known, who = {key for key, _ in _errors(before.gauges)}, _gpus([(last.rank, last.host)])
    return [f"{who} {text}" for key, text in _errors(last.gauges) if key not in known]


def _errors(gauges: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    if gauges.get("gpu_lost"):
        yield "lost", "no longer answers its driver; check it with nvidia-smi and restart its host"
    if xids := gauges.get("gpu_xid_errors"):
        number = int(gauges.get("gpu_last_xid", 0))
        meaning = f" ({_XIDS[number]})" if number in _XIDS else ""
        yield f"xid {xids}", f"reports Xid error {number}{meaning}"


def _gpus(ranks: list[tuple[int, str]]) -> str:
    hosts = list(dict.fromkeys(host for _, host in ranks))
    if len(ranks) == 1:
        return f"the GPU of rank {ranks[0][0]} on {hosts[0]}"
    names = ", ".join(str(rank) for rank, _ in ranks[:_MOST_RANKS])
    more = f" and {len(ranks) - _MOST_RANKS} more" if len(ranks) > _MOST_RANKS else ""
    others = f" and {len(hosts) - 1} more hosts" if len(hosts) > 2 else f" and {hosts[1]}" if len(hosts) == 2 else ""
    return f"each GPU of ranks {names}{more} on {hosts[0]}{others}"
