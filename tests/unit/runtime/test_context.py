"""Context: stop and kill reach every listener and child, in order, once, however late."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from functools import partial

import pytest

from dynamo.runtime.requests.context import Context


def test_levels_rise_and_never_fall() -> None:
    context = Context("r1")
    received: list[str] = []
    context.on_cancel(received.append)
    assert not context.is_stopped() and not context.is_killed()
    context.stop_generating()
    context.stop_generating()
    assert context.is_stopped() and not context.is_killed()
    context.kill()
    context.stop_generating()
    assert context.is_stopped() and context.is_killed()
    assert received == ["stop", "kill"]


def test_a_kill_without_a_stop_is_both() -> None:
    context = Context()
    received: list[str] = []
    context.on_cancel(received.append)
    context.kill()
    assert context.is_stopped() and context.is_killed() and received == ["kill"]


def test_children_are_notified_in_link_order_and_late_ones_at_once() -> None:
    parent = Context()
    order: list[tuple[str, str]] = []

    def record(child: Context, kind: str) -> None:
        order.append((child.id(), kind))

    children = [Context(str(i)) for i in range(3)]
    for child in children:
        child.on_cancel(partial(record, child))
        parent.link_child(child)
    parent.stop_generating()
    assert order == [("0", "stop"), ("1", "stop"), ("2", "stop")]
    late = Context()
    parent.link_child(late)
    assert late.is_stopped() and not late.is_killed()
    parent.kill()
    assert late.is_killed()
    latest = Context()
    parent.link_child(latest)
    assert latest.is_killed()


def test_a_child_does_not_cancel_its_parent_and_may_be_unlinked() -> None:
    parent, child, other = Context(), Context(), Context()
    parent.link_child(child)
    parent.link_child(other)
    child.kill()
    assert not parent.is_stopped()
    parent.unlink_child(other)
    parent.unlink_child(other)
    parent.kill()
    assert not other.is_stopped()


def test_a_ring_of_contexts_ends() -> None:
    one, two = Context(), Context()
    one.link_child(two)
    two.link_child(one)
    one.kill()
    assert two.is_killed()


def test_a_failing_listener_does_not_stop_the_others(caplog: pytest.LogCaptureFixture) -> None:
    context = Context("r9")
    received: list[str] = []

    def fail(kind: str) -> None:
        raise RuntimeError("no")

    context.on_cancel(fail)
    context.on_cancel(received.append)
    context.kill()
    assert received == ["kill"] and "kill of request r9" in caplog.text


async def test_waiting_returns_true_for_stop_and_for_kill() -> None:
    for cancel in (Context.stop_generating, Context.kill):
        context = Context()
        waits = [context.async_killed_or_stopped() for _ in range(3)]
        assert not any(wait.done() for wait in waits)
        cancel(context)
        done, _ = await asyncio.wait(waits)  # futures, as workers of Dynamo use them
        assert len(done) == 3
        assert all(wait.result() is True for wait in waits)
        assert await context.async_killed_or_stopped() is True


async def test_stopped_and_killed_wait_for_their_own_level() -> None:
    context = Context()
    stopped, killed, either = (
        context.stopped(),
        context.killed(),
        context.async_killed_or_stopped(),
    )
    context.stop()
    assert stopped.result() is True and either.result() is True and not killed.done()
    assert context.is_stopped() and not context.is_killed()
    assert await context.stopped() is True
    context.kill()
    assert killed.result() is True
    assert await context.killed() is True and await context.stopped() is True


def note_thread(received: list[tuple[str, int]], kind: str) -> None:
    received.append((kind, threading.get_ident()))


async def test_any_thread_may_cancel_and_listeners_run_on_the_loop() -> None:
    """An engine's own thread stops a request; what listens writes to sockets of the loop."""
    here = threading.get_ident()
    for cancel in (Context.stop, Context.kill):
        context, child, late = Context(), Context(), Context()
        grandchild = Context()
        child.link_child(grandchild)
        received: list[tuple[str, int]] = []
        context.link_child(child)
        child.on_cancel(partial(note_thread, received))
        waiter = context.stopped()
        thread = threading.Thread(target=cancel, args=(context,))
        thread.start()
        thread.join()
        assert context.is_stopped() and not received  # the state at once, the listeners later
        assert child.is_stopped() and grandchild.is_stopped()
        context.link_child(late)
        assert late.is_stopped()
        assert await waiter is True
        assert received == [("stop" if cancel is Context.stop else "kill", here)]
        assert late.is_stopped()
        context.kill()
        assert child.is_killed() and late.is_killed()


def test_a_thread_may_cancel_after_the_loop_has_closed() -> None:
    async def link() -> Context:
        context = Context()
        context.link_child(Context())
        return context

    context = asyncio.run(link())
    context.kill()
    assert context.is_killed()


async def test_a_cancelled_wait_leaves_nothing() -> None:
    context = Context()
    wait = context.async_killed_or_stopped()
    kept = weakref.ref(wait)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await wait
    await asyncio.sleep(0)
    del wait
    gc.collect()
    assert kept() is None
    context.kill()


def test_id_metadata_and_trace() -> None:
    context = Context()
    assert context.id() == context.id() != Context().id()
    assert Context("given").id() == "given"
    assert context.trace_id is None and context.span_id is None and context.metadata == {}
    traced = Context(metadata={"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01"})
    assert traced.trace_id == "ab" * 16 and traced.span_id == "cd" * 8
    assert Context(metadata={"traceparent": "00-ab-cd-01"}).trace_id is None
