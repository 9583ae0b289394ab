"""``dynamo chat``: talk to a model of the running deployment in the terminal, line by line."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import readline
import signal
import sys
import termios
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType

import msgspec

from dynamo.cli.chat_client import ChatAnswer, ChatTarget, list_models, request_answer
from dynamo.cli.frontend_client import find_target
from dynamo.cli.options import ChatSettings
from dynamo.config import from_env, load
from dynamo.config.client import ClientSettings
from dynamo.config.runtime import RuntimeSettings
from dynamo.errors import ConfigError, DynamoError
from dynamo.http.client import Target
from dynamo.observability.logs import counted, one_line
from dynamo.runtime.process.os_process import heeded
from dynamo.runtime.process.paths import expanded, state_dir, write_new

DESCRIPTION = """Chat with a model. With a message, or without a terminal and one on stdin: print
the answer alone."""
EPILOG = """examples:
  dynamo chat
  dynamo chat 'What is a KV cache?'
  dynamo chat --model llama --system 'Answer in one sentence.'
  echo 'What is a KV cache?' | dynamo chat"""
_HISTORY = "chat_history"
_HISTORY_LINES = 1000
_DIM, _BOLD, _PLAIN = "\x1b[2m", "\x1b[1m", "\x1b[0m"
# \001 and \002 mark what takes no column: without them readline wraps long lines too early.
_PROMPT = f"\001{_BOLD}\002>\001{_PLAIN}\002 "
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_QUIT = ("/quit", "/exit", "/bye")
_COMMANDS = {
    "/reset": "forget the conversation, keep the system prompt",
    "/model [NAME]": "list the models, or go on with another one",
    "/system [TEXT]": "show the system prompt, or set it; - removes it",
    "/save FILE": "write the conversation as JSON",
    "/stats": "tokens and times of this session",
    "/quit": "leave, as Ctrl-D does; Ctrl-C stops an answer, a second one leaves",
}


class ChatSession:
    """A conversation with ``target``; lines that are typed are kept in ``history``."""

    def __init__(self, target: ChatTarget, system: str | None, history: Path) -> None:
        self._target = target
        self._url = target.endpoint.url
        self._system = system
        self._history = history
        self._messages: list[dict[str, str]] = []
        self._answers: list[ChatAnswer] = []
        self._interrupted = False
        self._ended_by = 0
        self._commands: dict[str, Callable[[str], None]] = {
            "/reset": self._reset,
            "/model": self._choose,
            "/system": self._set_system,
            "/save": self._save,
            "/stats": self._show_stats,
            "/help": self._help,
        }

    def run(self) -> int:
        """Talk until the end; return the exit status."""
        for number in heeded(signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._end)
        self._open_history()
        before = readline.get_current_history_length()
        print(f"{_DIM}{one_line(self._target.model)} at {self._url}; /help, /quit{_PLAIN}")
        try:
            while (line := self._read()) is not None and line not in _QUIT:
                if line.startswith("/"):
                    self._command(line)
                elif line:
                    self._ask(line)
        finally:
            self._keep_history(readline.get_current_history_length() - before)
        return 0

    def _end(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal as Ctrl-C, which restores the terminal, and end."""
        self._ended_by = number
        handler = signal.getsignal(signal.SIGINT)  # asyncio's own during an answer
        if callable(handler):
            handler(signal.SIGINT, frame)

    def _check_ended(self) -> None:
        if self._ended_by:
            raise SystemExit(128 + self._ended_by)

    def _read(self) -> str | None:
        """Return the next message, "" for none, None at the end: Ctrl-D, or Ctrl-C twice."""
        try:
            line = input(_PROMPT).strip()
            self._interrupted = False
            return line
        except EOFError:
            print()
            return None
        except KeyboardInterrupt:
            self._check_ended()
            again, self._interrupted = self._interrupted, True
            print("" if again else f"\n{_DIM}Ctrl-C again or /quit leaves{_PLAIN}")
            return None if again else ""
        except UnicodeDecodeError:
            print("this is not text in the terminal's encoding; nothing was sent")
            return ""

    def _command(self, line: str) -> None:
        name, _, text = line.partition(" ")
        command = self._commands.get(name)
        if command is None:
            print(f"unknown command {one_line(name)}; /help lists them")
            return
        try:
            command(text.strip())
        except DynamoError as error:
            print(one_line(error.message))

    def _ask(self, text: str) -> None:
        """Send the message and show the answer; Ctrl-C ends it and keeps what there is of it."""
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        asked, answer = {"role": "user", "content": text}, ChatAnswer()
        messages = [*system, *self._messages, asked]
        screen = _Screen()
        problem = ""
        try:
            with _keys_not_shown():
                asyncio.run(request_answer(self._target, messages, answer, screen.show))
        except KeyboardInterrupt:
            self._check_ended()
            self._interrupted, problem = True, "stopped; Ctrl-C again leaves"
        except DynamoError as error:
            problem = one_line(error.message)
        screen.end()
        # The part of an interrupted answer counts, a request without any answer does not.
        if answer.text or not problem:
            self._messages += [asked, {"role": "assistant", "content": answer.text}]
        self._answers.append(answer)
        print(f"{_DIM}[{'; '.join(part for part in (problem, _figures(answer)) if part)}]{_PLAIN}")

    def _reset(self, _: str) -> None:
        self._messages.clear()
        print("the conversation is empty")

    def _choose(self, name: str) -> None:
        models = asyncio.run(list_models(self._target.endpoint))
        if not name:
            for model in models:
                print(f"{'*' if model == self._target.model else ' '} {one_line(model)}")
        elif name in models:
            self._target = self._target._replace(model=name)
            print(f"now with {one_line(name)}")
        else:
            served = one_line(", ".join(models))
            print(f"{self._url} does not serve {one_line(name)}; it serves: {served}")

    def _set_system(self, text: str) -> None:
        if text:
            self._system = None if text == "-" else text
        print("no system prompt" if self._system is None else f"system prompt: {self._system}")

    def _save(self, name: str) -> None:
        if not name:
            print("name a file: /save FILE")
            return
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        content = {"model": self._target.model, "messages": [*system, *self._messages]}
        text = msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n"
        path = expanded(name)
        try:
            write_new(path, text, 0o600)
        except FileExistsError:
            print(f"{path} exists: name another file")
        except OSError as error:
            print(f"cannot write {path}: {error.strerror}")
        else:
            print(f"saved {counted(len(self._messages), 'message')} in {path}")

    def _show_stats(self, _: str) -> None:
        answers = [answer for answer in self._answers if answer.ttft_s]
        prompt = sum(answer.prompt_tokens for answer in answers)
        cached = sum(answer.cached_tokens or 0 for answer in answers)
        output = sum(answer.output_tokens for answer in answers)
        decode_s = sum(answer.last_token_s - answer.ttft_s for answer in answers)
        ttft_s = sum(answer.ttft_s for answer in answers) / max(len(answers), 1)
        print(f"{len(answers)} answers, {prompt:,} prompt tokens ({cached:,} cached)")
        print(f"{output:,} output tokens in {decode_s:.1f} s, mean TTFT {ttft_s * 1e3:,.0f} ms")

    def _help(self, _: str) -> None:
        for name, text in _COMMANDS.items():
            print(f"  {name:<15} {text}")

    def _open_history(self) -> None:
        readline.parse_and_bind("set enable-bracketed-paste on")  # a paste is one message
        readline.set_history_length(_HISTORY_LINES)
        with contextlib.suppress(OSError):  # no history, or one that cannot be read
            readline.read_history_file(self._history)

    def _keep_history(self, typed: int) -> None:
        try:
            # append_history_file makes no file, and an older one may be readable by other users.
            os.close(os.open(self._history, os.O_WRONLY | os.O_CREAT, 0o600))
            self._history.chmod(0o600)
            # Another chat may have added lines to the file since it was read: those stay.
            readline.append_history_file(typed, self._history)
        except OSError as error:
            print(f"the history was not saved: {error.strerror}")


