"""The verb `plan`: lockstep plan RECIPE --ranks N [--measure] [overrides]."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.cli.arguments import CONFIG_EPILOG, Parser, Prepared, add_run, approved_config, path, size
from lockstep.core.errors import ConfigError, RunFailed
from lockstep.core.formatting import size as shown_size
from lockstep.core.json_output import emit
from lockstep.core.terminal import command_line, echo, muted_stderr
from lockstep.plan.gpus import parse_cluster, parse_clusters

if TYPE_CHECKING:
    from lockstep.config.loading import LoadedConfig
    from lockstep.plan.gpus import GPUCluster, Price
    from lockstep.simulation.estimate import Estimator, StrategyMemory
    from lockstep.simulation.planning import ClusterRow


def run(arguments: Sequence[str]) -> int:
    """Print what follows from a config; with `--measure` also what updates on this machine take."""
    return prepare(arguments).execute()


def prepare(arguments: Sequence[str]) -> Prepared:
    """Read and check the arguments."""
    summary = "Shows batch, steps, parameters, and peak memory per rank under every strategy, without starting a run."
    parser = Parser("plan", summary, CONFIG_EPILOG, "[RECIPE ...] [options] [overrides]")
    add_run(parser, "as if started on N ranks; with --measure, processes on this machine")
    text = "memory of each rank, such as 80GiB; by default this machine's, if it has devices or cores for all"
    parser.add_argument("--memory", type=size, metavar="SIZE", help=text)
    text = (
        "GPUs of a node, as H100:8, p5.48xlarge or FILE.toml:NAME:8: show a step's time there; several: H100:8,L4:1..8"
    )
    parser.add_argument("--gpus", metavar="NAME:N", help=text)
    parser.add_argument("--nodes", metavar="N", help="with --gpus: nodes, or several numbers: 1,2,4 or 1..8; default 1")
    text = (
        "with --gpus: of a GPU, or of the instance, for an hour, such as 2.5USD; a list, one for each; or aws: ask AWS"
    )
    parser.add_argument("--price", metavar="PRICE", help=text)
    text = "with --gpus: find the best strategy, micro-batch and activation checkpointing that fit, as an overlay"
    parser.add_argument("--search", action="store_true", help=text)
    text = "with --gpus: another recipe or files; show both runs, a column each"
    parser.add_argument("--compare", nargs="+", metavar="FILE", help=text)
    text = "with --gpus: also write a page with the parts of a step as bars, and time against cost over clusters"
    parser.add_argument("--html", type=path, metavar="FILE", help=text)
    text = "with --search, or several --gpus or --nodes: what is best"
    parser.add_argument("--goal", choices=["time", "cost", "memory"], default="time", help=text)
    text = "strategies to simulate for their peak memory; default %(default)s"
    parser.add_argument("--peak", choices=["all", "planned", "none"], default="all", help=text)
    text = "also run three updates here; show predicted and measured memory"
    parser.add_argument("--measure", action="store_true", help=text)
    text = "measure this machine in some minutes, and write a file for --gpus FILE:N"
    parser.add_argument("--calibrate", action="store_true", help=text)
    parser.add_argument("--out", metavar="FILE", help="with --calibrate: the file; default calibrated.toml")
    args, overrides = parser.parse(arguments)
    _check(args)
    loaded, name = approved_config(args.config, overrides, trusted=args.trust_run)
    args.overrides = overrides
    verbs = {"search": _search, "compare": _compare, "calibrate": _calibrate}
    execute = next((run for flag, run in verbs.items() if getattr(args, flag)), _plan)
    execute = _on_each if len(args.clusters) > 1 else execute
    return Prepared(partial(execute, args, loaded, name), loaded.config, f"plan-{name}")


def _prices_at_aws(gpus: str) -> str:
    """Return what AWS's price list has for each instance type, as --price takes it. Raises ConfigError."""
    from lockstep.launchers.aws import hourly_price
    from lockstep.launchers.aws_calls import AwsCalls, known_region

    aws, prices = AwsCalls(known_region(None, None), attempts=1), []
    for name in gpus.split(","):
        instance = parse_cluster(name).instance
        price = hourly_price(aws, instance) if instance else None
        if price is None:
            what = (
                f"in {aws.region} has no {name}, or can't be read; --gpus takes an instance type, such as p5.48xlarge"
            )
            raise ConfigError(f"--price aws: AWS's price list {what}")
        prices.append(f"{price}USD")
    return ",".join(prices)


