"""A graph with a real engine: it answers, its engine is killed, it comes back, leaves nothing."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import openai
import psutil
from deployment import free_port
from servers_kit import ENGINE_ENV, ENGINE_START_S, is_alive, title, tree
from serving import Serving

GRAPH = """
Frontend: {{run: dynamo.frontend, http-port: {port}, router-mode: kv}}
Worker:
  run: dynamo.vllm
  model: {model}
  served-model-name: tiny
  dtype: float32
  enforce-eager: true
  block-size: 32
  max-model-len: 2048
  ServiceArgs:
    workers: 1
    resources: {{gpu: 0}}
    envs: {envs}
"""


def test_serve_kill_recover_stop(serving: Serving, tiny_model: Path) -> None:
    port = free_port()
    graph = GRAPH.format(port=port, model=tiny_model, envs=json.dumps(ENGINE_ENV))
    serving.start(graph, wait="")
    serving.wait_for("(ready|started): ", timeout_s=ENGINE_START_S)
    with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none") as client:
        before = answer(client, serving)
        (worker,) = serving.pids("Worker")
        started = tree(worker)
        (core,) = [one for one in started if "EngineCore" in title(one)]
        core.kill()
        # The worker ends with its whole tree, and another one takes its place.
        serving.until(lambda: not any(map(is_alive, started)), timeout_s=30)
        assert serving.wait_for_pids("Worker", unlike=worker, timeout_s=30) != [worker]
        assert answer(client, serving) == before
    started = tree(serving.pid) | {psutil.Process(pid) for pid in serving.pids("Worker")}
    started |= {child for one in set(started) for child in tree(one.pid)}
    assert any("EngineCore" in title(one) for one in started)
    assert serving.stop(signal.SIGINT, timeout_s=60) == 0
    serving.assert_clean()
    assert not [title(one) for one in started if is_alive(one)]


def answer(client: openai.OpenAI, serving: Serving) -> str:
    """The greedy answer to a question, as soon as the model can be asked."""
    found: list[str] = []

    def asked() -> bool:
        try:
            chat = client.chat.completions.create(
                model="tiny",
                messages=[{"role": "user", "content": "Say something"}],
                max_tokens=8,
                temperature=0,
            )
        except openai.APIStatusError as error:
            assert error.status_code in (404, 500, 503), error
            return False
        except openai.APIConnectionError:
            return False
        found.append(chat.choices[0].message.content or "")
        return True

    serving.until(asked, timeout_s=ENGINE_START_S)
    return found[0]
