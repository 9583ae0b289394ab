"""Defects that no checker found when they were put in by hand, or only by chance."""

from __future__ import annotations

from mutant import Mutant

PAST = (
    Mutant(
        "tokens-counted-twice-after-a-migration",
        "dynamo.frontend.requests.engine_request",
        "        self.picker.free(self.id, self.tokens - self._reported)\n        self._reported = self.tokens\n        self.retries",
        "        self.picker.free(self.id, self.tokens - self._reported)\n        self.retries",
        ("unit/frontend/test_migration.py::test_output_tokens_are_counted_once_over_migrations",),
    ),
    Mutant(
        "refused-retry-renews-its-deadline",
        "dynamo.frontend.requests.migration",
        "self.migration = self.migration or begun",
        "self.migration = begun",
        (
            "unit/frontend/test_migration.py::test_refusals_do_not_renew_the_deadline_of_a_migration",
        ),
    ),
    Mutant(
        "cold-start-waits-on-wall-time",
        "dynamo.frontend.requests.cold_start",
        "import time\nfrom collections.abc import Callable\n",
        "import time as clock\nfrom types import SimpleNamespace\nfrom collections.abc import Callable\n"
        "def time() -> None: pass\n"
        "time.time = time.monotonic = lambda: clock.time()\ntime.perf_counter = clock.perf_counter\n",
        ("unit/frontend/test_cold_start.py::test_a_clock_that_is_set_ends_no_wait",),
    ),
    Mutant(
        "string-arguments-of-a-cut-call-dropped",
        "dynamo.frontend.formats.json_calls",
        'self._message.add_json(_unquoted_part("".join(self._parts)))',
        "pass",
        ("unit/frontend/test_answer_repairs.py::test_arguments_in_a_string_that_is_cut_are_kept",),
    ),
    Mutant(
        "slot-freed-before-its-threads-forget-it",
        "dynamo.router.connect.kv_router",
        "        if self.events is not None:\n            self.events.remove(worker_id)\n        self.picker.remove_worker(worker_id)",
        "        self.picker.remove_worker(worker_id)\n        if self.events is not None:\n            self.events.remove(worker_id)",
        ("unit/router/test_event_threads.py::test_no_thread_has_a_stream_whose_slot_is_freed",),
    ),
    Mutant(
        "events-held-before-a-restart-are-applied",
        "dynamo.router.caches.indexer",
        "        stream.held.clear()\n        if stream.answers:",
        "        if stream.answers:",
        (
            "unit/router/test_indexer.py::test_events_of_a_publisher_that_restarted_are_not_applied_after_its_dump",
        ),
    ),
    Mutant(
        "keys-removed-before-their-lease",
        "dynamo.runtime.discovery.file",
        """        lease_path(self._root, lease_id).unlink(missing_ok=True)
        for bucket in BUCKETS:
            for name in names(self._root / "v1" / bucket):
                remove_if_lease(self._root / "v1" / bucket / name, lease_id)
""",
        """        for bucket in BUCKETS:
            for name in names(self._root / "v1" / bucket):
                remove_if_lease(self._root / "v1" / bucket / name, lease_id)
        lease_path(self._root, lease_id).unlink(missing_ok=True)
""",
        ("unit/runtime/test_file_discovery.py::test_a_put_while_keys_are_revoked_leaves_nothing",),
    ),
    Mutant(
        "statefile-not-synced",
        "dynamo.serve.state.statefile",
        "os.fsync(file.fileno())",
        "pass",
        (
            "unit/serve/test_serve_statefile.py::test_a_statefile_is_on_the_disk_before_it_replaces_the_old_one",
        ),
    ),
    Mutant(
        "tls-rest-not-read-after-a-pause",
        "dynamo.http.tls_connection",
        "        asyncio.get_running_loop().call_soon(self._read)",
        "        pass",
        (
            "unit/http/test_http_tls.py::test_an_upload_in_thousands_of_chunks_goes_on_after_each_pause",
        ),
    ),
    Mutant(
        "cancelled-sleep-not-registered-again",
        "dynamo.worker.engine_control",
        "            except BaseException:\n                await self._endpoint.register",
        "            except Exception:\n                await self._endpoint.register",
        (
            "unit/vllm_worker/test_vllm_control.py::test_a_sleep_that_is_cancelled_registers_the_worker_again",
        ),
    ),
    Mutant(
        "closed-queued-stream-keeps-its-slot",
        "dynamo.attach.service",
        "            service.admission.release()\n            return",
        "            return",
        (
            "unit/attach/test_attach_service.py::test_a_queued_request_whose_stream_has_closed_gives_its_place_to_the_next",
        ),
    ),
    Mutant(
        "device-clear-of-a-thread-leaves-lower-tiers",
        "dynamo._fast.ingest",
        "event.tier == 0 ? writer_.clear_all(slot) : writer_.clear(place)",
        "writer_.clear(place)",
        ("fast/test_ingest.py",),
        header="ingest.hpp",
    ),
    Mutant(
        "newer-statefile-is-read",
        "dynamo.serve.state.statefile",
        "        if document.version > VERSION:\n",
        "        if document.version > VERSION + 1:\n",
        ("unit/serve/test_serve_statefile.py::test_a_statefile_of_a_newer_version_is_refused",),
    ),
    Mutant(
        "migrations-not-counted",
        "dynamo.frontend.requests.migration",
        "        self.migrations += 1\n        return True",
        "        return True",
        ("unit/frontend/test_migration.py::test_the_limit_ends_the_request",),
    ),
    Mutant(
        "passes-of-a-worker-go-with-its-adapter",
        "dynamo.llm.forward_pass",
        "if gone is not None and gone[0] not in remaining:",
        "if gone is not None:",
        ("unit/llm/test_forward_pass.py::test_a_worker_publishes_its_passes",),
    ),
)