def _check(args: argparse.Namespace) -> None:
    """Read the clusters, and raise ConfigError for flags that don't go together."""
    if args.out and not args.calibrate:
        raise ConfigError("--out is for --calibrate")
    if args.calibrate and (args.gpus or args.measure or args.json):
        raise ConfigError("--calibrate measures this machine and writes a file; leave out --gpus, --measure and --json")
    if args.gpus is None and (args.nodes is not None or args.price is not None):
        raise ConfigError("--nodes and --price are for --gpus, such as --gpus H100:8")
    if args.search and (args.gpus is None or args.measure):
        raise ConfigError("--search needs the GPUs to search on, such as --gpus H100:8, without --measure")
    price = _prices_at_aws(args.gpus) if args.price == "aws" else args.price
    args.clusters = [] if args.gpus is None else parse_clusters(args.gpus, args.nodes or "1", price)
    if args.goal == "cost" and args.price is None:
        raise ConfigError("--goal cost needs the price of a GPU for an hour, such as --price 2.5USD")
    if args.search and args.peak != "all":
        raise ConfigError("--peak is not for --search, which simulates what may be the best")
    if len(args.clusters) > 1 and (args.compare or args.measure or args.peak == "none"):
        flag = "--compare" if args.compare else "--measure" if args.measure else "--peak none"
        raise ConfigError(f"{flag} is for one cluster; leave the others out of --gpus and --nodes")
    if args.compare and (args.gpus is None or args.search or args.measure):
        raise ConfigError(
            "--compare needs the GPUs to compare on, such as --gpus H100:8, without --search and --measure"
        )
    if args.goal != "time" and not args.search and len(args.clusters) < 2:
        raise ConfigError("--goal is for --search, or several --gpus or --nodes: --search --goal memory")
    if args.html and (len(args.clusters) < 1 + args.search or args.compare or args.peak == "none"):
        raise ConfigError("--html shows strategies or clusters: --gpus H100:8, without --compare and --peak none")


def _calibrate(args: argparse.Namespace, loaded: LoadedConfig, _: str) -> int:
    from lockstep.simulation.calibration import calibrate

    file = Path(args.out or "calibrated.toml")
    if not file.parent.is_dir() or file.is_dir():
        raise ConfigError(f"--out {file}: it has to be a file, in a folder that exists")
    file.write_text(calibrate(loaded.config.launch))
    echo(f"{file} has this machine's speeds: {command_line('lockstep', 'plan', 'RECIPE', '--gpus', f'{file}:N')}")
    return 0


def _with_ranks(loaded: LoadedConfig, cluster: GPUCluster) -> LoadedConfig:
    return replace(loaded, config=loaded.config.with_values(launch={"ranks": cluster.ranks}))


def _estimator_on(cluster: GPUCluster, args: argparse.Namespace, loaded: LoadedConfig) -> Estimator:
    from lockstep.assembly.user_objects import refuse_given
    from lockstep.simulation.planning import estimator_for

    refuse_given(loaded)
    run, trust = _with_ranks(loaded, cluster), args.trust_remote_code
    return estimator_for(run, args.memory, cluster, trust_remote_code=trust)


def _on_each(args: argparse.Namespace, loaded: LoadedConfig, name: str) -> int:
    """Print a row for each cluster: the config's own strategy there, or with `--search` the best that fits."""
    from lockstep.simulation.planning import ClusterRow, best_of, describe_clusters, row_on, searched_on
    from lockstep.simulation.search import as_yaml

    refusals: list[ConfigError] = []
    rows, of = [], partial(searched_on, goal=args.goal) if args.search else row_on
    for number, (cluster, price) in enumerate(args.clusters, 1):
        echo(f"{number} of {len(args.clusters)}: {cluster}:", end=" ", file=sys.stderr, flush=True)
        try:
            with muted_stderr():  # of torch's remarks on a device that it doesn't know
                rows.append(of(_estimator_on(cluster, args, loaded), price))
        except ConfigError as refusal:
            refusals.append(refusal)
            rows.append(ClusterRow(cluster, price, why=str(refusal).splitlines()[0]))
        echo(_in_short(rows[-1]), file=sys.stderr, flush=True)
    if len(refusals) == len(rows):
        raise refusals[0]
    best = best_of(rows, args.goal)
    if not args.json:
        echo(f"{name}\n{describe_clusters(rows, best)}")
        if best is not None and best.overlay:
            echo(f"\nOn {best.cluster}: write this to a file, and name it after the recipe:\n\n{as_yaml(best.overlay)}")
    emit({"clusters": [{**row.as_json(), "best": row is best} for row in rows]})
    if args.html:
        named = ((f"{row.cluster}, {row.config}", row.run.memory, row.run.costs) for row in rows if row.run is not None)
        _write_page(args, name, named, rows[0].price)
    if best is None and any(row.run is None or row.run.memory.fits is False for row in rows):
        raise RunFailed("it fits on none of them; name more or larger GPUs")
    return 0


def _in_short(row: ClusterRow) -> str:
    record, price = row.as_json(), row.price
    time = [f"{1000 * record['step_seconds']:,.1f} ms"] if record.get("step_seconds") else []
    cost = [price.text(record["cost"])] if price is not None and "cost" in record else []
    return ", ".join(filter(None, [row.config, *time, *cost, row.note]))


def _write_page(
    args: argparse.Namespace,
    heading: str,
    rows: Iterable[tuple[str, StrategyMemory, Mapping[str, float]]],
    price: Price | None,
) -> None:
    """Write the page of `--html`: label, memory with time, and costs of each row."""
    from lockstep.simulation.page import PlannedStep, write_plan

    steps = [
        PlannedStep(label, row.time, "doesn't fit" if row.fits is False else "", costs.get("hours"), costs.get("cost"))
        for label, row, costs in rows
        if row.time is not None
    ]
    page = write_plan(args.html, heading, steps, "" if price is None else price.currency)
    if not args.json:
        echo(f"\n{page}")


