"""Checks of ports, exposure, KV events and block sizes of a deployment. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from dynamo.doctor.facts import (
    Finding,
    FrontendFacts,
    ListenerFacts,
    RouterFacts,
    WorkerFacts,
)
from dynamo.observability.logs import counted


def check_frontends(frontends: Sequence[FrontendFacts]) -> Iterator[Finding]:
    """Check that each frontend can listen, or answers, and who may use it."""
    for frontend in frontends:
        yield _check_port(frontend)
        yield _check_exposure(frontend)
        if frontend.ttft_error is not None:
            yield _check_estimates(frontend.service, frontend.ttft_error)


def _check_estimates(service: str, error: float) -> Finding:
    """Check that workers compute prompts about as fast as the router expects."""
    if error <= MOST_ERROR:
        text = f"{service}: first tokens come within {error:.0%} of the time that routing expects"
        return Finding.ok("estimates", text)
    return Finding.warning(
        "estimates",
        f"{service}: first tokens are off by {error:.0%} of the time that routing expects",
        cause="the speed of the workers changes, or the engine keeps prompts waiting",
        remedy="dynamo explain  # expected and observed; router-cost: blocks needs no estimate",
    )


MOST_ERROR = 0.5
"""Half of the time: estimates that are twice as short as they should be."""


def _check_port(facts: FrontendFacts) -> Finding:
    if facts.is_ours:
        if facts.answers:
            return Finding.ok("ports", f"{facts.service}: {facts.url}")
        return Finding.error(
            "ports",
            f"{facts.service} runs, but does not answer at {facts.url}",
            cause="it is starting, or hangs",
            remedy="dynamo ps",
        )
    if not facts.problem:
        free = f"{facts.service}: {facts.url} is free"
        return Finding.ok("ports", free)
    holder = f"; {facts.holder} listens there" if facts.holder else ""
    return Finding.error(
        "ports",
        f"{facts.service}: {facts.problem}{holder}",
        cause="the frontend cannot start",
        remedy=f"dynamo serve … --{facts.service}.http-port={facts.free_port or facts.port + 1}",
    )


def _check_exposure(facts: FrontendFacts) -> Finding:
    if facts.is_loopback:
        text = f"{facts.service}: only this machine can reach it"
        return Finding.ok("exposure", text)
    if not facts.has_keys:
        return Finding.warning(
            "exposure",
            f"{facts.service}: everyone who reaches {facts.url} can use the models",
            cause="it listens on the network and needs no API key",
            remedy="dynamo key add NAME --api-key-file keys.txt  # in the graph: api-key-file: "
            "keys.txt",
        )
    if not facts.has_tls:
        return Finding.warning(
            "exposure",
            f"{facts.service}: API keys are sent in plain text to {facts.url}",
            cause="it listens on the network without TLS",
            remedy="in the graph: tls-cert-path: cert.pem and tls-key-path: key.pem",
        )
    text = f"{facts.service}: open to the network, with keys and TLS"
    return Finding.ok("exposure", text)


def check_arbiter(pid: int, namespace: str, hang: str) -> Finding:
    """Check that the process that restarts workers and carries out commands acts."""
    if not hang:
        return Finding.ok("arbiter", f"the arbiter of {namespace} (pid {pid}) answers")
    return Finding.error(
        "arbiter",
        hang.partition(", so ")[0],
        cause="no worker is restarted, and no command is carried out",
        remedy=f"kill -CONT {pid}, or end all: dynamo stop --namespace {namespace}",
    )


def check_listeners(listeners: Sequence[ListenerFacts]) -> Iterator[Finding]:
    """Report other sockets of the deployment that other machines can reach."""
    for listener in listeners:
        if not listener.is_frontend:
            yield Finding.warning(
                "exposure",
                f"{listener.component}: {listener.program} (pid {listener.pid}) listens on "
                f"{listener.address}:{listener.port}",
                cause="other machines reach it without a key",
                remedy=f"sudo ufw deny {listener.port}/tcp",
            )


def check_events(workers: Sequence[WorkerFacts], router: RouterFacts) -> Iterator[Finding]:
    """Report workers whose KV events do not reach the router: their caches stay unknown."""
    routed = [worker for worker in workers if worker.takes_tokens]
    if not router.follows_events or not routed:
        return
    before = False
    for worker in routed:
        problem = worker.event_problem
        if worker.publishes and not problem:
            continue
        before = True
        yield Finding(
            check="events",
            severity="error" if problem else "warning",
            summary=f"{_name(worker)} ({worker.model}) "
            + (f"publishes KV events on a dead channel: {problem}" if problem else _NO_EVENTS),
            cause="requests are not routed by what it caches",
            remedy=f"dynamo restart {worker.name or 'NAME'}" if problem else _ENABLE,
        )
    silent = [(model, count) for model, count in router.silent if count]
    for model, count in silent:
        yield Finding.warning(
            "events",
            f"{counted(count, 'worker')} of {model} served prompts, but the "
            "KV events are missing or unusable",
            cause="the engine publishes none, or blocks of another size; requests are not routed "
            "by what is cached",
            remedy="dynamo logs -n 5000 | grep -e 'no KV' -e 'KV blocks'  # names the workers",
        )
    if not before and not silent:
        text = f"KV events: {len(routed)} of {len(routed)} workers publish"
        yield Finding.ok("events", text)


_NO_EVENTS = "publishes no KV events"
_ENABLE = "remove no-enable-prefix-caching from the graph  # or set router-kv-events: false"


def check_names(workers: Sequence[WorkerFacts]) -> Iterator[Finding]:
    """Report different models of one name: the frontend gives requests to one of them only."""
    files: dict[tuple[str, int], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for worker in workers:
        files[worker.model, worker.block_size][worker.files].append(_name(worker))
    mixed = 0
    for (model, _), by_files in files.items():
        if len(by_files) > 1:
            mixed += 1
            groups = " and ".join(", ".join(names) for names in by_files.values())
            yield Finding.error(
                "names",
                f"{model}: {groups} have different models of this name",
                cause="tokenizer, template or config differ; only the first that registered gets "
                "requests",
                remedy="in the graph: served-model-name: ANOTHER, then: dynamo reload GRAPH  # or "
                "restart all of them, if the files have changed",
            )
    if workers and not mixed:
        text = "workers of one name have the same model"
        yield Finding.ok("names", text)


def check_block_sizes(workers: Sequence[WorkerFacts], router: RouterFacts) -> Iterator[Finding]:
    """Report block sizes that differ between workers of a model, the graph and the router."""
    sizes: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for service, model, tokens in router.block_sizes:
        sizes[model][tokens].append(service)
    for worker in workers:
        if worker.takes_tokens:
            sizes[worker.model][worker.block_size].append(_name(worker))
    mismatches = 0
    for model, by_size in sizes.items():
        if len(by_size) > 1:
            mismatches += 1
            listed = ", ".join(
                f"{tokens} ({', '.join(names)})" for tokens, names in sorted(by_size.items())
            )
            yield _mismatch(f"{model}: KV blocks of different sizes: {listed}", "block-size: …")
        elif router.block_size is not None and router.block_size not in by_size:
            mismatches += 1
            (tokens,) = by_size
            yield _mismatch(
                f"{model}: KV blocks of {tokens} tokens, but the router hashes blocks of "
                f"{router.block_size}",
                f"kv-cache-block-size: {tokens}",
            )
    if sizes and not mismatches:
        yield Finding.ok("block-size", "KV block sizes agree")


def _mismatch(summary: str, key: str) -> Finding:
    return Finding.error(
        "block-size",
        summary,
        cause="the router compares prompts block by block; workers of another size get no requests",
        remedy=f"in the graph: {key}, then: dynamo reload",
    )


def _name(worker: WorkerFacts) -> str:
    return worker.name or f"worker {worker.worker}"
