"""Models on request: groups, names, fields, progress, and agents that ask for two in turn."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from deployment import MODEL, free_port
from forked_kit import run_verb
from lazy_module import openai
from serving import ROOT, Serving

GRAPH = ROOT / "examples/on_request.yaml"
AGENTS, ROUNDS = 4, 3


class OnRequest(Serving):
    """The example graph; models load in a second."""

    def __init__(self, tmp_path: Path) -> None:
        super().__init__(tmp_path)
        self.namespace = "on-request"
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}/v1"

    def overrides(self) -> list[str]:
        return [
            f"--Frontend.http-port={self.port}",
            f"--Planner.log-dir={self.tmp_path}",
            *(f"--{name}.startup-time=1" for name in ("Coder", "Writer")),
        ]

    def awake(self) -> set[str]:
        """The models of the group that have a worker, in whatever state."""
        lines = [" ".join(one.cmdline()) for one in self.survivors()]
        return {name for name in ("coder", "writer") for line in lines if f"-name {name}" in line}

    def ask(self, model: str, **more: Any) -> httpx.Response:
        body = {"model": model, "messages": [{"role": "user", "content": "hello"}], **more}
        return httpx.post(f"{self.url}/chat/completions", json=body, timeout=60)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OnRequest]:
    made = OnRequest(tmp_path_factory.mktemp("request"))
    made.start(GRAPH, *made.overrides())
    yield made
    made.close()


def test_what_is_listed_and_what_is_served(site: OnRequest) -> None:
    names = {one["id"] for one in httpx.get(f"{site.url}/models", timeout=30).json()["data"]}
    assert names == {"coder", "writer", "gpt-4o-mini"}
    assert site.awake() == {"coder"}  # preloaded
    assert site.ask("helper").status_code == 200  # hidden


def test_a_stream_begins_with_the_progress_of_the_load(site: OnRequest) -> None:
    with openai.OpenAI(base_url=site.url, api_key="x", max_retries=0, timeout=60) as client:
        stream = client.chat.completions.create(
            model="gpt-4o-mini", messages=[{"role": "user", "content": "hello"}], stream=True
        )
        deltas = [(one.id, one.choices[0].delta) for one in stream if one.choices]
    thoughts = [text for _, delta in deltas if (text := getattr(delta, "reasoning_content", None))]
    assert thoughts, deltas
    assert all(re.fullmatch(r"(loading|waiting for a GPU),? \d+ [s%]\n", one) for one in thoughts)
    assert "hello" in "".join(delta.content or "" for _, delta in deltas)
    assert len({name for name, _ in deltas}) == 1
    assert site.awake() == {"writer"}  # one of the group


def test_fields_of_a_model(site: OnRequest) -> None:
    reload = ("reload", str(GRAPH), *site.overrides())
    done = run_verb(*reload, "--Writer.ServiceArgs.defaults.max_tokens=2", env=site.env)
    assert done.returncode == 0, done
    assert "restarted" not in done.stdout or "0 restarted" in done.stdout
    site.until(lambda: site.ask("writer").json()["usage"]["completion_tokens"] == 2, 60)
    assert site.ask("writer", max_tokens=1).json()["usage"]["completion_tokens"] == 1
    bad = run_verb(*reload, "--Coder.ServiceArgs.aliases=writer", env=site.env)
    assert bad.returncode == 2 and "'writer' is another model" in bad.stderr


def test_agents_that_ask_for_two_models_in_turn(site: OnRequest) -> None:
    """All their requests are answered, with one load for each time that a model is waited for."""

    def loads() -> int:
        return len(re.findall(r"added on-request_(?:Coder|Writer)\S* to", site.text()))

    async def agent(client: httpx.AsyncClient, number: int) -> None:
        for turn in range(ROUNDS):
            model = ("coder", "writer")[(number + turn) % 2]
            body = {"model": model, "prompt": "hello", "max_tokens": 4}
            answer = await client.post(f"{site.url}/completions", json=body, timeout=120)
            assert answer.status_code == 200, answer.text

    async def run() -> None:
        async with httpx.AsyncClient(timeout=120) as client:
            await asyncio.gather(*(agent(client, number) for number in range(AGENTS)))

    before = loads()
    asyncio.run(run())
    # Opposite agents meet at one model after the first answers: then each round is one load, and
    # a second one where a slow machine keeps them apart. Without turns there were one for each of
    # the AGENTS * ROUNDS requests.
    assert loads() - before <= 2 * ROUNDS, site.text()
    assert len(site.awake()) == 1


def test_a_stop_leaves_nothing(site: OnRequest) -> None:
    assert json.loads(httpx.get(f"{site.url[:-3]}/health", timeout=30).text)["models"]
    assert site.stop() == 0
    site.assert_clean()


SWAP = """
sendLoadingState: true
macros: {server: "PYTHON SERVER ${PORT}"}
models:
  one: {cmd: "${server} # the first", useModelName: org/remote-model, aliases: [first]}
  two:
    cmd: |
      # the second
      ${server}
    useModelName: org/remote-model
    ttl: 900
    filters: {stripParams: top_k, setParams: {temperature: 0.6}}
