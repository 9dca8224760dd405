"""GPUs by name, and clusters of them: `gpus.toml` has their figures, with sources; `instances.toml` types of clouds."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from lockstep.core.closest import hint
from lockstep.core.errors import ConfigError
from lockstep.core.terminal import command_line

_REACHED = "reached"
_RANKS = "ranks"
_HOST = {"pcie": 25, "host": 40}  # as gpus.toml has for PCIe 4.0, where a file has none
_SHOWN = 5  # similar names
_OTHER_FORMS = {"PCIE", "NVL", "MIG", "LAPTOP", "D"}  # with other speeds
_SIGNS = {"$": "USD", "€": "EUR", "£": "GBP"}


@dataclass(frozen=True, slots=True)
class GPU:
    """A GPU, in units of 1: bytes, FLOP/s, bytes/s, watts.

    Attributes:
        flops: Dense, by the bytes of an element: 4 (TF32), 2 (bf16), 1 (fp8).
        link: Between the GPUs of a node, one way.
        network: To other nodes, one way, for each GPU.
        pcie, host: Of copies between it and its host, one way; and of the host's memory, for each GPU.
        reached: The fractions that kernels and collectives reach: `matmul`, `attention`, `memory`, `link`, `network`;
            and `measured`: of their measured speeds, in a step.
        device: `gpu`, or `cpu`, where each operation is done before Python continues.
        seconds: Of the host, where they were measured: step, call, issue, collective; and a share, `late`.
        measured: Operations and collectives by name: rows of sizes and, last, seconds.
    """

    name: str
    memory: int
    flops: Mapping[int, float]
    bandwidth: float
    multiprocessors: int
    link: float
    network: float
    pcie: float
    host: float
    watts: float
    reached: Mapping[str, float]
    device: str = "gpu"
    seconds: Mapping[str, float] = field(default_factory=dict)
    measured: Mapping[str, Sequence[Sequence[float]]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GPUCluster:
    """Nodes of equal GPUs; `instance` is their type at a cloud."""

    gpu: GPU
    per_node: int
    nodes: int
    instance: str = ""

    @property
    def ranks(self) -> int:
        return self.per_node * self.nodes

    def __str__(self) -> str:
        nodes = " ".join([str(self.nodes)] * (self.nodes > 1) + [self.instance or "nodes"])
        return f"{self.ranks} x {self.gpu.name}" + (f" ({nodes})" if self.nodes > 1 or self.instance else "")


@dataclass(frozen=True, slots=True)
class Price:
    """The price of a GPU for an hour."""

    per_hour: float
    currency: str

    def text(self, amount: float) -> str:
        return f"{amount:,.2f} {self.currency}"


def parse_price(text: str) -> Price:
    """Return the price of `2.5USD` or `$2.5`. Raises ConfigError."""
    match = re.fullmatch(r"(?P<sign>[$€£])?\s*(?P<amount>\d+(\.\d+)?)\s*(?P<name>[A-Za-z]{3})?", text.strip())
    if match is None or bool(match["sign"]) == bool(match["name"]):
        raise ConfigError(f"--price {text}: write the price of a GPU for an hour with its currency, such as 2.5USD")
    return Price(float(match["amount"]), (match["name"] or _SIGNS[match["sign"]]).upper())


def parse_clusters(gpus: str, nodes: str = "1", price: str | None = None) -> list[tuple[GPUCluster, Price | None]]:
    """Return each GPU of a list on each number of nodes of another, with its price: one for all, or one for each GPU.

    A range doubles: `1..8` is 1, 2, 4, 8. The price of an instance type is the instance's; it is divided by its GPUs.

    Raises:
        ConfigError: `H100:8,L4:1..8`, `1,2,4` or `2.5USD,0.8USD` is written otherwise.
    """
    names, counts = gpus.split(","), [count for each in nodes.split(",") for count in _doubled(each)]
    prices = [] if price is None else [parse_price(each) for each in price.split(",")]
    if prices and len(prices) not in (1, len(names)):
        raise ConfigError(f"--price {price}: write one price, or one for each of the {len(names)} GPUs of --gpus")
    if len({each.currency for each in prices}) > 1:
        raise ConfigError(f"--price {price}: write all prices in one currency")
    if not all(each.isdecimal() for each in counts):
        raise ConfigError(f"--nodes {nodes}: write a number, or several, such as 1,2,4 or 1..8")
    by_gpu: Sequence[Price | None] = (prices if len(prices) > 1 else prices * len(names)) or [None] * len(names)
    rows = []
    for name, own in zip(names, by_gpu, strict=True):
        gpu, colon, number = name.rpartition(":")
        sizes = [f"{gpu}{colon}{size}" for size in _doubled(number)]
        for cluster in (parse_cluster(size, int(count)) for size in sizes for count in counts):
            share = cluster.per_node if cluster.instance else 1
            rows.append((cluster, None if own is None else replace(own, per_hour=own.per_hour / share)))
    if len(prices) == 1 and len({bool(cluster.instance) for cluster, _ in rows}) > 1:
        raise ConfigError(f"--price {price}: of an instance or of a GPU? write one for each of {gpus}")
    return rows


def _doubled(text: str) -> list[str]:
    match = re.fullmatch(r"(\d+)\.\.(\d+)", text)
    first, last = map(int, match.groups()) if match else (0, 0)
    if not 0 < first <= last:
        return [text]
    return [*(str(first << power) for power in range(last.bit_length()) if first << power < last), str(last)]


def parse_cluster(text: str, nodes: int = 1) -> GPUCluster:
    """Return the cluster of `NAME:PER_NODE`, or of a cloud's instance type, such as `p5.48xlarge`. Raises ConfigError.

    `FILE.toml:NAME:PER_NODE` is for GPUs of your own; `FILE.toml:PER_NODE` names the file's first.
    """
    if nodes < 1:
        raise ConfigError(f"--nodes {nodes}: there is at least 1 node")
    name, colon, number = text.rpartition(":")
    instances = _known("instances.toml")
    by_name = {each.lower().removeprefix("standard_"): each for each in instances}
    if (instance := by_name.get((name or text).lower().removeprefix("standard_"))) is not None:
        gpu, per_node, gigabits = instances[instance]
        if colon and number != str(per_node):
            raise ConfigError(f"--gpus {text}: {instance} has {per_node} x {gpu}; leave :{number} out")
        made = replace(_gpu(gpu, _known(), str(per_node)), network=gigabits / 8 * 1e9 / per_node)
        return GPUCluster(made, per_node, nodes, instance)
    if not number.isdecimal() or int(number) < 1:
        similar = ", ".join([each for each in instances if text.lower() in each.lower()][:_SHOWN])
        near = f" such as {similar}" if similar else hint(text, instances)
        raise ConfigError(f"--gpus {text}: write a GPU and its number, such as H100:8, or an instance type{near}")
    file, _, own = name.rpartition(":") if not name.endswith(".toml") else (name, ":", "")
    try:
        more = tomllib.loads(Path(file).read_text()) if file else {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"--gpus {text}: {file}: {error}") from None
    return GPUCluster(_gpu(own or next(iter(more), ""), {**_known(), **more}, number), int(number), nodes)


def known_gpu(device_name: str) -> GPU | None:
    """Return the GPU of the table that a driver calls `NVIDIA A100-SXM4-80GB`; None: it has none, or another form."""
    words = set(re.split(r"[\s-]+", device_name.upper().replace("RTX ", "RTX")))
    name = next((each for each in _known() if words >= set(each.upper().split("-"))), None)
    return None if name is None or words & _OTHER_FORMS else _made(name, _inherited(name, _known()))


def _gpu(name: str, known: Mapping[str, Mapping[str, Any]], per_node: str) -> GPU:
    by_lower = {each.lower(): each for each in known}
    if (key := by_lower.get(name.lower())) is None:
        near = hint(name, [*known, *_known("instances.toml")]) or f"; there are {', '.join(known)}"
        raise ConfigError(f"--gpus: there is no GPU {name!r} in plan/gpus.toml{near}")
    try:
        figures = _inherited(key, known)
        ranks = figures.get(_RANKS, {per_node: {}})
        if per_node not in ranks:
            few = f"--gpus: {key} was measured with {' and '.join(ranks)} ranks of a node, not {per_node}"
            measure = command_line("lockstep", "plan", "--calibrate", "--ranks", per_node)
            raise ConfigError(f"{few}; {measure} measures it")
        return _made(key, {**figures, **ranks[per_node]})
    except KeyError as missing:
        raise ConfigError(f"--gpus: {key} has no {missing}; write it, or like: the name of a known GPU") from None


def _made(key: str, figures: Mapping[str, Any]) -> GPU:
    flops = {4: figures["tf32"] * 1e12, 2: figures["bf16"] * 1e12, 1: figures["fp8"] * 1e12}
    rates = {each: 1e9 * {**_HOST, **figures}[each] for each in ("bandwidth", "link", "network", "pcie", "host")}
    return GPU(
        key, int(figures["memory"] * 2**30), flops, **rates, multiprocessors=figures["multiprocessors"],
        watts=figures["watts"], reached=figures[_REACHED], device=figures.get("device", "gpu"),
        seconds=figures.get("seconds", {}), measured=figures.get("measured", {}),
    )  # fmt: skip


def _inherited(name: str, known: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    own = known[name]
    if "like" not in own:
        return own
    parent = _inherited(own["like"], known)
    return {**parent, **own, _REACHED: {**parent[_REACHED], **own.get(_REACHED, {})}}


@cache
def _known(table: str = "gpus.toml") -> Mapping[str, Any]:
    return tomllib.loads((files("lockstep.plan") / table).read_text())
