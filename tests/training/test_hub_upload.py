"""Models of the hub at a commit, and exports to it, against a server that speaks the hub's interface."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest
import yaml
from kit.commands import run_with_hub
from kit.failures import gives
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

NAME, DATA = "someone/tiny", "someone/rows"
TOKEN = "hf_writes"


class Hub:
    """Repositories with commits, and those that were uploaded.

    Attributes:
        branches: Commits of each repository's branches; `files`: of each commit.
        uploads: Files of the repositories that were created.
    """

    def __init__(self) -> None:
        self.branches: dict[str, dict[str, str]] = {}
        self.files: dict[str, dict[str, bytes]] = {}
        self.uploads: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}
        self.objects: dict[str, bytes] = {}
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub.get(self)

            def do_HEAD(self) -> None:
                hub.get(self)

            def do_POST(self) -> None:
                hub.post(self, self.rfile.read(int(self.headers["Content-Length"] or 0)))

            def do_PUT(self) -> None:
                content = self.rfile.read(int(self.headers["Content-Length"] or 0))
                hub.objects[self.path.rpartition("/")[2]] = content
                answer(self, {})

            def log_message(self, *words: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def commit(self, name: str, folder: Path) -> str:
        """Make the folder's files the newest commit of a repository; return its hash."""
        files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
        commit = hashlib.sha1(b"".join(files.values())).hexdigest()
        self.branches.setdefault(name, {})["main"] = commit
        self.files[commit] = files
        return commit

    def _commit(self, name: str, revision: str) -> str | None:
        return self.branches.get(name, {}).get(revision) or (revision if revision in self.files else None)

    def get(self, request: BaseHTTPRequestHandler) -> None:
        path = request.path.partition("?")[0].strip("/")
        words = path.split("/")
        if words[:1] == ["api"] and len(words) >= 4:
            name = "/".join(words[2:4])
            revision = words[5] if len(words) > 5 else "main"
            commit = self._commit(name, revision)
            if commit is None and name in self.private:
                return answer(request, {"id": name, "private": self.private[name], "sha": "0" * 40})
            if commit is None:
                code = "RevisionNotFound" if name in self.branches else "RepoNotFound"
                return answer(request, {}, 404, {"X-Error-Code": code})
            siblings = [{"rfilename": file} for file in self.files[commit]]
            tree = [
                {"type": "file", "path": file, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for file, content in self.files[commit].items()
            ]
            listed = words[4:5] == ["tree"]
            return answer(
                request, tree if listed else {"id": name, "sha": commit, "siblings": siblings, "private": False}
            )
        if "resolve" in words:
            at = words.index("resolve")
            name, revision, file = "/".join(words[at - 2 : at]), words[at + 1], "/".join(words[at + 2 :])
            commit = self._commit(name, revision)
            files = self.files.get(commit or "", self.uploads.get(name, {}))
            if file not in files:
                return answer(request, {}, 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit or "0" * 40})
            tag = {"ETag": f'"{hashlib.sha1(files[file]).hexdigest()}"', "X-Repo-Commit": commit or "0" * 40}
            return answer(request, files[file], headers=tag)
        return answer(request, {})

    def post(self, request: BaseHTTPRequestHandler, content: bytes) -> None:
        if "/paths-info/" in request.path:
            words = request.path.strip("/").split("/")
            files = self.files[self._commit("/".join(words[2:4]), words[5]) or ""]
            form = parse_qs(content.decode())
            asked = form.get("paths") or json.loads(content or b"{}").get("paths", [])
            sizes = {file: len(files[file]) for file in asked if file in files}
            found = [{"type": "file", "path": file, "size": size, "oid": "0" * 40} for file, size in sizes.items()]
            return answer(request, found)
        if request.headers["Authorization"] != f"Bearer {TOKEN}":
            return answer(request, {"error": "no"}, 403)
        path = request.path.partition("?")[0]
        if path.endswith("/validate-yaml"):
            return answer(request, {"errors": [], "warnings": []})
        if path.endswith("/repos/create"):
            asked = json.loads(content)
            name = "/".join(filter(None, [asked.get("organization") or "someone", asked["name"]]))
            if name in self.private:
                return answer(request, {"url": f"{self.url}/{name}", "error": "exists"}, 409)
            self.private[name] = asked.get("visibility") == "private" or asked.get("private") is True
            self.uploads[name] = {}
            return answer(request, {"url": f"{self.url}/{name}", "id": name})
        name = "/".join(path.strip("/").removeprefix("api/models/").removesuffix(".git").split("/")[:2])
        if "/preupload/" in path:
            files = json.loads(content)["files"]
            modes = [
                {"path": file["path"], "uploadMode": "lfs" if file["path"].endswith("s") else "regular"}
                for file in files
            ]
            return answer(request, {"files": [{**mode, "shouldIgnore": False} for mode in modes]})
        if path.endswith("/objects/batch"):
            objects = [
                {**each, "actions": {"upload": {"href": f"{self.url}/upload/{each['oid']}"}}}
                for each in json.loads(content)["objects"]
            ]
            return answer(request, {"transfer": "basic", "objects": objects})
        if "/commit/" in path:
            for line in map(json.loads, content.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    self.uploads[name][value["path"]] = base64.b64decode(value["content"])
                if line["key"] == "lfsFile":
                    self.uploads[name][value["path"]] = self.objects[value["oid"]]
            commit = {"commitUrl": f"{self.url}/{name}/commit/{'1' * 40}", "commitOid": "1" * 40}
            return answer(request, {**commit, "pullRequestUrl": None, "success": True})
        return answer(request, {}, 404)


def answer(
    request: BaseHTTPRequestHandler, content: Any, status: int = 200, headers: dict[str, str] | None = None
) -> None:
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    request.send_response(status)
    for key, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
        request.send_header(key, value)
    request.end_headers()
    if request.command != "HEAD":
        request.wfile.write(body)


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    made = Hub()
    yield made
    made.close()


def command(hub: Hub, home: Path, *words: object, code: int = 0, **variables: str | None) -> Any:
    settings = {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_OFFLINE": None, "HF_HUB_DISABLE_XET": "1"}
    settings |= dict.fromkeys(("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", "HF_TOKEN")) | variables
    done = run_with_hub(*words, cwd=home, **settings)
    assert done.returncode == code, done.stdout + done.stderr
    return done


def save_model(folder: Path, seed: int) -> Path:
    import torch

    torch.manual_seed(seed)
    words = ["<eos>", "<unk>", *(f"w{number}" for number in range(14))]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    sizes: dict[str, Any] = {"vocab_size": 16, "n_positions": 32, "n_embd": 16, "n_layer": 1, "n_head": 2}
    GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>").save_pretrained(folder)
    return folder


def recipe(home: Path, **model: object) -> None:
    rows = "".join(json.dumps({"text": f"w{n % 14} w{n % 5} w{n % 3}"}) + "\n" for n in range(16))
    (home / "rows.jsonl").write_text(rows)
    config = {
        "model": {"kind": "huggingface", "task": "causal-lm", "pretrained": NAME, **model},
        "data": {"train": {"kind": "huggingface", "name": "rows.jsonl"}},
        "batch": {"global_size": 4},
        "precision": {"compute": "fp32"},
        "launch": {"device": "cpu"},
        "monitor": {"tensorboard": False, "progress": "none"},
        "checkpoint": {"every": "1 steps"},
        "run": {"steps": 2, "folder": "run"},
    }
    (home / "run.yaml").write_text(yaml.safe_dump(config))


@pytest.fixture(scope="module")
def trained(hub: Hub, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A home with a finished run of the first commit of a model, and that commit; the hub has a second one."""
    home = tmp_path_factory.mktemp("home")
    first = hub.commit(NAME, save_model(home / "first", 1))
    recipe(home)
    command(hub, home, "train", "run.yaml")
    hub.commit(NAME, save_model(home / "second", 2))
    return home, first


def recorded(run: Path) -> list[str]:
    configs = [yaml.safe_load((run / "config.yaml").read_text())]
    configs += [json.loads(file.read_text())["manifest"]["config"] for file in run.glob("checkpoints/*/manifest.json")]
    return [config["model"]["revision"] for config in configs]


def test_a_run_keeps_the_commit_that_it_began_with(hub: Hub, trained: tuple[Path, str], tmp_path: Path) -> None:
    home, first = trained
    assert set(recorded(home / "run")) == {f"main@{first}"}
    shutil.copytree(home, tmp_path, dirs_exist_ok=True)
    assert hub.branches[NAME]["main"] != first
    command(hub, tmp_path, "train", "run.yaml", "--run.steps", 3)
    assert set(recorded(tmp_path / "run")) == {f"main@{first}"}


def test_another_revision_is_refused_unless_accepted(hub: Hub, trained: tuple[Path, str], tmp_path: Path) -> None:
    home, first = trained
    shutil.copytree(home, tmp_path, dirs_exist_ok=True)
    second = hub.branches[NAME]["main"]
    words = ("train", "run.yaml", "--run.steps", 3, "--model.revision", second)
    assert gives(command(hub, tmp_path, *words, code=2).stderr, "model.revision", f"main@{first}", second)
    command(hub, tmp_path, *words, "--accept-changes")
    assert recorded(tmp_path / "run")[0] == second


@pytest.mark.parametrize("revision", ["no-such", "5" * 40])
def test_a_revision_that_the_hub_lacks(hub: Hub, trained: tuple[Path, str], revision: str) -> None:
    words = ("train", "run.yaml", "--run.folder", "other", "--model.revision", revision)
    assert gives(command(hub, trained[0], *words, code=2).stderr, NAME, revision)


def test_a_revision_of_a_folder_is_refused(hub: Hub, trained: tuple[Path, str]) -> None:
    words = ("--run.folder", "other", "--model.pretrained", "first", "--model.revision", "main")
    assert gives(
        command(hub, trained[0], "train", "run.yaml", *words, code=2).stderr, "model.revision", "main", "first"
    )


def commit_rows(hub: Hub, folder: Path, words: int) -> str:
    folder.mkdir()
    rows = "".join(json.dumps({"text": f"w{n % words} w{n % 5} w{n % 3}"}) + "\n" for n in range(16))
    (folder / "train.jsonl").write_text(rows)
    return hub.commit(DATA, folder)


def test_data_keep_the_commit_that_a_run_began_with(hub: Hub, tmp_path: Path) -> None:
    def revisions(run: str) -> set[str]:
        folder = tmp_path / run
        manifests = [json.loads(file.read_text())["manifest"] for file in folder.glob("checkpoints/*/manifest.json")]
        return {manifest["config"]["data"]["train"]["revision"] for manifest in manifests}

    recipe(tmp_path, pretrained=str(save_model(tmp_path / "local", 1)))
    config = yaml.safe_load((tmp_path / "run.yaml").read_text())
    config["data"]["train"]["name"] = DATA
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    first = commit_rows(hub, tmp_path / "one", 14)
    command(hub, tmp_path, "train", "run.yaml")
    assert revisions("run") == {f"main@{first}"}
    second = commit_rows(hub, tmp_path / "two", 7)
    command(hub, tmp_path, "train", "run.yaml", "--run.steps", 3)
    assert revisions("run") == {f"main@{first}"}
    command(hub, tmp_path, "train", "run.yaml", "--run.folder", "later")
    assert revisions("later") == {f"main@{second}"}
    words = ("train", "run.yaml", "--run.steps", 4)
    refused = command(hub, tmp_path, *words, "--data.train.revision", second, code=2)
    assert gives(refused.stderr, "data.train.revision", f"main@{first}", second)
    refused = command(hub, tmp_path, *words, "--data.train.revision", "no-such", code=2)
    assert gives(refused.stderr, DATA, "no-such")
    refused = command(hub, tmp_path, *words, code=2, HF_HUB_OFFLINE="1")
    assert gives(refused.stderr, DATA, second, first)


# --- upload -----------------------------------------------------------------------------------------------------------


def export(hub: Hub, home: Path, name: str, *words: str, code: int = 0, token: str | None = TOKEN, **more: Any) -> Any:
    flags = ("--force", "--push-to-hub", name, *words)
    return command(hub, home, "export", "run", "--to", "out", *flags, code=code, HF_TOKEN=token, **more)


def test_an_upload_is_private_and_loads_with_its_card(hub: Hub, trained: tuple[Path, str], tmp_path: Path) -> None:
    home, first = trained
    done = export(hub, home, "someone/uploaded")
    assert f"uploaded: {hub.url}/someone/uploaded/commit/" in done.stdout
    assert hub.private["someone/uploaded"]
    for file, content in hub.uploads["someone/uploaded"].items():
        (tmp_path / file).write_bytes(content)
        assert content == (home / "out" / file).read_bytes()
    AutoModelForCausalLM.from_pretrained(tmp_path)
    card = (tmp_path / "README.md").read_text()
    _, front, text = card.split("---\n", 2)
    assert yaml.safe_load(front) == {
        "library_name": "transformers", "tags": ["lockstep"], "pipeline_tag": "text-generation", "base_model": NAME,
    }  # fmt: skip
    assert 'from_pretrained("someone/uploaded")' in text
    named = (
        "GPT2LMHeadModel",
        "2 steps",
        first,
        "rows.jsonl",
        "| 1 |",
        "| 2 |",
        f"pretrained: {NAME}",
        "lockstep-torch",
    )
    assert [value for value in named if value not in text] == []
    assert str(home) not in card


def test_a_card_that_was_changed_is_kept(hub: Hub, trained: tuple[Path, str], tmp_path: Path) -> None:
    home = trained[0]
    export(hub, home, "someone/kept")
    before = (home / "out" / "README.md").read_text()
    hub.uploads["someone/kept"]["README.md"] = b"mine on the hub"
    (home / "out" / "README.md").write_text("mine here")
    export(hub, home, "someone/kept")
    assert (home / "out" / "README.md").read_text() == "mine here"
    assert hub.uploads["someone/kept"]["README.md"] == b"mine on the hub"
    (home / "out" / "README.md").write_text(before)
    command(hub, home, "export", "run", "--to", "out", "--force", "--step", "1")
    card = (home / "out" / "README.md").read_text()
    assert " 1 step " in card
    assert 'from_pretrained("out")' in card


def test_a_public_repository_needs_the_flag(hub: Hub, trained: tuple[Path, str]) -> None:
    export(hub, trained[0], "someone/public", "--public")
    assert not hub.private["someone/public"]
    assert gives(export(hub, trained[0], "someone/public", code=1).stderr, "someone/public", "--public")


def test_an_upload_that_can_not_be(hub: Hub, trained: tuple[Path, str]) -> None:
    home = trained[0]
    assert gives(export(hub, home, "a/b/c", code=2).stderr, "--push-to-hub", "a/b/c")
    assert gives(export(hub, home, "someone/new", code=2, token=None).stderr, "token", "HF_TOKEN")
    assert gives(export(hub, home, "someone/new", code=1, token="hf_reads").stderr, "someone/new", "403")
    offline = export(hub, home, "someone/new", code=1, HF_HUB_OFFLINE="1").stderr
    assert gives(offline, "out", "hf upload someone/new", "--private")
    assert (home / "out" / "model.safetensors").is_file()
    assert gives(export(hub, home, "someone/new", "--format", "torch", code=2).stderr, "--push-to-hub", "torch")
    assert "someone/new" not in hub.private