def _show_ahead(args: argparse.Namespace, config: str, seconds: float, reserved: int) -> None:
    """Show on a terminal what is known before the table."""
    if sys.stdout.isatty() and not args.json:
        echo(f"{config}: {1000 * seconds:,.1f} ms, {shown_size(reserved)}", flush=True)


def _search(args: argparse.Namespace, loaded: LoadedConfig, name: str) -> int:
    from lockstep.simulation.planning import NO_LENGTH, run_of
    from lockstep.simulation.search import describe, search

    [(cluster, price)] = args.clusters
    with muted_stderr():  # of torch's remarks on a device that it doesn't know
        result = search(_estimator_on(cluster, args, loaded), args.goal, partial(_show_ahead, args))
    estimate = run_of(result, cluster, price)
    costs: Mapping[str, float] = {} if estimate is None else estimate.costs
    if not args.json:
        echo(f"{name} on {cluster}\n{describe(result, args.goal)}", flush=True)
        if "hours" in costs:
            cost = f", {price.text(costs['cost'])}" if price is not None else ""
            echo(f"\n{costs['hours']:,.1f} hours{cost}")
        elif costs:
            echo(f"\n{NO_LENGTH}")
    emit({"found": None if result.best is None else result.best.overlay, **costs, **result.as_json()})
    if result.best is None:
        raise RunFailed("no config fits; name more or larger GPUs")
    return 0


def _compare(args: argparse.Namespace, loaded: LoadedConfig, name: str) -> int:
    from lockstep.simulation.planning import describe_compared, estimated

    [(cluster, price)] = args.clusters
    other, other_name = approved_config(args.compare, args.overrides, trusted=args.trust_run)
    runs = {name: loaded, other_name if other_name != name else "other": other}
    columns = {label: estimated(_estimator_on(cluster, args, run), price) for label, run in runs.items()}
    if not args.json:
        echo(describe_compared(columns))
    emit({"compared": [{"config": label, **each.as_json()} for label, each in columns.items()]})
    return 0


def _plan(args: argparse.Namespace, loaded: LoadedConfig, name: str) -> int:
    from lockstep.assembly.planning import plan_run
    from lockstep.assembly.user_objects import refuse_given
    from lockstep.plan.plan import as_json, describe

    trust = args.trust_remote_code
    cluster, price = args.clusters[0] if args.gpus else (None, None)
    loaded = loaded if cluster is None else _with_ranks(loaded, cluster)
    memory = args.memory if args.memory or cluster is None else cluster.gpu.memory
    decision: Any = (None, "")
    if args.peak != "none":
        from lockstep.simulation.estimate import taken
        from lockstep.simulation.planning import (
            decision_of,
            describe_memory,
            describe_time,
            estimates_of,
            estimator_for,
            run_costs,
        )

        refuse_given(loaded)
        estimator = estimator_for(loaded, memory, cluster, trust_remote_code=trust)
        decision = decision_of(estimator)
    plan = plan_run(loaded, memory, decision, trust_remote_code=trust)
    if not args.json:
        echo(f"{name}\n{describe(plan)}", flush=True)
    values = as_json(plan) if args.json else {}
    if args.peak != "none":
        rows = []
        for row in estimates_of(estimator, decision[0], args.peak):
            rows.append(row)
            if row.time is not None and row.peak is not None:
                _show_ahead(args, row.name, row.time.seconds, taken(row.peak))
        values["strategies"] = [row.as_json() for row in rows]
        if not args.json:
            echo(f"\n{describe_memory(rows, estimator.memory)}", flush=True)
        if cluster is not None:
            for row, record in zip(rows, values["strategies"], strict=True):
                record |= {} if row.time is None else run_costs(row.time, plan, cluster, price)
            if not args.json:
                echo(f"\n{describe_time(rows, cluster, plan, price)}")
            if args.html:
                names = [f"{row.name}{' (the config)' * row.planned}" for row in rows]
                _write_page(args, f"{name} on {cluster}", zip(names, rows, values["strategies"], strict=True), price)
    if args.measure:
        from lockstep.simulation.planning import describe_measured, measured_beside_predicted

        beside = measured_beside_predicted(loaded, trust_remote_code=trust)
        predicted, measured = beside.predicted, beside.measured
        if predicted is None:
            raise RunFailed(f"the run {beside.unpredictable}")
        values |= {"predicted_peak_bytes": predicted.bytes, "measured_peak_bytes": measured.bytes}
        values |= {"predicted": dict(predicted.by_category), "measured": dict(measured.by_category)}
        if not args.json:
            echo(f"\n{describe_measured(predicted, measured, on_cpu=beside.on_cpu)}")
    emit(values)
    if args.peak != "none" and rows[0].fails and loaded.config.launch.device != "cpu":
        raise RunFailed(f"the run {rows[0].note}")
    return 0
