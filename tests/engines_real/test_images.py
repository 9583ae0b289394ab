"""Images in chat messages: the answers of vLLM's own server, refusals, and routing by cache."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from answers_kit import CHAT, ask, assert_same, chat
from idefics_kit import IMAGE_TOKENS, write_idefics
from image_kit import data_url, image_part, png
from servers_kit import EngineDeployment, closing
from test_engine_events import overlap

BLOCK = 32
START_S = 200.0
TRUSTED = "--trust-request-mm-kwargs"
LIMIT = ("--limit-mm-per-prompt", '{"image": 3}')


@pytest.fixture(scope="module")
def eyes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that takes images."""
    return write_idefics(tmp_path_factory.mktemp("models") / "eyes")


@pytest.fixture(scope="module")
def both(
    tmp_path_factory: pytest.TempPathFactory, eyes: Path
) -> Iterator[tuple[EngineDeployment, EngineDeployment]]:
    """Our frontend with KV routing and a worker; vLLM's own server. They start side by side."""
    directory = tmp_path_factory.mktemp("eyes")
    with (
        closing(EngineDeployment(directory / "mine")) as ours,
        closing(EngineDeployment(directory / "theirs")) as other,
    ):
        ours.frontend("--router-mode", "kv", TRUSTED)
        ours.worker(eyes, "eyes", *LIMIT)
        other.vllm_server(eyes, "eyes", *LIMIT, TRUSTED)
        ours.wait_for_models("eyes")
        other.wait_for_models("eyes")
        yield ours, other


@pytest.fixture(scope="module")
def mine(both: tuple[EngineDeployment, EngineDeployment]) -> EngineDeployment:
    """Our frontend."""
    return both[0]


@pytest.fixture(scope="module")
def theirs(both: tuple[EngineDeployment, EngineDeployment]) -> EngineDeployment:
    """VLLM's own server."""
    return both[1]


def seen(*parts: Any, **fields: Any) -> dict[str, Any]:
    """A chat request of one message with these parts; a text may be given as it is."""
    content = [{"type": "text", "text": each} if isinstance(each, str) else each for each in parts]
    return chat("", model="eyes", **fields) | {"messages": [{"role": "user", "content": content}]}


def refusal(server: EngineDeployment, body: dict[str, Any]) -> str:
    """The message of a 400."""
    status, _, answer = server.request("POST", CHAT, body)
    assert status == 400, answer
    return str(json.loads(answer)["message"])


YES_OR_NO = {"choice": ["yes", "no"]}
ASKED = {
    "one": seen("What is it?", image_part(png(seed=1))),
    "before the text": seen(image_part(png(seed=2)), "What is it?"),
    "another shape": seen("What is it?", image_part(png(200, 30, seed=3))),
    "several": seen("A", image_part(png(seed=4)), "B", image_part(png(40, 90, seed=5)), "C"),
    "the same twice": seen(image_part(png(seed=6)), image_part(png(seed=6)), "equal?"),
    "without": seen("What is it?", " Tell me."),
    "log probabilities": seen("Hm", image_part(png(seed=7)), logprobs=True, top_logprobs=2),
    "a grammar": seen("Hm", image_part(png(seed=9)), structured_outputs=YES_OR_NO),
    # The limit is checked before the engine computes; the grammar ends the answer after one word.
    "an adequate limit": seen(
        "Hm", image_part(png(seed=9)), max_tokens=1900, structured_outputs=YES_OR_NO
    ),
}


@pytest.mark.parametrize("name", ASKED)
def test_answers_are_those_of_vllm(
    mine: EngineDeployment, theirs: EngineDeployment, name: str
) -> None:
    assert_same(mine, theirs, CHAT, ASKED[name])


def test_options_of_the_processor(mine: EngineDeployment, theirs: EngineDeployment) -> None:
    """With other options an image is another one, for the caches of engine and router, too."""
    image = image_part(png(200, 90, seed=12))
    plain = seen("Hm", image, max_tokens=12, logprobs=True, top_logprobs=1)
    dark = {**plain, "mm_processor_kwargs": {"rescale_factor": 0.0005}}
    gray = {**plain, "media_io_kwargs": {"image": {"image_mode": "RGB"}}}
    first = assert_same(mine, theirs, CHAT, plain)
    assert assert_same(mine, theirs, CHAT, dark)[0]["logprobs"] != first[0]["logprobs"]
    assert assert_same(mine, theirs, CHAT, plain) == first
    assert_same(mine, theirs, CHAT, gray)
    wrong = {**plain, "media_io_kwargs": {"image": {"rgba_background_color": "red"}}}
    assert "media_io_kwargs" in refusal(mine, wrong)


