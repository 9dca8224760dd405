"""The manifests that `launch kubernetes` writes: valid under the real schemas, and what they ask for."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from kit.failures import gives
from kit.manifests import VERSIONS, problem_of

from lockstep.cli.main import main
from lockstep.launchers.tools import job_name

TRAIN = ["train", "digits", "run.folder=runs/a"]
PLAIN = ["--image", "me/train:1", "--volume", "work:/work"]
PLENTY = [
    *PLAIN,
    *("--nodes", "2", "--gpus", "8", "--cpu", "16", "--memory", "200Gi", "--volume", "data:/data:ro"),
    *("--env", "NCCL_DEBUG=INFO", "--env-secret", "aws:AWS_SECRET_ACCESS_KEY", "--namespace", "ml"),
    *("--label", "team=vision", "--env-secret", "tracker", "--shm", "16Gi"),
]
POD = """\
serviceAccountName: trainer
priorityClassName: high
nodeSelector: {pool: h100}
tolerations: [{key: nvidia.com/gpu, operator: Exists, effect: NoSchedule}]
"""
ALL = [*PLENTY, "--pod", "../pod.yaml"]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pod.yaml").write_text(POD)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


def dry_run(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    assert main(["launch", "kubernetes", "--dry-run", *words]) == 0
    assert list(Path().iterdir()) == [], "a dry run writes nothing"
    return list(yaml.safe_load_all(capsys.readouterr().out))


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["launch", "kubernetes", *words]) == 2
    assert list(Path().iterdir()) == []
    return capsys.readouterr().err.removeprefix("lockstep: ").strip()


def pod_of(job: dict[str, Any]) -> dict[str, Any]:
    pod: dict[str, Any] = job["spec"]["template"]["spec"]
    return pod


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    "words",
    [
        [*PLAIN, *TRAIN],
        [*PLAIN, "--no-restart", *TRAIN, "--fresh"],
        [*PLAIN, "--nodes", "3", "--retries", "2", *TRAIN],
        ["--image", "me/train:1", "train", "digits", "checkpoint.folder=s3://bucket/a"],
        ["--image", "me/train:1", "--nodes", "2", "doctor", "--ranks", "2"],
        [*ALL, *TRAIN],
    ],
    ids=["plain", "once", "retries", "bucket", "doctor", "all"],
)
def test_manifests_are_valid(words: list[str], version: str, capsys: pytest.CaptureFixture[str]) -> None:
    for manifest in dry_run(capsys, *words):
        assert problem_of(manifest, version) == ""


# --- planted mistakes -----------------------------------------------------------------------------------------------


def places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of each key, depth first."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        if isinstance(node, dict):
            yield (*path, key)
        yield from places(value, (*path, key))


def at(node: Any, path: Sequence[Any]) -> Any:
    for key in path:
        node = node[key]
    return node


FREE = {"labels", "nodeSelector", "matchLabels", "selector", "requests", "limits"}
"""Mappings whose keys are the user's."""
ENUMS = {
    "completionMode", "podReplacementPolicy", "action", "operator", "restartPolicy",
    "terminationMessagePolicy", "fsGroupChangePolicy", "effect", "kind", "apiVersion",
}  # fmt: skip


def test_each_misspelt_key_is_noticed(capsys: pytest.CaptureFixture[str]) -> None:
    for manifest in dry_run(capsys, *ALL, *TRAIN):
        paths = [path for path in places(manifest) if len(path) > 1 and not FREE & set(path[:-1])]
        assert len(paths) > 5
        for path in paths:
            wrong = copy.deepcopy(manifest)
            parent = at(wrong, path[:-1])
            parent[f"{path[-1]}s"] = parent.pop(path[-1])
            assert problem_of(wrong), path


def test_each_wrong_type_is_noticed(capsys: pytest.CaptureFixture[str]) -> None:
    for manifest in dry_run(capsys, *ALL, *TRAIN):
        for path in places(manifest):
            value = at(manifest, path)
            wrong = copy.deepcopy(manifest)
            at(wrong, path[:-1])[path[-1]] = "text" if isinstance(value, dict | list) else [value]
            assert problem_of(wrong), path
            if isinstance(value, int) and not isinstance(value, bool):
                at(wrong, path[:-1])[path[-1]] = str(value)
                assert problem_of(wrong), path


def test_each_wrong_enum_value_is_noticed(capsys: pytest.CaptureFixture[str]) -> None:
    checked = set()
    for manifest in dry_run(capsys, *ALL, *TRAIN):
        for path in (path for path in places(manifest) if path[-1] in ENUMS):
            wrong = copy.deepcopy(manifest)
            at(wrong, path[:-1])[path[-1]] = at(manifest, path).lower() + "x"
            assert problem_of(wrong), path
            checked.add(path[-1])
    assert checked >= ENUMS


