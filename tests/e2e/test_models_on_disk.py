"""`dynamo list`, `pull` and `rm`: the models in the caches of this machine."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from deployment import MODEL, free_port
from forked_kit import run_verb
from hub_server import COMMIT, Hub, cache_model, run_with_hub
from serving import Serving
from until import poll

NAME = "acme/tiny"
FILES = {
    "config.json": b"{}",
    "tokenizer.json": b"{ }",
    "model.safetensors": b"w" * 3_000_000,
    "tiny.Q8_0.gguf": b"GGUF8",
    "tiny.Q4_K_M.gguf": b"GGUF4",
}
DIGEST = "sha256:" + "a" * 64


class Ollama:
    """Answers as Ollama does to a pull and a deletion."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, str]] = []
        own = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                own.asked.append((self.command, self.path, body["model"]))
                self.send_response(200)
                self.end_headers()
                if body["model"].startswith("no"):
                    self.wfile.write(b'{"error":"pull model manifest: file does not exist"}\n')
                elif self.command == "POST":
                    self.wfile.write(b'{"status":"x","total":100,"completed":50}\n')
                    self.wfile.write(b'{"status":"success"}\n')

            do_POST = do_DELETE = answer

            def log_message(self, format: str, *args: Any) -> None:
                """Keep the test's output clean."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


class Disk:
    """The caches of one user, and the verbs that use them."""

    def __init__(self, path: Path, serving: Serving) -> None:
        self.hub_home, self.llama, self.ollama = path / "hf", path / "llama", path / "ollama"
        self.env = {
            **{k: v for k, v in serving.env.items() if not k.startswith("HF_")},
            "HF_HOME": str(self.hub_home),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "LLAMA_CACHE": str(self.llama),
            "OLLAMA_MODELS": str(self.ollama),
            "OLLAMA_HOST": "127.0.0.1:1",
        }

    def dynamo(self, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        return run_verb(*words, env={**self.env, **env})

    def begin(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "dynamo", *words],
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def listed(self) -> dict[str, dict[str, Any]]:
        done = self.dynamo("list", "--json")
        assert done.returncode == 0, done.stderr
        return {one["name"]: one for one in json.loads(done.stdout)}

    def add_ollama(self, name: str, tag: str) -> None:
        layers = [{"mediaType": "application/vnd.ollama.image.model", "digest": DIGEST, "size": 70}]
        manifest = self.ollama / "manifests/registry.ollama.ai/library" / name / tag
        manifest.parent.mkdir(parents=True)
        config = {"digest": DIGEST, "size": 7}
        manifest.write_text(json.dumps({"config": config, "layers": layers}))
        (self.ollama / "blobs").mkdir()
        (self.ollama / "blobs" / DIGEST.replace(":", "-")).write_bytes(b"x")


@pytest.fixture(params=["directory", "link"])
def disk(tmp_path: Path, serving: Serving, request: pytest.FixtureRequest) -> Disk:
    """The caches, also where their names are below a symbolic link."""
    if request.param == "link":
        (tmp_path / "disk").mkdir()
        (tmp_path / "home").symlink_to("disk")
        return Disk(tmp_path / "home", serving)
    return Disk(tmp_path, serving)


@pytest.fixture
def hub() -> Iterator[Hub]:
    found = Hub(NAME, FILES)
    yield found
    found.close()


def test_each_store_is_listed(disk: Disk) -> None:
    empty = disk.dynamo("list")
    assert empty.returncode == 0 and "no model on disk" in empty.stdout
    cache_model(disk.hub_home, NAME, {"config.json": b"{}", "model.safetensors": b"w" * 500})
    cache_model(disk.hub_home, "acme/prompts", {"tokenizer.json": b"{}"})
    partial = disk.hub_home / "hub/models--acme--half/blobs"
    partial.mkdir(parents=True)
    (partial / "abc.incomplete").write_bytes(b"x" * 40)
    disk.llama.mkdir()
    (disk.llama / "a.Q8_0.gguf").write_bytes(b"GGUF")
    disk.add_ollama("qwen3", "0.6b")
    (disk.ollama / "manifests/registry.ollama.ai/library/qwen3/torn").write_text("{")
    found = disk.listed()
    assert list(found) == sorted(found, key=str.lower) and len(found) == 5
    assert (found[NAME]["size_bytes"], found[NAME]["formats"]) == (502, ["safetensors"])
    assert found["acme/prompts"]["formats"] == [] and found["acme/prompts"]["is_complete"]
    assert (found["acme/half"]["size_bytes"], found["acme/half"]["is_complete"]) == (40, False)
    assert found["qwen3:0.6b"]["size_bytes"] == 77 and found["qwen3:0.6b"]["store"] == "Ollama"
    assert found[str(disk.llama.resolve() / "a.Q8_0.gguf")]["store"] == "llama.cpp"
    table = disk.dynamo("list").stdout
    assert "LAST USED" in table and "no weights, incomplete" in table and "today" in table


def test_a_model_is_pulled_listed_and_deleted(disk: Disk, hub: Hub) -> None:
    disk.env["HF_ENDPOINT"] = hub.url
    done = disk.dynamo("pull", NAME)
    assert done.returncode == 0, done.stderr
    assert "" not in done.stderr.splitlines()  # each bar of the Hub's library would end one
    assert "3 files match their checksums" in done.stdout
    assert f"dynamo run {NAME}" in done.stdout
    assert hub.downloaded() == {"config.json", "tokenizer.json", "model.safetensors"}
    again = disk.dynamo("pull", NAME)
    assert again.returncode == 0 and "it was complete" in again.stdout
    weights = disk.hub_home / f"hub/models--acme--tiny/snapshots/{COMMIT}/model.safetensors"
    weights.resolve().write_bytes(b"v" * 3_000_000)
    wrong = disk.dynamo("pull", NAME, "--verify")
    assert wrong.returncode == 2 and "model.safetensors differs from its checksum" in wrong.stderr
    assert disk.dynamo("pull", NAME).returncode == 0 and weights.read_bytes()[:1] == b"w"
    file = disk.dynamo("pull", f"{NAME}-GGUF:Q4_K_M".replace("-GGUF", ""))
    assert file.returncode == 0 and f"{NAME}/tiny.Q4_K_M.gguf is here" in file.stdout, file.stderr
    several = disk.dynamo("pull", f"{NAME}:gguf")
    assert several.returncode == 2 and f"{NAME}/tiny.Q8_0.gguf" in several.stderr
    asked = disk.dynamo("rm", NAME)
    assert asked.returncode == 2 and "--yes" in asked.stderr and NAME in disk.listed()
    deleted = disk.dynamo("rm", NAME, "--yes")
    assert deleted.returncode == 0 and "3.0 MB are free" in deleted.stdout
    assert disk.listed() == {} and "no model" in disk.dynamo("rm", NAME, "--yes").stderr
    assert list((disk.hub_home / "hub").glob("models--*")) == []


@pytest.mark.parametrize(
    ("etag", "commit"),
    [
        ("../../../../autostart/x.desktop", COMMIT),
        ("/tmp/dynamo-test-etag", COMMIT),
        ("..", COMMIT),
        ("a/b", COMMIT),
        ("", "../../../../autostart"),
        ("", "a/b"),
        ("\x1b[2J", COMMIT),
        ("not-a-checksum", COMMIT),
    ],
)
def test_a_hostile_hub_makes_no_file_outside_of_the_cache(
    disk: Disk, hub: Hub, etag: str, commit: str, tmp_path: Path
) -> None:
    """And none that is not compared."""
    disk.env["HF_ENDPOINT"] = hub.url
    hub.etags = {"tokenizer.json": etag} if etag else {}
    hub.commit = commit
    (tmp_path / "autostart").mkdir()
    done = disk.dynamo("pull", NAME)
    assert done.returncode in (1, 2) and "is here" not in done.stdout, done.stdout
    assert "would be a path here" in done.stderr or "was not compared" in done.stderr, done.stderr
    assert "\x1b[2J" not in done.stderr
    made = {path.resolve() for path in tmp_path.rglob("*") if path.is_file()}
    cache = disk.hub_home.resolve() / "hub"
    assert {one for one in made if one.read_bytes() == b"{ }"} <= set(cache.rglob("blobs/*"))
    assert not [*(tmp_path / "autostart").iterdir()] and not Path("/tmp/dynamo-test-etag").exists()


def test_a_link_out_of_the_cache_is_reported_and_nothing_deleted(
    disk: Disk, hub: Hub, tmp_path: Path
) -> None:
    disk.env["HF_ENDPOINT"] = hub.url
    assert disk.dynamo("pull", NAME).returncode == 0
    mine = tmp_path / ("a" * 40)
    mine.write_bytes(b"mine")
    file = disk.hub_home / f"hub/models--acme--tiny/snapshots/{COMMIT}/tokenizer.json"
    file.unlink()
    file.symlink_to(mine)
    done = disk.dynamo("pull", NAME, "--verify")
    assert done.returncode == 2 and "is a link out of the cache" in done.stderr, done.stderr
    assert mine.read_bytes() == b"mine" and file.is_symlink()


def test_a_model_that_is_opened_during_the_question_is_not_deleted(disk: Disk, hub: Hub) -> None:
    snapshot = cache_model(disk.hub_home, NAME, FILES)
    code = (
        "import os, pty, sys\n"
        "pid, fd = pty.fork()\n"
        "if pid == 0:\n"
        f"    os.execv(sys.executable, [sys.executable, '-m', 'dynamo', 'rm', {NAME!r}])\n"
        "shown = b''\n"
        "while b'[y/N]' not in shown:\n"
        "    shown += os.read(fd, 1000)\n"
        f"file = open({str(snapshot / 'model.safetensors')!r})\n"
        "os.write(fd, b'y\\n')\n"
        "try:\n"
        "    while piece := os.read(fd, 1000):\n"
        "        shown += piece\n"
        "except OSError:\n"
        "    pass\n"
        "print(shown.decode())\n"
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=disk.env, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2 and "is open in process" in done.stdout, done
    assert (snapshot / "model.safetensors").exists()


def test_an_interrupted_pull_goes_on_where_it_was(disk: Disk, hub: Hub) -> None:
    """Whatever moment it is killed at: the next one completes what is there."""
    disk.env["HF_ENDPOINT"] = hub.url
    for requests in (2, 4, 6):
        hub.requests.clear()
        words = [sys.executable, "-m", "dynamo", "pull", NAME]
        pulling = subprocess.Popen(words, env=disk.env, stderr=subprocess.PIPE)
        while len(hub.requests) < requests and pulling.poll() is None:
            pass
        pulling.kill()
        pulling.communicate(timeout=60)
    assert disk.dynamo("pull", NAME, "--verify").returncode == 0
    assert disk.listed()[NAME]["is_complete"]


def has_file(disk: Disk, name: str) -> bool:
    return bool(list(disk.hub_home.glob(f"hub/models--acme--tiny/snapshots/*/{name}")))


def weights_asked(hub: Hub) -> bool:
    return "model.safetensors" in hub.downloaded()


def test_ctrl_c_ends_a_pull_that_stalls(disk: Disk, hub: Hub) -> None:
    disk.env["HF_ENDPOINT"] = hub.url
    hub.gate.clear()
    pulling = disk.begin("pull", NAME)
    poll(lambda: weights_asked(hub) and has_file(disk, "config.json"))
    pulling.send_signal(signal.SIGINT)
    _, errors = pulling.communicate(timeout=60)
    assert pulling.returncode == 130 and f"to go on: dynamo pull {NAME}" in errors
    assert not disk.listed()[NAME]["is_complete"]
    offline = disk.dynamo("pull", NAME, HF_HUB_OFFLINE="1")
    assert offline.returncode == 2 and not disk.listed()[NAME]["is_complete"], offline
    hub.gate.set()
    assert disk.dynamo("pull", NAME).returncode == 0
    assert disk.listed()[NAME]["is_complete"]


def test_two_pulls_at_once_leave_one_model(disk: Disk, hub: Hub) -> None:
    """Also if one of them is killed."""
    disk.env["HF_ENDPOINT"] = hub.url
    hub.gate.clear()
    first = disk.begin("pull", NAME)
    poll(lambda: weights_asked(hub))
    asked = hub.requests.count(f"GET /api/models/{NAME}")
    second = disk.begin("pull", NAME)
    poll(lambda: hub.requests.count(f"GET /api/models/{NAME}") > asked)
    first.kill()
    first.communicate(timeout=60)
    hub.gate.set()
    _, errors = second.communicate(timeout=60)
    assert second.returncode == 0, errors
    assert disk.listed()[NAME]["is_complete"]
    assert not list(disk.hub_home.rglob("*.incomplete"))


def test_what_is_being_pulled_is_not_deleted(disk: Disk, hub: Hub) -> None:
    """At any moment: here no file is open yet."""
    cache_model(disk.hub_home, NAME, {"config.json": b"{}"})
    disk.env["HF_ENDPOINT"] = hub.url
    asked, go_on = threading.Event(), threading.Event()
    reply = hub.reply

    def late(path: str) -> tuple[int, bytes, dict[str, str]]:
        if "/tree/" in path:
            asked.set()
            go_on.wait(60)
        return reply(path)

    hub.reply = late  # type: ignore[method-assign]
    pulling = disk.begin("pull", NAME)
    try:
        assert asked.wait(60)
        done = disk.dynamo("rm", NAME, "--yes")
    finally:
        go_on.set()
        pulling.communicate(timeout=60)
    assert done.returncode == 2 and f"open in process {pulling.pid}" in done.stderr, done


def test_an_interrupted_deletion_leaves_no_model(disk: Disk) -> None:
    """A frontend that is killed while the page deletes, or ``dynamo rm``."""
    cache_model(disk.hub_home, NAME, {"config.json": b"{}", "model.safetensors": b"w" * 500})
    code = (
        "import os\n"
        "from dynamo.operations import stored_models as disk\n"
        "model = disk.deletable('acme/tiny', [])\n"
        "disk.shutil.rmtree = lambda path, **how: path.name != 'deleted' and os._exit(9)\n"
        "disk.delete(model)\n"
    )
    assert run_with_hub(code, disk.hub_home).returncode == 9
    found = disk.listed()[NAME]
    assert (found["is_complete"], found["size_bytes"]) == (False, 502)
    assert disk.dynamo("pull", NAME, HF_HUB_OFFLINE="1").returncode == 2
    assert disk.dynamo("rm", NAME, "--yes").returncode == 0 and disk.listed() == {}


def test_errors_say_what_to_do(disk: Disk, hub: Hub) -> None:
    for words, env, status, text in (
        (["pull"], {}, 2, "no model given; try: dynamo pull"),
        (["pull", str(MODEL)], {}, 0, "is here already"),
        (["pull", NAME], {"HF_HUB_OFFLINE": "1"}, 2, "unset HF_HUB_OFFLINE"),
        (["pull", NAME], {"HF_ENDPOINT": "http://127.0.0.1:1"}, 2, "cannot be downloaded"),
        (["pull", "acme/other"], {"HF_ENDPOINT": hub.url}, 2, "not on Hugging Face"),
        (["pull", "qwen3:8b"], {}, 1, "try: ollama serve"),
        (["rm", "qwen3:8b"], {}, 2, "see: dynamo list"),
    ):
        done = disk.dynamo(*words, **env)
        assert done.returncode == status and text in done.stdout + done.stderr, done
    huge = Hub(NAME, FILES)
    size = shutil.disk_usage(disk.hub_home.parent).total * 2
    reply = huge.reply

    def larger(path: str) -> tuple[int, bytes, dict[str, str]]:
        status, body, headers = reply(path)
        return status, body.replace(b'"size": 3000000', b'"size": %d' % size), headers

    huge.reply = larger  # type: ignore[method-assign]
    done = disk.dynamo("pull", NAME, HF_ENDPOINT=huge.url)
    huge.close()
    assert done.returncode == 2 and "GB are free" in done.stderr, done.stderr
    assert "model.safetensors" not in huge.downloaded()


def test_what_is_used_is_not_deleted(disk: Disk, serving: Serving) -> None:
    cache_model(disk.hub_home, NAME, {f.name: f.read_bytes() for f in Path(MODEL).iterdir()})
    cache_model(disk.hub_home, "acme/other", {"config.json": b"{}", "model.safetensors": b"w"})
    local = serving.tmp_path / "own"
    shutil.copytree(MODEL, local)
    graph = serving.graph(
        f"Frontend: {{run: dynamo.frontend, http-port: {free_port()}}}\n"
        f"Hub: {{run: dynamo.mocker, model: {NAME}}}\n"
        f"Local: {{run: dynamo.mocker, model: {local}}}\n"
    )
    serving.start(graph, wait="ready: ", HF_HOME=str(disk.hub_home), HF_HUB_OFFLINE="1")
    found = disk.listed()
    assert found[NAME]["served_by"] == [f"{serving.namespace}/Hub"]
    assert found[str(local)]["served_by"] == [f"{serving.namespace}/Local"]
    for name in (NAME, str(local)):
        done = disk.dynamo("rm", name, "--yes")
        assert done.returncode == 2 and "dynamo remove" in done.stderr
    weights = next((disk.hub_home / "hub/models--acme--other/snapshots").rglob("*.safetensors"))
    with weights.open("rb"):
        done = disk.dynamo("rm", "acme/other", "--yes")
        assert done.returncode == 2 and f"open in process {os.getpid()}" in done.stderr
    assert disk.dynamo("rm", "acme/other", "--yes").returncode == 0
    assert dynamo_remove(serving, NAME).returncode == 0
    assert disk.dynamo("rm", NAME, "--yes").returncode == 0
    assert serving.stop() == 0
    serving.assert_clean()


def dynamo_remove(serving: Serving, model: str) -> subprocess.CompletedProcess[str]:
    words = ["remove", model, "--namespace", serving.namespace]
    return run_verb(*words, env=serving.env)


def test_models_of_ollama_are_its_own_to_pull_and_delete(disk: Disk) -> None:
    ollama = Ollama()
    disk.env["OLLAMA_HOST"] = f"127.0.0.1:{ollama.server.server_address[1]}"
    disk.add_ollama("qwen3", "latest")
    pulled = disk.dynamo("pull", "qwen3")
    assert pulled.returncode == 0 and "downloading qwen3: 50%" in pulled.stdout, pulled
    wrong = disk.dynamo("pull", "nothing")
    assert wrong.returncode == 1 and "file does not exist" in wrong.stderr
    assert disk.dynamo("rm", "qwen3", "--yes").returncode == 0
    assert ollama.asked == [
        ("POST", "/api/pull", "qwen3:latest"),
        ("POST", "/api/pull", "nothing:latest"),
        ("DELETE", "/api/delete", "qwen3:latest"),
    ]
    ollama.server.shutdown()
    ollama.server.server_close()