hooks: {on_startup: {preload: [one]}}
"""


def test_a_configuration_of_llama_swap_is_served(tmp_path: Path) -> None:
    """Servers of another make, started on request; their models take turns."""
    server = ROOT / "tests/e2e/openai_server.py"
    source = tmp_path / "swap.yaml"
    text = SWAP.replace("PYTHON", sys.executable).replace("SERVER", str(server))
    source.write_text(text.replace(" # the first", ""))
    serving = Serving(tmp_path)
    port = free_port()
    graph = tmp_path / "graph.yaml"
    words = ("init", "--from", str(source), "--write", str(graph), "--port", str(port))
    done = run_verb(*words, "--namespace", serving.namespace, env=serving.env)
    assert done.returncode == 0 and "2 models" in done.stdout, done
    url = f"http://127.0.0.1:{port}/v1"
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}
    try:
        serving.start(graph, f"--Planner.log-dir={tmp_path}")
        answer = httpx.post(f"{url}/chat/completions", json={"model": "first", **body}, timeout=60)
        assert answer.status_code == 200, answer.text
        assert serving.pids("One") and not serving.pids("Two")
        with openai.OpenAI(base_url=url, api_key="x", max_retries=0, timeout=60) as client:
            stream = client.chat.completions.create(
                model="two", messages=body["messages"], stream=True, extra_body={"top_k": 3}
            )
            deltas = [one.choices[0].delta for one in stream if one.choices]
        assert "w0" in "".join(delta.content or "" for delta in deltas)
        assert any(getattr(delta, "reasoning_content", None) for delta in deltas)
        serving.until(lambda: not serving.pids("One"))  # of one group
        assert serving.stop() == 0
        serving.assert_clean()
    finally:
        serving.close()


ABANDONED = """
Common: {{model-path: {model}, startup-time: SECONDS}}
Frontend: {{run: dynamo.frontend, http-port: {port}}}
Planner: {{run: dynamo.planner}}
A: {{run: dynamo.mocker, model-name: a, common-configs: [model-path, startup-time],
  ServiceArgs: {{workers: 0, idle_timeout: 15m, group: g}}}}
B: {{run: dynamo.mocker, model-name: b, common-configs: [model-path],
  ServiceArgs: {{workers: 0, idle_timeout: 15m, group: g}}}}
"""


def test_a_load_that_its_client_has_left_gives_way(tmp_path: Path) -> None:
    """A load of ten minutes would keep the other model of its group waiting for as long."""
    serving, port = Serving(tmp_path), free_port()

    def loads() -> bool:
        lines = [" ".join(one.cmdline()) for one in serving.survivors()]
        return any("--model-name a" in line for line in lines)

    text = ABANDONED.format(model=MODEL, port=port).replace("SECONDS", "600")
    url = f"http://127.0.0.1:{port}/v1/completions"
    try:
        serving.start(text, wait="started on demand: ")
        with pytest.raises(httpx.ReadTimeout):
            body = {"model": "a", "prompt": "hello", "max_tokens": 2}
            httpx.post(url, json=body, timeout=httpx.Timeout(60, read=3))
        serving.until(loads)
        assert httpx.post(url, json={**body, "model": "b"}, timeout=120).status_code == 200
        assert not loads()
        serving.wait_for("giving up its start: requests of b wait")
        assert serving.stop() == 0
        serving.assert_clean()
    finally:
        serving.close()
