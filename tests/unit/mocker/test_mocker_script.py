"""Scripted replies of the mocker."""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest
import tokenizers

from dynamo.config.runtime import RuntimeSettings
from dynamo.config.worker import WorkerSettings
from dynamo.errors import ConfigError, InvalidArgument
from dynamo.mocker.arguments import engine_shape
from dynamo.mocker.replies import ReplyScript
from dynamo.mocker.settings import MockerSettings
from dynamo.mocker.worker import make_plan

TOKENIZER = Path(__file__).parents[3] / "examples/model/tokenizer.json"
PLAIN = tokenizers.Tokenizer.from_file(str(TOKENIZER))


def script(tmp_path: Path, text: str) -> ReplyScript:
    path = tmp_path / "script.jsonl"
    path.write_text(text)
    return ReplyScript(str(path), TOKENIZER)


def reply(made: ReplyScript, prompt: str, max_tokens: int = 100) -> tuple[str, str]:
    ids = array("I", PLAIN.encode(prompt, add_special_tokens=False).ids)
    found = made.reply(ids, max_tokens)
    taken = list(found.ids)
    assert len(taken) == found.length
    return PLAIN.decode(taken, skip_special_tokens=False), found.finish_reason


def test_the_first_line_that_matches(tmp_path: Path) -> None:
    made = script(
        tmp_path, '{"reply": "Grüße <tool_call>", "match": "<|im_end|>"}\n\n{"reply": "b"}'
    )
    assert reply(made, "Hi<|im_end|>") == ("Grüße <tool_call>", "stop")
    assert reply(made, "Hi") == ("b", "stop")
    assert reply(made, "<|im_end|>", 1)[1] == "length"


def test_no_line_matches(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="no line of the reply script matches"):
        reply(script(tmp_path, '{"reply": "a", "match": "zzz"}'), "Hi")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "line 1: .* each line is an object"),
        ('{"reply": "a"}\n{"replay": "a"}', "line 2: "),
        ('{"reply": ""}', "a `reply` has no tokens"),
    ],
)
def test_bad_files(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        script(tmp_path, text)
    with pytest.raises(ConfigError, match="can't be read"):
        ReplyScript(str(tmp_path / "none"), TOKENIZER)


@pytest.mark.parametrize("mocker", [{"reply": "script"}, {"reply_script": "replies.jsonl"}])
def test_the_file_and_the_flag_belong_together(mocker: dict[str, str]) -> None:
    settings = MockerSettings(**mocker)  # type: ignore[arg-type]
    worker = WorkerSettings(model_path=str(TOKENIZER.parent))
    with pytest.raises(ConfigError, match="give both --reply script and the file"):
        make_plan(RuntimeSettings(), None, worker, settings, engine_shape(settings))