# --- what they ask for ----------------------------------------------------------------------------------------------


def test_pods_start_again_unless_the_run_failed(capsys: pytest.CaptureFixture[str]) -> None:
    def rules(*words: str) -> list[tuple[Any, ...]]:
        job = dry_run(capsys, *PLAIN, *words, *TRAIN)[-1]
        assert pod_of(job)["restartPolicy"] == "Never"
        policy = job["spec"].get("podFailurePolicy", {"rules": []})["rules"]
        codes = [rule.get("onExitCodes", {"operator": "taken", "values": []}) for rule in policy]
        return [
            (job["spec"]["backoffLimit"], rule["action"], code["operator"], *code["values"])
            for rule, code in zip(policy, codes, strict=True)
        ]

    assert rules() == [(0, "Ignore", "In", 75), (0, "Ignore", "taken"), (0, "FailJob", "NotIn", 75)]
    assert rules("--retries", "2", "--nodes", "2") == [
        (4, "Ignore", "In", 75),
        (4, "Ignore", "taken"),
        (4, "FailJob", "In", 2, 3, 130),
    ]
    assert rules("--no-restart") == []


@pytest.mark.parametrize(
    ("words", "seconds"),
    [
        (["train", "digits"], 120),
        (["train", "stdlib-lm"], 60),
        (["--nodes", "2", "train", "stdlib-lm", "model.layers=48", "model.width=4096", "model.heads=32"], 350),
        (["--grace", "77", "train", "stdlib-lm"], 77),
    ],
    ids=["unknown", "small", "large", "stated"],
)
def test_the_grace_period_suffices_to_save(words: list[str], seconds: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert pod_of(dry_run(capsys, *PLAIN, *words)[-1])["terminationGracePeriodSeconds"] == seconds


def test_pods_meet_at_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    service, job = dry_run(capsys, *PLAIN, "--nodes", "2", *TRAIN)
    name = job["metadata"]["name"]
    pod = pod_of(job)
    assert service["metadata"]["name"] == pod["subdomain"] == name
    assert service["spec"]["clusterIP"] == "None"
    assert (job["spec"]["completions"], job["spec"]["parallelism"]) == (2, 2)
    words = pod["containers"][0]["args"]
    assert words == [
        *TRAIN, "--nodes", "2", "--rendezvous", f"{name}-0.{name}:29500", "--node-rank", "$(JOB_COMPLETION_INDEX)",
        "--job-id", name,
    ]  # fmt: skip
    assert len(dry_run(capsys, *PLAIN, *TRAIN)) == 1


def test_pods_have_what_the_options_say(capsys: pytest.CaptureFixture[str]) -> None:
    pod = pod_of(dry_run(capsys, *ALL, *TRAIN)[-1])
    container = pod["containers"][0]
    assert container["resources"]["limits"] == {"cpu": "16", "memory": "200Gi", "nvidia.com/gpu": "8"}
    assert container["resources"]["requests"] == container["resources"]["limits"]
    assert pod["volumes"][0] == {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "16Gi"}}
    assert container["volumeMounts"][0]["mountPath"] == "/dev/shm"
    mounts = {mount["mountPath"]: mount.get("readOnly", False) for mount in container["volumeMounts"][1:]}
    assert mounts == {"/work": False, "/data": True}
    assert container["workingDir"] == "/work"
    assert container["envFrom"] == [{"secretRef": {"name": "tracker"}}]
    assert {each["name"]: each.get("value") for each in container["env"]} == {
        "HOME": "/tmp", "USER": "lockstep", "NCCL_DEBUG": "INFO", "AWS_SECRET_ACCESS_KEY": None,
        "LOCKSTEP_JOB_TOKEN": None,
    }  # fmt: skip
    security = pod["securityContext"]
    assert (security["runAsNonRoot"], security["runAsUser"]) == (True, 1000)
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert pod["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    assert (pod["nodeSelector"], pod["serviceAccountName"]) == ({"pool": "h100"}, "trainer")
    amd = pod_of(dry_run(capsys, *PLAIN, "--gpus", "4", "--gpu-resource", "amd.com/gpu", *TRAIN)[-1])
    assert amd["containers"][0]["resources"]["limits"] == {"amd.com/gpu": "4"}


def test_a_run_that_keeps_checkpoints_in_a_bucket_needs_no_volume(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--image", "me/train:1", "train", "digits", "checkpoint.folder=s3://bucket/a"]
    pod = pod_of(dry_run(capsys, *words)[-1])
    assert pod["containers"][0]["workingDir"] == "/work"
    assert {"name": "scratch", "emptyDir": {}} in pod["volumes"]


@pytest.mark.parametrize("text", ["containers: []", "- a", "a: [", ""])
def test_a_file_of_something_else_is_no_pod(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "pod.yaml").write_text(text)
    assert refusal(capsys, *ALL, *TRAIN).startswith("--pod: ../pod.yaml ")


def test_words_reach_the_program_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    odd = ["train", "digits", "run.folder=it's $(HOME) #1: a"]
    assert pod_of(dry_run(capsys, *PLAIN, *odd)[-1])["containers"][0]["args"] == [
        *odd[:2],
        "run.folder=it's $$(HOME) #1: a",
    ]


def test_files_that_the_pods_need_are_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = tmp_path / "own.yaml"
    config.write_text((Path(__file__).parents[2] / "recipes" / "digits.yaml").read_text())
    try:
        Path("link.yaml").symlink_to(config)
        words = ["launch", "kubernetes", "--dry-run", *PLAIN]
        assert main([*words, "train", "link.yaml", "run.folder=a"]) == 0
        note = "note: link.yaml is here; the pods read it at /work/link.yaml, in the image or a volume\n"
        assert note in capsys.readouterr().err
        Path("link.yaml").unlink()
        assert main([*words, "train", str(config), "run.folder=a"]) == 0
        assert gives(capsys.readouterr().err, "note", config, config)
    finally:
        config.unlink()


@pytest.mark.parametrize("name", ["digits", "7B", "Größe_1.5", "", "-", "a" * 80])
def test_names_are_host_names(name: str) -> None:
    valid = re.compile("[a-z]([-a-z0-9]*[a-z0-9])?")
    assert valid.fullmatch(job_name(name, "abc123"))
    assert len(f"{job_name(name, 'abc123')}-node-0-0-xxxxx") <= 63


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (TRAIN, "--image: is missing; give an image"),
        (["--image", "", *TRAIN], "--image: is missing"),
        ([*PLAIN, "--volume", "b:/", *TRAIN], "--volume: 'b:/' is not CLAIM:/PATH"),
        ([*PLAIN, "--volume", "b:/a/../b", *TRAIN], "--volume: 'b:/a/../b' is not CLAIM:/PATH"),
        ([*PLAIN, "--volume", "b:/c:rx", *TRAIN], "--volume: 'b:/c:rx' is not CLAIM:/PATH or CLAIM:/PATH:ro"),
        ([*PLAIN, "--workdir", "work", *TRAIN], "--workdir: 'work' is not an absolute path"),
        (["--image", "x", *TRAIN], "run.folder: would be lost with the pod: /work/runs/a is in no volume"),
        ([*PLAIN, "train", "digits", "run.folder=/runs/a"], "run.folder: would be lost with the pod: /runs/a is in no"),
        (
            [*PLAIN[:2], "--volume", "work:/work:ro", *TRAIN],
            "run.folder: would be lost with the pod: /work/runs/a is in no volume",
        ),
        (
            [*PLAIN[:2], "--volume", "work:/work:ro", "--workdir", "/work", *TRAIN],
            "run.folder: would be lost with the pod: /work/runs/a is in no volume that can be written; give --volume",
        ),
        ([*PLAIN, "--nodes", "2", "plan", "digits"], "--nodes: 2, but `lockstep plan` runs on one node"),
        ([*PLAIN, "--volume", "work", *TRAIN], "--volume: 'work' is not CLAIM:/PATH"),
        ([*PLAIN, "--env", "AWS_SECRET_ACCESS_KEY=x", *TRAIN], "--env: AWS_SECRET_ACCESS_KEY looks like a secret"),
        ([*PLAIN, "--program", "a 'b", *TRAIN], '--program: "a \'b" is not a command: No closing quotation'),
        ([*PLAIN, "--label", "x", *TRAIN], "--label: 'x' is not KEY=VALUE"),
        ([*PLAIN, "--sweep", "optim.lr=1,2", "doctor"], "--sweep: needs a queue with job arrays, and kubernetes"),
        ([*PLAIN, *TRAIN, "--fresh"], "--fresh, --from, --fork: would start over with each pod"),
        ([*PLAIN, "--no-restart", "--retries", "1", *TRAIN], "--retries: needs pods that start again"),
        ([*PLAIN, "--user", "0", *TRAIN], "--user: '0' is not a whole number above 0"),
        ([*PLAIN, "train", "digits", "--optim.lrr", "1"], "--optim.lrr: unknown key; did you mean lr?"),
    ],
)
def test_mistakes_are_refused_here(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(capsys, *words).startswith(message)


def test_a_mistake_is_reported_once(capsys: pytest.CaptureFixture[str]) -> None:
    refused = refusal(capsys, "--image", "x", "--volume", "work", *TRAIN)
    assert gives(refused, "--volume: 'work'", "CLAIM:/PATH", "work:/work")
    both = refusal(capsys, "--image", "x", "--volume", "work", "--label", "a", *TRAIN)
    assert [line.split(":")[0].strip() for line in both.splitlines()[1:]] == ["--volume", "--label"]