@contextlib.contextmanager
def _keys_not_shown() -> Iterator[None]:
    """Keep the keys that are typed off the screen: they are the beginning of the next line."""
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    silent = [*before[:3], before[3] & ~termios.ECHO, *before[4:]]
    try:
        # Not TCSAFLUSH, which drops the keys that were typed before.
        termios.tcsetattr(terminal, termios.TCSANOW, silent)
        yield
    finally:
        with contextlib.suppress(termios.error):  # the terminal may be gone
            termios.tcsetattr(terminal, termios.TCSANOW, before)


class _Screen:
    """Prints pieces of an answer, reasoning dim; without control characters of the model."""

    def __init__(self) -> None:
        self._reasoning = False
        self._at_start = True

    def show(self, text: str, is_reasoning: bool) -> None:
        if is_reasoning != self._reasoning:
            self._reasoning = is_reasoning
            gap = "" if self._at_start else "\n"
            print(gap + (_DIM if is_reasoning else _PLAIN), end="")
        text = _CONTROL.sub("", text)
        print(text, end="", flush=True)
        if text:
            self._at_start = text.endswith("\n")

    def end(self) -> None:
        print(_PLAIN + ("" if self._at_start else "\n"), end="", flush=True)


def _figures(answer: ChatAnswer) -> str:
    """The figures of one answer; "" before its first token."""
    if not answer.ttft_s:
        return ""
    parts = [f"TTFT {answer.ttft_s * 1e3:,.0f} ms"]
    if answer.output_tokens:
        parts.insert(0, counted(answer.output_tokens, "token"))
    if answer.tokens_per_s:
        parts.insert(1, f"{answer.tokens_per_s:,.1f} tok/s")
    if answer.finish_reason == "length":
        parts.append("cut off at the limit of tokens")
    return ", ".join(parts)


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
        if settings.message:
            return _answer(chosen, settings.system, settings.message)
        if not (sys.stdin.isatty() and sys.stdout.isatty()):
            return _answer(chosen, settings.system, _message_on_stdin())
        history = state_dir(from_env(RuntimeSettings)) / _HISTORY
        return ChatSession(chosen, settings.system, history).run()
    except DynamoError as error:
        print(f"dynamo chat: {one_line(error.message)}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1


def _model(named: str | None, models: Sequence[str], target: Target) -> str:
    """Return the model that is meant. Raises DynamoError with a remedy."""
    served = ", ".join(models)
    if not models:
        raise DynamoError(f"{target.url} serves no model now; see dynamo ps, or: dynamo load MODEL")
    if named is None and len(models) > 1:
        raise ConfigError(f"{target.url} serves several models; name one with --model: {served}")
    if named is not None and named not in models:
        raise ConfigError(f"{target.url} does not serve {named!r}; name one of: {served}")
    return named or models[0]


def _message_on_stdin() -> str:
    try:
        text = sys.stdin.read()
    except UnicodeDecodeError as error:
        raise ConfigError(f"the message on stdin is not text: {error}") from None
    if not text.strip():
        raise ConfigError("there is no message on stdin: dynamo chat 'hello'")
    return text


def _answer(target: ChatTarget, system: str | None, text: str) -> int:
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
