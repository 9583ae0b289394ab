"""Where a model comes from: a directory, a GGUF file, the Hugging Face cache, a download."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from hub_server import COMMIT, Hub, cache_model, run_with_hub

from dynamo.errors import ConfigError
from dynamo.llm.model_source import is_hub_id, resolve_model

NAME = "acme/tiny-1.5B"
PROMPT_FILES = {
    "config.json": b'{"max_position_embeddings": 64}',
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
}
FILES = {
    **PROMPT_FILES,
    "model.safetensors": b"w" * 3_000_000,
    "pytorch_model.bin": b"p" * 10,
    "tiny.Q8_0.gguf": b"GGUF",
    "original/consolidated.00.pth": b"o",
    "README.md": b"# tiny",
}
CODE = """
import logging, sys
logging.basicConfig(level=logging.INFO, format="%(name)s %(message)s")
from dynamo.errors import ConfigError
from dynamo.llm import model_download, model_source
model_download._LINE_EVERY_S = 0.0
try:
    found = model_source.resolve_model({source!r}, {options})
    print(found.path, found.name, found.directory().name if not found.is_gguf else "")
except ConfigError as error:
    print(type(error).__name__, error.message)
"""
HubOf = Callable[..., Hub]


@pytest.fixture
def hub_of() -> Iterator[HubOf]:
    hubs: list[Hub] = []

    def make(files: Mapping[str, bytes] = FILES, status: int = 200) -> Hub:
        hubs.append(Hub(NAME, files, status))
        return hubs[-1]

    yield make
    for hub in hubs:
        hub.close()


def resolve(home: Path, source: str = NAME, options: str = "", **env: str) -> tuple[str, str]:
    """Return what a process with this Hugging Face home prints, and its log."""
    done = run_with_hub(CODE.format(source=source, options=options), home, **env)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), done.stderr


def test_a_directory_is_used_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    found = resolve_model(tmp_path / "tiny")
    assert (found.path, found.name, found.is_gguf) == (tmp_path / "tiny", "tiny", False)


@pytest.mark.parametrize("start", [b"", b"version https://git-lfs.github.com/spec/v1\n"])
def test_a_file_that_only_is_named_like_a_gguf_file(tmp_path: Path, start: bytes) -> None:
    path = tmp_path / "pointer.gguf"
    path.write_bytes(start)
    with pytest.raises(ConfigError, match=r"is not a GGUF file: it begins with .* download it"):
        resolve_model(path)


def test_a_gguf_file_needs_a_tokenizer_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "tiny.Q8_0.gguf"
    path.write_bytes(b"GGUF")
    found = resolve_model(str(path))
    assert (found.path, found.name, found.is_gguf) == (path, "tiny.Q8_0", True)
    with pytest.raises(ConfigError, match=r"no tokenizer\.json beside it.*give the directory"):
        found.directory()
    (tmp_path / "tokenizer.json").write_bytes(b"{}")
    assert found.directory().path == tmp_path


@pytest.mark.parametrize(
    "source",
    [
        *("./missing", "/no/such/model", "a/b/c", "modle", "~/x/y.gguf", "hf://", "here/modle"),
        "~no-such-user/x",
    ],
)
def test_a_path_is_not_looked_up_on_the_hub(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    assert not is_hub_id(source)
    with pytest.raises(ConfigError, match=r"no such directory: .*an id on Hugging Face such as"):
        resolve_model(source)


@pytest.mark.parametrize("source", ["a/b", "hf://a/b", "hf://gpt2", "a/b/c.gguf"])
def test_ids_of_the_hub(source: str) -> None:
    assert is_hub_id(source)


def test_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").touch()
    with pytest.raises(ConfigError, match="is a file, but not a GGUF file; give the directory"):
        resolve_model(tmp_path / "x.safetensors")


def test_the_cache_is_used_offline(tmp_path: Path) -> None:
    snapshot = cache_model(tmp_path, NAME, PROMPT_FILES)
    expected = f"{snapshot} {NAME} {NAME}"
    assert resolve(tmp_path, HF_HUB_OFFLINE="1")[0] == expected
    assert resolve(tmp_path, f"hf://{NAME}", HF_HUB_OFFLINE="1")[0] == expected
    nowhere = "http://127.0.0.1:9"  # no server listens there
    assert resolve(tmp_path, options="download=False", HF_ENDPOINT=nowhere)[0] == expected
    assert resolve(tmp_path, HF_ENDPOINT=nowhere)[0] == expected


def test_offline_without_a_cached_model_is_an_error(tmp_path: Path) -> None:
    text, _ = resolve(tmp_path, HF_HUB_OFFLINE="1")
    assert text == (
        f"ConfigError no such directory, and not (complete) in the Hugging Face cache: the model "
        f"'{NAME}' ({tmp_path}/hub); download it with 'dynamo pull {NAME}' or unset HF_HUB_OFFLINE"
    )
    for options in ("", "weights=True"):
        text, _ = resolve(tmp_path, options=options, HF_ENDPOINT="http://127.0.0.1:9")
        assert "not (complete) in the Hugging Face cache" in text
        assert text.startswith("ModelUnreachable ")
        assert "from http://127.0.0.1:9: [Errno 111] Connection refused; " in text


def test_only_the_files_of_prompts_are_downloaded(tmp_path: Path, hub_of: HubOf) -> None:
    hub = hub_of()
    text, _ = resolve(tmp_path, HF_ENDPOINT=hub.url, HF_TOKEN="hf_secret")
    snapshot = tmp_path / f"hub/models--acme--tiny-1.5B/snapshots/{COMMIT}"
    assert text == f"{snapshot} {NAME} {NAME}"
    assert hub.downloaded() == set(PROMPT_FILES)
    assert "Bearer hf_secret" in hub.tokens
    assert (snapshot / "tokenizer.json").read_bytes() == b"{}"


def test_the_weights_come_in_one_format_with_progress(tmp_path: Path, hub_of: HubOf) -> None:
    hub = hub_of()
    text, log = resolve(tmp_path, options="weights=True", HF_ENDPOINT=hub.url)
    assert NAME in text
    assert hub.downloaded() == {*PROMPT_FILES, "model.safetensors", "README.md"}
    assert f"downloading {NAME}: 100 % of 0.00 GB" in log
    again, _ = resolve(tmp_path, options="weights=True", HF_HUB_OFFLINE="1")
    assert again == text
    again, log = resolve(tmp_path, options="weights=True", HF_ENDPOINT="http://127.0.0.1:9")
    assert again == text and "looking in the cache" in log


def test_a_disk_that_takes_no_weights_is_named(tmp_path: Path, hub_of: HubOf) -> None:
    limited = "weights=__import__('resource').setrlimit(1, (1_000_000, 1_000_000)) is None"
    text, log = resolve(tmp_path, options=limited, HF_ENDPOINT=hub_of().url)
    assert text.startswith(f"ConfigError the model '{NAME}' cannot be stored in {tmp_path}/hub: ")
    assert "cannot be reached" not in log


def test_pickled_weights_are_downloaded_if_there_are_no_others(
    tmp_path: Path, hub_of: HubOf
) -> None:
    hub = hub_of({**PROMPT_FILES, "pytorch_model.bin": b"p"})
    resolve(tmp_path, options="weights=True", HF_ENDPOINT=hub.url)
    assert "pytorch_model.bin" in hub.downloaded()


def test_one_gguf_file_is_downloaded(tmp_path: Path, hub_of: HubOf) -> None:
    hub = hub_of()
    text, _ = resolve(tmp_path, f"{NAME}/tiny.Q8_0.gguf", HF_ENDPOINT=hub.url)
    assert text.endswith(f"snapshots/{COMMIT}/tiny.Q8_0.gguf tiny.Q8_0")
    assert hub.downloaded() == {"tiny.Q8_0.gguf"}
    text, _ = resolve(tmp_path, f"{NAME}/other.gguf", HF_ENDPOINT=hub.url)
    assert text == (
        f"ConfigError no such file on Hugging Face: the model '{NAME}/other.gguf'; correct its name"
    )


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (401, "is gated on Hugging Face: accept its licence there, then set HF_TOKEN"),
        (404, "no such directory, and not on Hugging Face: the model 'acme/tiny-1.5B'; correct"),
        (400, ": the server replied with status 400; it is no directory here, and not (complete)"),
    ],
)
def test_answers_of_the_hub_are_explained(
    tmp_path: Path, hub_of: HubOf, status: int, words: str
) -> None:
    hub = hub_of(FILES, status)
    for options in ("", "weights=True"):
        text, _ = resolve(tmp_path, options=options, HF_ENDPOINT=hub.url)
        assert text.startswith("ConfigError ") and words in text


def test_a_download_that_may_succeed_later(tmp_path: Path, hub_of: HubOf) -> None:
    text, _ = resolve(tmp_path, HF_ENDPOINT=hub_of(FILES, 408).url)
    assert text.startswith("ModelUnreachable ") and "replied with status 408" in text


def test_a_repository_without_a_config_is_refused(tmp_path: Path, hub_of: HubOf) -> None:
    text, _ = resolve(tmp_path, HF_ENDPOINT=hub_of({"x.gguf": b"GGUF"}).url)
    assert "has no config.json: give the id of a model for transformers, or a GGUF file" in text
