"""Images of chat messages: their checks, the engine's request, and the prompt for the router."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import pytest
from image_kit import IMAGE, IMAGE_ID, data_url, image_part, png, write_eyes
from text_kit import card, chat_body, example_preprocessor

from dynamo.errors import InvalidArgument
from dynamo.frontend.answer.completions import ChatStream
from dynamo.frontend.prompt.images import ImageExpansions
from dynamo.frontend.prompt.messages import IMAGE as PLACE
from dynamo.frontend.prompt.messages import ContentForm, template_messages
from dynamo.frontend.prompt.preprocessor import Prepared, Preprocessor
from dynamo.frontend.prompt.validation import parse_chat
from dynamo.llm.prefix_index import compute_block_hash_for_seq, short_hash
from dynamo.protocols import codec
from dynamo.protocols.control import RuntimeConfig
from dynamo.protocols.engine import EngineOutput, PreprocessedRequest
from dynamo.router.caches.prompt import HashedPrompt, Hasher


@pytest.fixture
def eyes(tmp_path: Path) -> Path:
    """A model that takes images."""
    return write_eyes(tmp_path / "eyes")


def load(directory: Path, **fields: Any) -> Preprocessor:
    return Preprocessor(card(source_path=str(directory), **fields))


def prepare(preprocessor: Preprocessor, *parts: Any, **fields: Any) -> Prepared:
    content = [{"type": "text", "text": each} if isinstance(each, str) else each for each in parts]
    messages = [{"role": "user", "content": content}]
    return preprocessor.chat(parse_chat(chat_body(messages=messages, **fields)))


def refused(preprocessor: Preprocessor, *parts: Any, **fields: Any) -> str:
    with pytest.raises(InvalidArgument) as caught:
        prepare(preprocessor, *parts, **fields)
    message: str = caught.value.message
    return message


def url_part(url: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def hashed(prepared: Prepared, block_size: int = 4) -> HashedPrompt:
    (request,) = prepared.requests
    return Hasher(block_size, True, False, False, lambda: 0.0).hash(
        request.token_ids, request.routing, True, 0.0
    )


def test_the_engine_gets_placeholder_and_image(eyes: Path) -> None:
    first, second = png(8, 8, seed=1), png(8, 8, seed=2)
    prepared = prepare(load(eyes), "A ", image_part(first), " B ", image_part(second))
    (request,) = prepared.requests
    assert prepared.prompts[0].text == f"A {IMAGE} B {IMAGE}"
    assert request.token_ids.count(IMAGE_ID) == 2
    assert request.multi_modal_data == {
        "image_url": [{"Url": data_url(first)}, {"Url": data_url(second)}]
    }
    assert request.extra_args is not None
    assert request.extra_args["mm_fields"] == [
        "messages[0].content[1].image_url",
        "messages[0].content[3].image_url",
    ]
    hashes = request.extra_args["mm_hashes"]
    assert len(set(hashes)) == 2 and all(len(each) == 64 for each in hashes)
    assert (
        request.stop_conditions.max_tokens is None
    )  # the engine computes it from the length with images
    assert codec.decoder(PreprocessedRequest).decode(codec.encode(request)) == request


def test_a_limit_of_the_client_is_kept(eyes: Path) -> None:
    prepared = prepare(load(eyes), image_part(png(8, 8)), max_tokens=7, n=2)
    assert [each.stop_conditions.max_tokens for each in prepared.requests] == [7, 7]
    assert all(each.multi_modal_data for each in prepared.requests)


def test_requests_without_images_are_as_before(eyes: Path) -> None:
    for parts in (["text"], ["text", "more"]):
        (request,) = prepare(load(eyes), *parts).requests
        assert (request.multi_modal_data, request.extra_args, request.routing) == (None,) * 3
        assert request.stop_conditions.max_tokens


BAD = {
    "ftp://host/a.png": "expected `data:image/…;base64,…`, got `ftp://host/a.png`",
    "/etc/passwd": "expected `data:image/",
    "data:text/html;base64,AAAA": "expected `data:image/",
    "data:image/png,AAAA": "expected `data:image/",
}


@pytest.mark.parametrize("url", BAD)
def test_a_bad_url_is_refused_with_its_place(eyes: Path, url: str) -> None:
    text = refused(load(eyes), "A", url_part(url))
    assert text.startswith("Validation: messages[0].content[1].image_url") and BAD[url] in text


def test_malformed_parts(eyes: Path) -> None:
    preprocessor = load(eyes)
    for part in (url_part(7), {"type": "image_url"}, {"type": "image_url", "image_url": "data:"}):
        assert "expected an object with a `url`" in refused(preprocessor, part)
    # Only the frontend may put a placeholder.
    for part in ({"type": "image"}, {"type": "input_audio", "input_audio": {}}):
        for others in ([], [image_part(png(8, 8))]):
            assert "this model takes text" in refused(preprocessor, *others, part)


def test_bounds(eyes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image = image_part(png(8, 8))
    two = RuntimeConfig(runtime_data={"max_images": 2})
    preprocessor = load(eyes, runtime_config=two)
    assert prepare(preprocessor, image, image).images is not None
    text = refused(preprocessor, image, image, image)
    assert text == (
        "Validation: messages[0].content[2].image_url: this model takes at most 2 images in a "
        "request, got 3"
    )
    monkeypatch.setattr("dynamo.frontend.prompt.images.MAX_IMAGES_BYTES", 1000)
    assert "send smaller ones" in refused(preprocessor, image_part(png(40, 40)))


def test_models_of_text_alone(eyes: Path) -> None:
    """Those without a vision part, whose worker takes none, or whose template has no place."""
    none = load(eyes, runtime_config=RuntimeConfig(runtime_data={"max_images": 0}))
    (eyes / "chat_template.jinja").write_text(
        "{% for message in messages %}{{ message.content }}{% endfor %}"
    )
    for preprocessor in (none, load(eyes), example_preprocessor()):
        assert preprocessor.images is None
        text = refused(preprocessor, "A", image_part(png(8, 8)))
        assert text == (
            "Validation: messages[0].content[1]: this model takes text, got a part of type "
            "`image_url`"
        )


def test_images_of_tools_for_models_of_text_alone() -> None:
    """An agent sends them again with each later request: an error would end its session."""
    result = {"role": "tool", "tool_call_id": "t", "content": [image_part(png(8, 8))]}
    text = "(An image, which this model cannot see.)"
    for form in (ContentForm.TEXT, ContentForm.EITHER, ContentForm.PARTS):
        (message,) = template_messages([result], form)
        plain = form is ContentForm.TEXT
        assert message["content"] == (text if plain else [{"type": "text", "text": text}])
    (seen,) = template_messages([{**result, "content": [PLACE]}], ContentForm.PARTS)
    assert seen["content"] == [PLACE]


def test_the_router_tells_images_apart(eyes: Path) -> None:
    """Blocks before the image match, those from it on only with the same image."""
    preprocessor = load(eyes)
    one, other = image_part(png(8, 8, seed=1)), image_part(png(8, 8, seed=2))
    long = "a b c d e f g h i j k l"
    first, second, again = (
        hashed(prepare(preprocessor, long, image, long)).hashes for image in (one, other, one)
    )
    assert first == again
    place = prepare(preprocessor, long, one).requests[0].token_ids.index(IMAGE_ID) // 4
    assert place > 1 and len(first) > place + 1
    assert first[:place] == second[:place]
    assert first[place] != second[place]


def test_the_router_learns_the_tokens_of_an_image(eyes: Path) -> None:
    """After the first answer the prompt is hashed as the engine caches it."""
    preprocessor = load(eyes)
    parts = ("a b c d e", image_part(png(8, 8)), "f g h i j k l")
    prepared = prepare(preprocessor, *parts)
    (request,) = prepared.requests
    stream = ChatStream(parse_chat(chat_body()), prepared, preprocessor.tokenizer, "x", 1)
    expansion = array("I", [50, IMAGE_ID, IMAGE_ID, IMAGE_ID, 51])
    stream.choices[0].push(EngineOutput([5], extra_args={"mm_expansions": [expansion]}))
    place = request.token_ids.index(IMAGE_ID)
    ids = [*request.token_ids[:place], *expansion, *request.token_ids[place + 1 :]]
    assert request.extra_args is not None
    mm_hash = short_hash(request.extra_args["mm_hashes"][0])
    infos: list[dict[str, Any] | None] = [
        {"mm_objects": [{"mm_hash": mm_hash}]}
        if start < place + len(expansion) and start + 4 > place
        else None
        for start in range(0, len(ids), 4)
    ]
    found = hashed(prepare(preprocessor, *parts))
    assert found.isl_tokens == len(ids)
    assert found.hashes.tolist() == compute_block_hash_for_seq(ids, 4, infos)


@pytest.mark.parametrize("given", [None, 7, [7], [["x"]], [[-1]], [[1], [2]], [{}]])
def test_a_malformed_expansion_is_ignored(eyes: Path, given: Any) -> None:
    preprocessor = load(eyes)
    prepared = prepare(preprocessor, image_part(png(8, 8)))
    stream = ChatStream(parse_chat(chat_body()), prepared, preprocessor.tokenizer, "x", 1)
    assert not stream.choices[0].push(EngineOutput([5], extra_args={"mm_expansions": given}))
    assert prepared.images is not None and preprocessor.images is not None
    assert preprocessor.images.expansions.get(prepared.images.hashes[0]) is None


def test_an_unknown_place_marks_the_whole_prompt(eyes: Path) -> None:
    """The text of the client may have the token of an image, too."""
    preprocessor = load(eyes)
    one, other = image_part(png(8, 8, seed=1)), image_part(png(8, 8, seed=2))
    first, second = (
        hashed(prepare(preprocessor, f"a b c d e f {IMAGE}", image)).hashes
        for image in (one, other)
    )
    assert len(first) > 1 and set(first).isdisjoint(second)


def test_old_expansions_are_dropped() -> None:
    kept = ImageExpansions(kept_tokens=6)
    for name in "abc":
        kept.put(name, array("I", [1, 2, 3]))
        kept.get("a")
    assert [name for name in "abc" if kept.get(name) is not None] == ["a", "c"]
