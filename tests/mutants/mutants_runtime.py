"""Defects of the runtime: discovery, leases, request plane, event plane."""

from __future__ import annotations

from mutant import Mutant

RUNTIME = (
    Mutant(
        "watch-that-closes-another-skips-a-third",
        "dynamo.runtime.discovery.base",
        "        for watch in tuple(self._watches):\n            if watch.primed and key",
        "        for watch in self._watches:\n            if watch.primed and key",
        (
            "unit/runtime/test_discovery_contract.py::test_a_watch_that_closes_during_an_event_costs_no_other_the_event",
        ),
    ),
    Mutant(
        "key-with-a-leading-dot-is-hidden",
        "dynamo.runtime.discovery.layout",
        '        name = "%2E" + name[1:]\n',
        "        pass\n",
        ("unit/runtime/test_file_discovery.py::test_everything_is_private_and_named_by_key",),
    ),
    Mutant(
        "newer-record-is-not-linked-back",
        "dynamo.runtime.discovery.layout",
        "        path.hardlink_to(renamed)\n",
        "        pass\n",
        ("unit/runtime/test_file_discovery.py::test_removal_spares_a_newer_lease",),
    ),
    Mutant(
        "half-written-record-counts",
        "dynamo.runtime.discovery.layout",
        "    if len(value) != size_bytes:\n",
        "    if len(value) > size_bytes:\n",
        ("unit/runtime/test_file_discovery.py::test_a_torn_or_foreign_file_is_reported_once",),
    ),
    Mutant(
        "later-check-replaces-an-earlier-one",
        "dynamo.runtime.discovery.leases",
        "if due is None or (self._timer is not None and self._due_s <= due):",
        "if due is None or (self._timer is not None and self._due_s >= due):",
        (
            "unit/runtime/test_discovery_leases.py::test_other_changes_of_the_file_do_not_count_as_touches",
        ),
    ),
    Mutant(
        "descriptor-of-an-ended-lease-stays-open",
        "dynamo.runtime.discovery.leases",
        "        if lease.process is not None:\n            lease.process.close()\n        self._listener.lease_ended",
        "        self._listener.lease_ended",
        ("unit/runtime/test_file_discovery.py::test_a_lease_that_has_ended_keeps_no_descriptor",),
    ),
    Mutant(
        "silent-lease-is-not-read-once-more",
        "dynamo.runtime.discovery.leases",
        '        self.observe(f"{lease_id:x}")\n        if self._tracked.get(lease_id) is not lease',
        "        if self._tracked.get(lease_id) is not lease",
        (
            "unit/runtime/test_discovery_leases.py::test_a_touch_whose_event_was_lost_is_read_before_the_lease_is_silent",
        ),
    ),
    Mutant(
        "moved-key-stays-with-its-old-lease",
        "dynamo.runtime.discovery.file",
        "            self._disown(path)\n            self._write(path, data)",
        "            self._write(path, data)",
        ("unit/runtime/test_file_discovery.py::test_a_damaged_record_is_written_again",),
    ),
    Mutant(
        "keys-lost-after-an-etcd-outage",
        "dynamo.runtime.discovery.etcd.lease",
        "        self._unwritten.update(self.keys)\n",
        "",
        (
            "unit/runtime/test_etcd_lease.py::test_all_keys_are_written_again_after_the_lease_has_expired",
        ),
    ),
    Mutant(
        "ended-stream-stays-in-its-context",
        "dynamo.runtime.requests.client_connection",
        "        if self._context is not None:\n            self._context.off_cancel(self.on_cancel)\n\n    def on_cancel",
        "\n    def on_cancel",
        ("unit/runtime/test_request_plane.py::test_a_cancelled_context_cancels_the_call",),
    ),
    Mutant(
        "wrapped-number-takes-an-open-stream",
        "dynamo.runtime.requests.client_connection",
        "        while number in self.streams:",
        "        while False:",
        (
            "unit/runtime/test_request_plane.py::test_the_numbers_wrap_around_streams_that_are_still_open",
        ),
    ),
    Mutant(
        "silence-noticed-a-tick-late",
        "dynamo.runtime.requests.client_connection",
        "        if ticks >= _SILENT_TICKS:\n",
        "        if ticks > _SILENT_TICKS:\n",
        (
            "unit/runtime/test_request_faults.py::test_only_the_streams_of_a_silent_worker_that_may_move_end_before_its_connection",
        ),
    ),
    Mutant(
        "unbounded-queue-while-connecting",
        "dynamo.runtime.requests.client_connection",
        "            self._early_bytes += size_bytes\n",
        "",
        ("unit/runtime/test_request_faults.py::test_a_burst_before_the_connection_is_bounded",),
    ),
    Mutant(
        "old-connection-forgets-the-new-one",
        "dynamo.runtime.requests.client",
        "        if self._connections.get(address) is not connection:\n            return\n        del self._connections[address]",
        "        self._connections.pop(address, None)",
        ("unit/runtime/test_peer.py::test_the_end_of_an_old_connection_leaves_the_new_one",),
    ),
    Mutant(
        "probes-go-on-without-a-follower",
        "dynamo.runtime.requests.client",
        "            peer.close()\n            del self._peers[address]",
        "            del self._peers[address]",
        ("unit/runtime/test_peer.py::test_the_last_follower_ends_the_probes",),
    ),
    Mutant(
        "one-stream-too-many",
        "dynamo.runtime.requests.server",
        "if self._inflight >= self.settings.max_streams:",
        "if self._inflight > self.settings.max_streams:",
        ("unit/runtime/test_request_plane.py::test_at_capacity_requests_are_refused",),
    ),
    Mutant(
        "drain-forgets-unregistered-endpoints",
        "dynamo.runtime.requests.server",
        "            for served in (*self._endpoints.values(), *self._unregistered)\n            if endpoint",
        "            for served in (*self._endpoints.values(),)\n            if endpoint",
        (
            "unit/runtime/test_request_plane.py::test_drain_aborts_at_its_deadline_unregistered_streams_included",
        ),
    ),
    Mutant(
        "a-stop-hides-a-later-kill",
        "dynamo.runtime.requests.context",
        "        if level <= self._notified:\n            return\n        self._notified = level",
        "        if self._notified:\n            return\n        self._notified = level",
        ("unit/runtime/test_request_plane.py::test_a_cancelled_context_cancels_the_call",),
    ),
    Mutant(
        "closed-stream-keeps-its-admission",
        "dynamo.runtime.requests.admission",
        "            if stream.closed:\n                self.release()\n            else:",
        "            if not stream.closed:",
        (
            "unit/runtime/test_admission.py::test_a_stream_that_closed_in_the_queue_gives_its_place_to_the_next",
        ),
    ),
    Mutant(
        "one-outage-counted-twice",
        "dynamo.runtime.endpoints.instances",
        'if by_source is not None and ("connection" in by_source or "record" in by_source):',
        'if by_source is not None and "connection" in by_source:',
        (
            "unit/runtime/test_peer.py::test_an_error_of_a_worker_that_is_unhealthy_is_the_same_outage",
        ),
    ),
    Mutant(
        "worker-that-is-gone-stays-out",
        "dynamo.runtime.endpoints.instances",
        "        if self._outages.pop(instance_id, None) is not None:\n            self._gauge.value",
        "        if self._outages.get(instance_id) is not None:\n            self._gauge.value",
        ("unit/runtime/test_client.py::test_which_errors_inhibit",),
    ),
    Mutant(
        "publisher-back-on-its-address-shows-a-gap",
        "dynamo.runtime.events.plane",
        "        self._forget(self._addresses.pop(address))\n",
        "        self._addresses.pop(address)\n",
        (
            "unit/runtime/test_events_zmq.py::test_many_publishers_one_subscriber_each_with_its_own_numbers",
        ),
    ),
    Mutant(
        "one-full-subscriber-costs-all-their-events",
        "dynamo.runtime.events.plane",
        "            self._socket.setsockopt(zmq.XPUB_NODROP, 0)\n            self._socket.send_multipart(frames, zmq.DONTWAIT)\n            self._socket.setsockopt(zmq.XPUB_NODROP, 1)",
        "            pass",
        (
            "unit/runtime/test_events_zmq.py::test_a_full_queue_drops_events_of_one_subscriber_and_is_counted",
        ),
    ),
    Mutant(
        "topic-prefix-is-delivered",
        "dynamo.runtime.events.plane",
        "        if topic.bytes == self._topic:  #",
        "        if topic.bytes.startswith(self._topic):  #",
        ("unit/runtime/test_events_zmq.py::test_a_longer_topic_is_ignored",),
    ),
    Mutant(
        "two-tasks-make-two-publishers",
        "dynamo.runtime.events.channels",
        "        publisher = self._made.get(channel)  # another task may have made it during the await\n",
        "",
        (
            "unit/runtime/test_distributed.py::test_tasks_that_ask_for_a_publisher_at_once_share_one",
        ),
    ),
    Mutant(
        "health-check-while-asleep",
        "dynamo.runtime.endpoints.health",
        "            elif idle_s >= wait_s and endpoint.is_registered():",
        "            elif idle_s >= wait_s:",
        (
            "unit/runtime/test_canary.py::test_an_endpoint_with_traffic_or_out_of_discovery_is_not_checked",
        ),
    ),
    Mutant(
        "health-that-was-not-reported-counts-as-reported",
        "dynamo.runtime.endpoints.health",
        '            await self._endpoint.set_health(problem)\n        except DynamoError as error:\n            log.warning("%s: its health cannot be reported: %s", name, error)\n        else:\n            self.problem = problem',
        '            self.problem = problem\n            await self._endpoint.set_health(problem)\n        except DynamoError as error:\n            log.warning("%s: its health cannot be reported: %s", name, error)',
        ("unit/runtime/test_canary.py::test_a_report_that_discovery_refuses_is_repeated",),
    ),
    Mutant(
        "socket-that-is-bound-and-not-listening-is-swept",
        "dynamo.runtime.process.sockets",
        "        if time.time() - path.lstat().st_mtime < _ABANDONED_AFTER_S:\n            return False  # it may be bound but not listening yet\n",
        "",
        (
            "unit/runtime/test_discovery_stale_sockets.py::test_a_sweep_removes_old_sockets_without_lease_or_listener",
        ),
    ),
)
