"""Scripted replies of the mocker."""

from __future__ import annotations

from array import array
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers

from dynamo.config.runtime import RuntimeSettings
from dynamo.config.worker import WorkerSettings
from dynamo.errors import ConfigError, InvalidArgument
from dynamo.mocker.arguments import engine_shape
from dynamo.mocker.replies import ReplyScript, sequence_reply
from dynamo.mocker.settings import MockerSettings
from dynamo.mocker.worker import MockerService, make_plan
from dynamo.observability.metrics import Registry
from dynamo.protocols.engine import GENERATED_TOKENS, PreprocessedRequest
from dynamo.runtime.requests.admission import AdmissionQueue

TOKENIZER = Path(__file__).parents[3] / "examples/model/tokenizer.json"
PLAIN = tokenizers.Tokenizer.from_file(str(TOKENIZER))


def script(tmp_path: Path, text: str) -> ReplyScript:
    path = tmp_path / "script.jsonl"
    path.write_text(text)
    return ReplyScript(str(path), TOKENIZER)


def reply(made: ReplyScript, prompt: str, max_tokens: int = 100) -> tuple[str, str]:
    ids = array("I", PLAIN.encode(prompt, add_special_tokens=False).ids)
    found = made.reply(ids, max_tokens)
    assert found is not None
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


def answered(made: MockerService, prompt: list[int], sent: int = 0) -> list[int]:
    """The reply to ``prompt``, the last ``sent`` tokens of which are the answer so far."""
    rank: Any = SimpleNamespace(prefill_only=False, max_sequence_tokens=1000)
    request = PreprocessedRequest("tiny", array("I", prompt))
    request.stop_conditions.max_tokens = 5
    request.extra_args = {GENERATED_TOKENS: sent}
    return list(islice(made._reply(request, rank).ids, 5))


def test_no_line_matches(tmp_path: Path) -> None:
    """Then ``--reply`` decides, also behind a migration."""
    made = script(tmp_path, '{"reply": "a b c d e", "match": "zzz"}')
    admission = AdmissionQueue(0, 0, Registry())
    only = MockerService((), admission, "script", made)
    with pytest.raises(InvalidArgument, match="no line of the reply script matches"):
        answered(only, [1001, 1002])
    others = MockerService((), admission, "sequence", made)
    first = answered(others, [1001, 1002])
    assert first == list(islice(sequence_reply(array("I", [1001, 1002]), 5).ids, 5))
    assert answered(others, [1001, 1002, *first[:2]], 2)[:3] == first[2:]
    assert answered(MockerService((), admission, "echo", made), [1001, 1002]) == [1001, 1002]
    scripted = PLAIN.encode("zzz", add_special_tokens=False).ids
    whole = answered(others, scripted)
    assert PLAIN.decode(whole) == PLAIN.decode(PLAIN.encode("a b c d e").ids[:5])
    assert answered(others, [*scripted, *whole[:2]], 2) == whole[2:]


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


def test_a_script_needs_its_file() -> None:
    settings = MockerSettings(reply="script")
    worker = WorkerSettings(model_path=str(TOKENIZER.parent))
    with pytest.raises(ConfigError, match="needs the file of --reply-script"):
        make_plan(RuntimeSettings(), None, worker, settings, engine_shape(settings))