def test_async_llm_takes_images(mine: EngineDeployment, eyes: Path, tmp_path: Path) -> None:
    body = seen("What is it?", image_part(png(seed=1)))
    with closing(EngineDeployment(tmp_path)) as made:
        made.frontend("--router-mode", "kv")
        made.worker(eyes, "eyes", *LIMIT, "--use-async-llm")
        made.wait_for_models("eyes", timeout_s=START_S)
        assert ask(made, CHAT, body) == ask(mine, CHAT, body)
        bad = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
        assert "messages[0].content[1].image_url: not an image" in refusal(made, seen("A", bad))


def test_prefill_and_decode_workers_take_images(
    mine: EngineDeployment, eyes: Path, tmp_path: Path
) -> None:
    """Over vLLM's ExampleConnector, which shares blocks in files."""
    body = seen("some words " * 40, image_part(png(seed=31)), "and more " * 20)
    connector = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "kv")},
    }
    flags = (*LIMIT, "--kv-transfer-config", json.dumps(connector))
    with closing(EngineDeployment(tmp_path / "both")) as made:
        made.frontend("--router-mode", "kv")
        made.worker(eyes, "eyes", "--disaggregation-mode", "decode", *flags)
        made.worker(eyes, "eyes", "--disaggregation-mode", "prefill", *flags)
        made.wait_for_models("eyes", timeout_s=START_S)
        made.until(lambda: "prompts go to" in made.tail(), "a prefill worker", START_S)
        assert ask(made, CHAT, body) == ask(mine, CHAT, body)
        usage = made.post(CHAT, body)["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] >= 2 * BLOCK


def test_different_images_give_different_answers(mine: EngineDeployment) -> None:
    """The image is looked at, and its tokens are counted."""
    answers = [mine.post(CHAT, seen("Hm", image_part(png(seed=seed)))) for seed in (11, 12, 11)]
    texts = [each["choices"][0]["message"]["content"] for each in answers]
    assert texts[0] == texts[2] != texts[1]
    plain = mine.post(CHAT, seen("Hm"))["usage"]["prompt_tokens"]
    assert answers[0]["usage"]["prompt_tokens"] == plain + IMAGE_TOKENS


def test_a_bad_image_is_refused_with_its_place(mine: EngineDeployment) -> None:
    good, place = image_part(png()), "messages[0].content[1].image_url"
    cases = {
        "data:image/png;base64,AAAA": "not an image",
        "data:image/png;base64,!!": "not base64",
        data_url(png()[:200]): "not an image",
        "data:text/plain;base64,AAAA": "expected `data:image/",
        "http://127.0.0.1/a.png": "images are not fetched",
        "file:///etc/passwd": "images are not fetched",
    }
    for url, text in cases.items():
        found = refusal(mine, seen(good, {"type": "image_url", "image_url": {"url": url}}))
        assert place in found and text in found, found
    assert "at most 3 images" in refusal(mine, seen(*[good] * 4))
    assert mine.post(CHAT, seen(good))["usage"]["completion_tokens"]  # nothing is stuck


def test_a_conversation_is_routed_by_its_images(mine: EngineDeployment) -> None:
    """The router's overlap is what the engine has cached, once it has seen the image."""
    text = "some words about it " * 20
    body = seen(text, image_part(png(seed=21)), text)
    tokens = mine.post(CHAT, body)["usage"]["prompt_tokens"]
    full = tokens // BLOCK
    mine.until(lambda: overlap(mine, body) == full, "the router has the blocks of the prompt")
    again = mine.post(CHAT, body)["usage"]
    assert again["prompt_tokens_details"]["cached_tokens"] == (tokens - 1) // BLOCK * BLOCK
    other = seen(text, image_part(png(seed=22)), text)
    before = overlap(mine, other)
    assert 0 < before < full
    found = mine.post(CHAT, other)["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert found == before * BLOCK
