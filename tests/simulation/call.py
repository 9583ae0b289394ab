"""One request of another API, of a tool or of a bad client, and what its answer has to be."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from history import Answer

if TYPE_CHECKING:
    from answer_cases import Case

__all__ = [
    "ANSWERS",
    "FRONTEND",
    "GENERATIONS",
    "LISTING",
    "PAD_BYTES",
    "WORKER",
    "Call",
    "has_whole_arguments",
]

ANSWERS: dict[str, Answer] = {}
"""The answers of an undisturbed deployment, by the names of the calls."""

WORKER, LISTING, FRONTEND = "worker", "listing", "frontend"
"""What a call needs for its answer: a worker; a worker if its model is to be listed, though what is
known of the model may be enough; a frontend alone."""

GENERATIONS = ("chat", "completions", "responses", "messages")
TEAPOT = 418
"""The status of requests that a worker of the public API refuses."""
PAD_BYTES = 140 << 10
"""More than a body that is parsed on the event loop."""


@dataclass(frozen=True)
class Call:
    """One request. ``api`` says how its answer is read: a generation, a ``read``, a ``refusal``, or
    a ``watch``: a stream without an end, which the client leaves.

    ``status`` and ``says`` are of reads and refusals: the status, and a text that the body has.
    ``sent`` is the body if it is no JSON, ``message`` all that is sent if it is not HTTP as usual.
    ``case`` is the message that the model writes, if its format matters; ``answer`` its answer, if
    no deployment has to be asked; ``adapter`` is one that comes and goes. ``prompts`` of one body
    have an answer each. ``headed`` are header lines that the answer has; it has none with a "-".
    With ``drip_s`` the message comes byte by byte, with such pauses.
    ``then`` are calls that follow on the same connection; ``{id}`` in their paths and bodies is the
    id of the answer before.
    """

    name: str
    api: str
    path: str
    body: dict[str, Any] = field(default_factory=dict)
    method: str = "POST"
    needs: str = WORKER
    status: int = 200
    says: str = ""
    headers: str = ""
    sent: bytes | None = None
    message: bytes = b""
    pad: int = 0
    case: Case | None = None
    answer: Answer | None = None
    adapter: str = ""
    prompts: int = 1
    headed: tuple[str, ...] = ()
    drip_s: float = 0.0
    then: tuple[Call, ...] = ()

    @property
    def generates(self) -> bool:
        """Whether a model answers."""
        return self.api in GENERATIONS

    @property
    def counts(self) -> bool:
        """Whether frontends count it as a request of a model."""
        return self.generates or self.status == TEAPOT or self.is_embedding

    @property
    def is_embedding(self) -> bool:
        """Whether it has an embedding as its answer."""
        return self.path == "/v1/embeddings" and self.status == 200

    @property
    def is_constrained(self) -> bool:
        """Whether a grammar limits the output: a format, or a call that it has to be."""
        choice = self.body.get("tool_choice", "auto")
        kind = choice.get("type", "") if isinstance(choice, dict) else choice
        guided = any(name.startswith("guided_") for name in self.body.get("nvext", {}))
        return guided or "response_format" in self.body or kind not in ("auto", "none")

    def target(self, model: str, answer_id: str) -> str:
        """Return the path."""
        return self.path.replace("{model}", model).replace("{id}", answer_id)

    def request_body(self, model: str, answer_id: str) -> dict[str, Any]:
        """Return the body, of which ``model`` is the model unless it names another one."""
        if self.method != "POST" or self.sent is not None:
            return {}
        body = {"model": model} | self.body
        if body.get("previous_response_id") == "{id}":
            body["previous_response_id"] = answer_id
        return body

    def of_graph(self, graph: str) -> Call:
        """Return the call with what is right for ``graph``: not every router explains itself."""
        if not self.path.startswith("/v1/route") or "router-mode: kv" in graph:
            return self
        return replace(self, api="refusal", status=400, says="only --router-mode kv")

    @property
    def is_later(self) -> bool:
        """Whether it continues the answer before it."""
        return self.body.get("previous_response_id") == "{id}"

    @property
    def expected(self) -> Answer:
        """The complete answer."""
        return self.answer or ANSWERS.get(self.name, Answer("", "", 0, 0))


def has_whole_arguments(call: tuple[str, str]) -> bool:
    """Whether the model has written all of a call: a parser completes what it has not."""
    try:
        json.loads(call[1])
    except ValueError:
        return False
    return True
