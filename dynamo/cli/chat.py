"""``dynamo chat``: talk to a model of the running deployment in the terminal."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from dynamo.cli.chat_client import ChatAnswer, ChatTarget, list_models, request_answer
from dynamo.cli.chat_session import ChatSession
from dynamo.cli.frontend_url import find_target
from dynamo.config import from_env, load
from dynamo.config.chat import ChatSettings
from dynamo.config.client import ClientSettings
from dynamo.config.runtime import RuntimeSettings
from dynamo.errors import ConfigError, DynamoError
from dynamo.http.target import Target
from dynamo.observability.logs import one_line
from dynamo.runtime.process.paths import state_dir

__all__ = ["main"]

DESCRIPTION = """Chat with a model. Without a terminal: read one message from stdin, print the
answer alone."""
EPILOG = """examples:
  dynamo chat
  dynamo chat --model llama --system 'Answer in one sentence.'
  echo 'What is a KV cache?' | dynamo chat"""

_HISTORY = "chat_history"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb; return the exit status: 1 when there is no answer."""
    settings, client = load(
        "dynamo chat", DESCRIPTION, [ChatSettings, ClientSettings], argv, epilog=EPILOG
    )
    try:
        target = find_target(client)
        models = asyncio.run(list_models(target))
        model = _model(settings.model, models, target)
        chosen = ChatTarget(target, model, settings.max_tokens)
        if not (sys.stdin.isatty() and sys.stdout.isatty()):
            return _answer_stdin(chosen, settings.system)
        history = state_dir(from_env(RuntimeSettings)) / _HISTORY
        return ChatSession(chosen, settings.system, history).run()
    except DynamoError as error:
        print(f"dynamo chat: {one_line(error.message)}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1


def _model(named: str | None, models: Sequence[str], target: Target) -> str:
    """Return the model that is meant. Raises DynamoError with a remedy."""
    shown = ", ".join(models)
    if not models:
        raise DynamoError(f"{target.url} serves no model now; see dynamo ps, or: dynamo load MODEL")
    if named is None and len(models) > 1:
        raise ConfigError(f"{target.url} serves several models; name one with --model: {shown}")
    if named is not None and named not in models:
        raise ConfigError(f"{target.url} does not serve {named!r}; name one of: {shown}")
    return named or models[0]


def _answer_stdin(target: ChatTarget, system: str | None) -> int:
    try:
        text = sys.stdin.read()
    except UnicodeDecodeError as error:
        raise ConfigError(f"the message on stdin is not text: {error}") from None
    if not text.strip():
        raise ConfigError("there is no message on stdin: echo 'hello' | dynamo chat")
    messages = [] if system is None else [{"role": "system", "content": system}]
    messages.append({"role": "user", "content": text})

    def show(piece: str, is_reasoning: bool) -> None:
        if not is_reasoning:
            print(piece, end="", flush=True)

    answer = ChatAnswer()
    try:
        asyncio.run(request_answer(target, messages, answer, show))
    finally:
        if answer.text and not answer.text.endswith("\n"):
            print(flush=True)
    return 0
