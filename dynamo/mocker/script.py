"""Scripted replies: the mocker answers with given texts, for tests of the formats of answers.

The file of ``--reply-script`` has a JSON object a line: ``{"reply": "text", "match": "text"}``. The
first line whose ``match`` occurs in the prompt is the reply; a line without ``match`` always is.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import tokenizers

from dynamo.errors import ConfigError, InvalidArgument
from dynamo.mocker.replies import Reply
from dynamo.protocols.codec import Tokens

__all__ = ["ReplyScript"]


class ScriptLine(msgspec.Struct, forbid_unknown_fields=True):
    """One line of the file."""

    reply: str
    match: str = ""


class ReplyScript:
    """The lines of ``path``, tokenized with the tokenizer in ``tokenizer_path``.

    Raises ConfigError for a file or a line that cannot be read.
    """

    def __init__(self, path: str, tokenizer_path: Path) -> None:
        self._tokenizer = tokenizers.Tokenizer.from_file(str(tokenizer_path))
        self._lines = [(line.match, self._ids(line.reply)) for line in _read(path)]

    def reply(self, prompt: Tokens, max_tokens: int) -> Reply:
        """Return the reply to ``prompt``, and "length" if ``max_tokens`` cuts it, else "stop".

        Raises InvalidArgument if no line matches.
        """
        text = self._tokenizer.decode(list(prompt), skip_special_tokens=False)
        for match, ids in self._lines:
            if match in text:
                cut = ids[:max_tokens]
                return Reply(iter(cut), len(cut), "stop" if len(cut) == len(ids) else "length")
        raise InvalidArgument("no line of the reply script matches the prompt")

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        if not ids:
            raise ConfigError("--reply-script: a `reply` has no tokens; give it some text")
        return ids


def _read(path: str) -> list[ScriptLine]:
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--reply-script {path}: can't be read: {error}") from None
    found = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                found.append(msgspec.json.decode(line, type=ScriptLine))
            except msgspec.DecodeError as error:
                raise ConfigError(
                    f"--reply-script {path}, line {number}: {error}; each line is an object "
                    'like {"reply": "text", "match": "part of the prompt"}'
                ) from None
    return found
