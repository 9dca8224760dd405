"""Traces of GPUs, made by hand in Kineto's format: what limits each is named, and nothing else.

Names, categories and arguments are those of published traces: a kernel has a correlation and no External id (its
launch has both), streams are threads of a process whose number is the device's, NCCL's kernels have their collective.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from kit.failures import gives

from lockstep.profiling.findings import findings_of, summary_lines
from lockstep.profiling.traces import Trace, read_trace
from lockstep.report.limits import Limit

GEMM = "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel"
NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
PROCESS, UPDATE_US = 4242, 10_000


class Recorder:
    """Records two updates of 10 ms: 1 of data, 3 of forward, 4 of backward, 1 of optimizer, 1 of the host."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self._correlation = 0
        phases = {"data": 1000, "forward": 3000, "backward": 4000, "optimizer": 1000, "host": 1000}
        for number in range(2):
            begin = number * UPDATE_US
            name = f"lockstep/update {number + 10}"
            self._add("lockstep", name, begin, UPDATE_US, PROCESS, 1, {"update": number + 10})
            for phase, duration in phases.items():
                self._add("lockstep", f"lockstep/{phase}", begin, duration, PROCESS, 1, {})
                begin += duration

    def _add(self, category: str, name: str, ts: float, dur: float, pid: int, tid: int, args: dict[str, Any]) -> None:
        event = {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": args}
        self.events.append(event)

    def operator(self, name: str, at: float, launched: float, duration: float, **args: Any) -> None:
        """Record an operator on the host at `at` of each update, and its kernel at `launched`."""
        kernel = {"aten::mm": GEMM, "nccl:all_reduce": NCCL}.get(name, "void at::native::vectorized_elementwise_kernel")
        stream = 20 if name.startswith("nccl") else 7
        for number in range(2):
            self._correlation += 1
            start, device = number * UPDATE_US, number * UPDATE_US + launched
            ids = {"External id": self._correlation}
            self._add("cpu_op", name, start + at, 12, PROCESS, PROCESS, {**ids, "Sequence number": 3, "Ev Idx": 1})
            launch = {**ids, "cbid": 211, "correlation": 100 + self._correlation}
            self._add("cuda_runtime", "cudaLaunchKernel", start + at + 3, 6, PROCESS, PROCESS, launch)
            on_device = {"device": 0, "context": 1, "stream": stream, "correlation": 100 + self._correlation, **args}
            self._add("kernel", kernel, device, duration, 0, stream, {"queued": 0, **on_device})

    def call(self, name: str, at: float, duration: float) -> None:
        for number in range(2):
            self._correlation += 1
            args = {"External id": 0, "cbid": 131, "correlation": 100 + self._correlation}
            self._add("cuda_runtime", name, number * UPDATE_US + at, duration, PROCESS, PROCESS, args)

    def copy(self, name: str, at: float, duration: float) -> None:
        for number in range(2):
            args = {"device": 0, "context": 1, "stream": 7, "correlation": 0, "bytes": 1 << 20}
            self._add("gpu_memcpy", name, number * UPDATE_US + at, duration, 0, 7, args)

    def trace(self, folder: Path) -> Trace:
        facts = {"rank": 0, "ranks": 2, "first": 10, "last": 11, "host": "a", "device": "cuda", "backend": "nccl"}
        path = folder / "rank0.10.pt.trace.json.gz"
        content = {"schemaVersion": 1, "deviceProperties": [{"id": 0}], "traceEvents": self.events, "lockstep": facts}
        path.write_bytes(gzip.compress(json.dumps(content).encode()))
        return read_trace(path)


def findings(trace: Trace) -> dict[str, Limit]:
    return {finding.name: finding for finding in findings_of([trace])}


def test_a_gpu_that_is_busy(tmp_path: Path) -> None:
    recorder = Recorder()
    recorder.operator("aten::mm", 1000, 1100, 6900)
    recorder.operator("aten::mm", 1050, 8000, 1900)
    recorder.operator("nccl:all_reduce", 4000, 5000, 2000)
    trace = recorder.trace(tmp_path)
    assert findings(trace) == {}
    assert trace.device is not None
    assert trace.device.busy == pytest.approx(0.88)
    assert trace.overlap == pytest.approx(1.0)
    assert trace.operators[0].name == "aten::mm"
    assert (trace.operators[0].calls, trace.operators[0].seconds) == (2, pytest.approx(0.0088))
    assert gives("\n".join(summary_lines([trace])), "GPU", "88%", "0%")


def test_launches_that_come_too_late(tmp_path: Path) -> None:
    recorder = Recorder()
    for place in range(8):
        recorder.operator("aten::add", 1000 + 1000 * place, 1015 + 1000 * place, 300)
    named = findings(recorder.trace(tmp_path))
    assert list(named) == ["host-bound", "host code"], "a millisecond between two operators"
    assert named["host-bound"].share == pytest.approx(0.66)
    assert gives(named["host-bound"].fact, "6 us")


def test_a_gpu_that_is_idle_although_it_has_work(tmp_path: Path) -> None:
    recorder = Recorder()
    recorder.operator("aten::mm", 1000, 2000, 2000)
    recorder.operator("aten::mm", 1050, 6000, 2000)
    named = findings(recorder.trace(tmp_path))
    assert list(named) == ["idle device"]
    assert "the gaps in the trace follow something else" in named["idle device"].fact


def _waiting_4_ms() -> Recorder:
    """The host waits 4 ms for data, and has 1 and 2 ms for forward and backward."""
    recorder = Recorder()
    changes = {"lockstep/data": (0, 3000), "lockstep/forward": (3000, -2000), "lockstep/backward": (1000, -1000)}
    for event in recorder.events:
        later, longer = changes.get(event["name"], (0, 0))
        event["ts"], event["dur"] = event["ts"] + later, event["dur"] + longer
    return recorder


def test_a_host_that_waits_for_data_while_the_gpu_has_work(tmp_path: Path) -> None:
    recorder = _waiting_4_ms()
    recorder.operator("aten::mm", 4000, 4100, 5900)
    recorder.operator("aten::mm", 4050, 100, 3900)  # launched in the update before
    assert "data" not in findings(recorder.trace(tmp_path))


def test_data_that_comes_too_late(tmp_path: Path) -> None:
    recorder = _waiting_4_ms()
    recorder.operator("aten::mm", 5000, 5100, 4900)
    named = findings(recorder.trace(tmp_path))
    assert list(named) == ["data"]
    assert named["data"].share == pytest.approx(0.4, abs=0.02)


def test_communication_that_nothing_hides(tmp_path: Path) -> None:
    recorder = Recorder()
    arguments = {"Collective name": "allreduce", "dtype": "Float", "In msg nelems": 1 << 20, "Group size": 2}
    recorder.operator("aten::mm", 1000, 1100, 4900)
    recorder.operator("nccl:all_reduce", 4000, 5000, 4800, **arguments)
    trace = recorder.trace(tmp_path)
    named = findings(trace)
    assert list(named) == ["communication"]
    assert named["communication"].share == pytest.approx(0.38)
    assert trace.overlap == pytest.approx(1000 / 4800)


def test_calls_that_wait_for_the_gpu(tmp_path: Path) -> None:
    recorder = Recorder()
    recorder.operator("aten::mm", 1000, 1100, 8800)
    for place in range(6):
        recorder.call("cudaStreamSynchronize", 1100 + 500 * place, 400)
        recorder.call("cudaMemcpyAsync", 1100 + 500 * place, 5)
    recorder.call("cudaDeviceSynchronize", 8500, 400)  # of the optimizer
    trace = recorder.trace(tmp_path)
    assert trace.device is not None
    assert (trace.device.syncs, trace.device.sync_seconds) == (6, pytest.approx(0.0024))
    assert list(findings(trace)) == ["sync calls"]


def test_tensorboards_plugin_reads_the_format(tmp_path: Path) -> None:
    """Its own reader sees the kernels, the communication, and how much of the time the GPU is used."""
    data = pytest.importorskip("torch_tb_profiler.profiler.data", reason="torch-tb-profiler isn't installed")
    recorder = Recorder()
    recorder.operator("aten::mm", 1000, 1000, 5000)
    recorder.operator("nccl:all_reduce", 4000, 5000, 4000)
    trace = recorder.trace(tmp_path)
    content = json.loads(gzip.decompress(trace.path.read_bytes()))
    profile = data.RunProfileData.from_json("rank0", 0, content)
    assert profile.has_kernel
    assert profile.has_communication
    assert profile.gpu_metrics_parser.gpu_utilization[0] == pytest.approx(16 / 18, abs=0.06)
    assert trace.device is not None
    assert trace.device.busy == pytest.approx(0.5)
