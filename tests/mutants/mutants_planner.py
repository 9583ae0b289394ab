"""Defects of the planner, and of what starts, stops and records processes."""

from __future__ import annotations

from mutant import Mutant

PLANNER = (
    Mutant(
        "draining-workers-hold-no-gpu",
        "dynamo.planner.sharing",
        "return (self.ready + self.starting + self.draining) * self.gpus_per_worker",
        "return (self.ready + self.starting) * self.gpus_per_worker",
        ("unit/planner/test_sharing.py::test_waiting_requests_start_a_worker_on_a_free_gpu",),
    ),
    Mutant(
        "reserved-gpus-go-to-a-later-claim",
        "dynamo.planner.sharing",
        "            self.free = 0.0\n            self._taken.append(service.assigned)",
        "            pass",
        ("unit/planner/test_sharing.py::test_a_large_worker_takes_what_it_needs_or_nothing",),
    ),
    Mutant(
        "just-loaded-model-is-idle",
        "dynamo.planner.sharing",
        "idle = model.has_been_idle(limit_s) and model.newest_s >= limit_s",
        "idle = model.has_been_idle(limit_s)",
        (
            "unit/planner/test_sharing.py::test_a_model_that_was_loaded_is_idle_when_its_worker_serves_and_not_before",
        ),
    ),
    Mutant(
        "rotation-before-its-time-in-service",
        "dynamo.planner.sharing",
        "return other.serving_s >= other.load_s and model.oldest_s >= model.load_s",
        "return other.serving_s >= other.load_s",
        ("unit/planner/test_sharing.py::test_a_load_is_not_wasted",),
    ),
    Mutant(
        "report-of-a-frontend-that-ended-counts",
        "dynamo.planner.live.gpu_sharing",
        "            self._reports.pop(publisher, None)\n        elif",
        "            pass\n        elif",
        ("unit/planner/test_on_demand.py::test_the_reports_of_all_frontends_count",),
    ),
    Mutant(
        "idle-by-the-first-frontend-alone",
        "dynamo.planner.live.gpu_sharing",
        "idle_s=min(state.idle_s for state in states),",
        "idle_s=max(state.idle_s for state in states),",
        ("unit/planner/test_on_demand.py::test_the_reports_of_all_frontends_count",),
    ),
    Mutant(
        "start-of-a-load-is-forgotten",
        "dynamo.planner.live.gpu_sharing",
        "        elif load.since is None:\n            load.since",
        "        else:\n            load.since",
        ("unit/planner/test_on_demand.py::test_a_load_in_progress_began_once",),
    ),
    Mutant(
        "added-prefill-workers-cost-decode-nothing",
        "dynamo.planner.policies.budget",
        "        free -= added * seen.prefill.gpus_per_worker\n",
        "",
        (
            "unit/planner/test_budget_rules.py::test_the_gpus_of_an_added_prefill_worker_are_not_free_for_decode",
        ),
    ),
    Mutant(
        "minimum-above-the-maximum-loses",
        "dynamo.planner.policies.budget",
        "    return max(most, pool.minimum)",
        "    return most",
        ("unit/planner/test_budget_rules.py::test_the_pair_is_scaled_to_the_budget",),
    ),
    Mutant(
        "last-worker-removed-by-load",
        "dynamo.planner.policies.load",
        "least = max(1, self.pool.minimum)",
        "least = self.pool.minimum",
        ("unit/planner/test_load_policy.py::test_the_last_worker_is_left_to_the_idle_timeout",),
    ),
    Mutant(
        "grace-of-a-worker-that-failed",
        "dynamo.planner.policies.load",
        "if added and DECODE not in failed:",
        "if added:",
        ("unit/planner/test_load_policy.py::test_a_failed_addition_starts_no_grace",),
    ),
    Mutant(
        "restarted-frontend-is-negative-traffic",
        "dynamo.planner.live.traffic",
        "before = self._replace((address, page.started_at), page)",
        "before = self._replace((address, 0.0), page)",
        ("unit/planner/test_planner_traffic.py::test_a_restarted_frontend_counts_from_zero",),
    ),
    Mutant(
        "removal-ends-a-row-of-failed-starts",
        "dynamo.planner.live.model_state",
        "        elif adds:\n",
        "        else:\n",
        ("unit/planner/test_planner_loop.py::test_only_a_start_ends_the_pause_after_failed_ones",),
    ),
    Mutant(
        "not-a-number-in-a-forecast",
        "dynamo.planner.policies.predictors",
        "return max(high if math.isfinite(high) else self.values[-1], 0.0)",
        "return max(high, 0.0)",
        (
            "unit/planner/test_planner_predictors.py::test_a_prediction_that_is_no_number_is_the_last_value",
        ),
    ),
)

SERVE = (
    Mutant(
        "two-services-of-different-shares-on-one-gpu",
        "dynamo.serve.gpus.gpus",
        "[s for s in order if self._unit[s] == count and fits(self._left[s], count)]",
        "[s for s in order if fits(self._left[s], count)]",
        ("unit/serve/test_serve_watchers.py::test_vectors_of_dynamos_allocator",),
    ),
    Mutant(
        "uuid-of-two-gpus-taken-as-one",
        "dynamo.serve.gpus.gpus",
        "sum(gpu.uuid.startswith(entry) for gpu in devices) == 1",
        "sum(gpu.uuid.startswith(entry) for gpu in devices) >= 1",
        ("unit/serve/test_serve_watchers.py::test_visible_devices",),
    ),
    Mutant(
        "another-deployment-s-gpus-are-free",
        "dynamo.serve.state.ledger",
        "        yield from self.held.items()\n        yield from self.elsewhere.items()",
        "        yield from self.held.items()",
        ("unit/serve/test_box_gpus.py::test_two_deployments_get_different_gpus",),
    ),
    Mutant(
        "given-up-worker-whose-process-exits-holds-nothing",
        "dynamo.serve.state.ledger",
        "return bool(entry.processes) or not (given_up or is_void(entry, lives))",
        "return not (given_up or is_void(entry, lives))",
        ("unit/serve/test_gpu_ledger.py::test_what_an_entry_holds",),
    ),
    Mutant(
        "sleeper-that-wakes-is-removed-for-its-memory",
        "dynamo.serve.state.room",
        "        if entry.asleep and entry.reserved_by is None and not {*gpus}",
        "        if entry.asleep and not {*gpus}",
        ("unit/serve/test_gpu_room.py::test_a_sleeper_that_is_being_woken_stays",),
    ),
    Mutant(
        "reused-pid-counts-as-the-process",
        "dynamo.serve.state.process_table",
        'return process is not None and process.start_ticks == start_ticks and process.state != "Z"',
        'return process is not None and process.state != "Z"',
        ("unit/serve/test_serve_processes.py::test_stat_detects_a_reused_pid",),
    ),
    Mutant(
        "deaths-of-long-ago-count",
        "dynamo.serve.supervision.supervised",
        "recent = sum(now_s - death <= self._policy.window_s for death in self._deaths)",
        "recent = len(self._deaths)",
        ("unit/serve/test_serve_restarts.py::test_old_deaths_are_forgotten",),
    ),
    Mutant(
        "worker-drained-before-its-restart-starts-again",
        "dynamo.serve.supervision.supervised",
        "        elif lacks and self.arbiter.drained(self, False):",
        "        elif False:",
        (
            "unit/serve/test_serve_restarts.py::test_a_worker_that_is_drained_while_its_restart_waits_is_not_started",
        ),
    ),
    Mutant(
        "exit-during-a-stop-is-a-death",
        "dynamo.serve.supervision.supervised",
        "            process.stopping = True  # before the signal: its exit is then no death\n",
        "",
        (
            "unit/serve/test_serve_restarts.py::test_a_process_that_is_stopped_is_expected_to_exit_before_it_is_signalled",
        ),
    ),
    Mutant(
        "one-of-several-processes-gives-up-all",
        "dynamo.serve.supervision.supervised",
        "        if living:  #",
        "        if False:  #",
        (
            "unit/serve/test_serve_restarts.py::test_of_several_processes_the_others_go_on_when_one_is_given_up",
        ),
    ),
    Mutant(
        "refusals-before-it-served-count-for-ever",
        "dynamo.serve.supervision.supervised",
        "        self._unserved = 0 if served else self._unserved + 1",
        "        self._unserved = self._unserved if served else self._unserved + 1",
        (
            "unit/serve/test_serve_restarts.py::test_starts_that_never_serve_are_counted_beyond_the_window",
        ),
    ),
    Mutant(
        "watcher-that-looks-for-gpus-counts-as-stopped",
        "dynamo.serve.supervision.supervised",
        "        status = STOPPED if stopped and not self.starting else ACTIVE",
        "        status = STOPPED if stopped else ACTIVE",
        (
            "unit/serve/test_serve_restarts.py::test_a_watcher_that_looks_for_gpus_does_not_count_as_stopped",
        ),
    ),
    Mutant(
        "watcher-added-counts-as-stopped",
        "dynamo.serve.reload",
        "        await watcher._start()  # at once:",
        "        await in_file_thread(str)\n        await watcher._start()  #",
        ("unit/serve/test_serve_changes.py::test_an_added_worker_is_started_at_once",),
    ),
    Mutant(
        "frontend-beside-one-that-shares-no-socket",
        "dynamo.serve.supervision.rolling",
        "        if spec.is_frontend and not watcher.listener.is_shared:\n            return False\n",
        "",
        (
            "unit/serve/test_serve_changes.py::test_two_frontends_overlap_only_where_they_share_their_socket",
        ),
    ),
    Mutant(
        "failed-replacement-keeps-the-new-command",
        "dynamo.serve.supervision.rolling",
        "                    self._factory.configure(watcher, before)\n                    return await",
        "                    return await",
        (
            "unit/serve/test_serve_changes.py::test_the_next_process_after_a_failed_replacement_has_the_old_command",
        ),
    ),
    Mutant(
        "replacement-that-failed-holds-its-gpus",
        "dynamo.serve.supervision.rolling",
        "        finally:\n            await self._record.replaced(watcher.name)\n        holders",
        "        finally:\n            pass\n        holders",
        (
            "unit/serve/test_serve_changes.py::test_a_worker_that_falls_asleep_or_wakes_is_not_replaced",
        ),
    ),
    Mutant(
        "older-look-overwrites-a-newer-one",
        "dynamo.serve.state.record",
        "                await asyncio.wait([write])  # the thread goes on: a later write must not overtake\n                raise",
        "                raise",
        ("unit/serve/test_serve_changes.py::test_a_cancelled_write_is_awaited",),
    ),
    Mutant(
        "change-during-a-write-is-forgotten",
        "dynamo.serve.state.record",
        "            self._dirty.clear()\n            await self._write_change()",
        "            await self._write_change()\n            self._dirty.clear()",
        ("unit/serve/test_serve_changes.py::test_a_change_during_a_write_is_written_after_it",),
    ),
    Mutant(
        "sleep-of-the-old-process-written-for-the-new-one",
        "dynamo.serve.state.record",
        "    if owner.operation in (SLEEP, WAKE) and not runs_here(owner):\n        entry.reserved_by = None",
        "    return",
        (
            "unit/serve/test_serve_changes.py::test_an_interrupted_sleep_ends_with_the_processes_it_was_for",
        ),
    ),
    Mutant(
        "worker-of-a-command-removed-by-a-reload",
        "dynamo.serve.graph.changes",
        "removed = [name for name in running if name in planned and name not in names]",
        "removed = [name for name in running if name not in names]",
        (
            "unit/serve/test_graph_changes.py::test_a_watcher_added_by_command_stays_until_the_graph_names_it",
        ),
    ),
    Mutant(
        "service-at-zero-starts-again-at-a-reload",
        "dynamo.serve.graph.changes",
        "if not spec.serves_model or not (spec.service in zero or (planned and spec.name in left))",
        "if not spec.serves_model or not (planned and spec.name in left)",
        ("unit/serve/test_graph_changes.py::test_removed_workers_stay_removed",),
    ),
)

OPERATIONS = (
    Mutant(
        "sleeper-s-gpus-free-before-it-sleeps",
        "dynamo.operations.steps.sleeping",
        "        state = ASLEEP if await engines.is_sleeping(lease) else RUNNING\n",
        "        state = ASLEEP\n",
        (
            "unit/planner/test_sleeping_workers.py::test_an_engine_that_was_restarted_while_it_fell_asleep_is_awake",
        ),
    ),
    Mutant(
        "failed-sleep-stays-reserved",
        "dynamo.operations.steps.sleeping",
        '        access.statefile.update(partial(_set_state, name=name, state=RUNNING))\n        raise ActionFailed(f"{name}: does not sleep',
        '        raise ActionFailed(f"{name}: does not sleep',
        (
            "unit/planner/test_sleeping_workers.py::test_an_interrupted_operation_is_finished_or_undone",
        ),
    ),
    Mutant(
        "cancelled-wake-asks-for-no-repair",
        "dynamo.operations.steps.sleeping",
        "    except (asyncio.CancelledError, StatefileError):  # check_sleepers finds out if it is awake\n        access.needs_repair = True\n        raise",
        "    except (asyncio.CancelledError, StatefileError):\n        raise",
        (
            "unit/planner/test_sleeping_workers.py::test_a_full_disk_during_an_operation_loses_no_worker",
        ),
    ),
    Mutant(
        "drained-sleeper-holds-its-gpus",
        "dynamo.operations.steps.removal",
        "            entry.holds_gpus = entry.holds_gpus and not sleeps\n",
        "",
        (
            "unit/planner/test_sleeping_workers.py::test_a_sleeper_that_drains_takes_no_gpu_from_another",
        ),
    ),
    Mutant(
        "failed-removal-stays-with-its-process",
        "dynamo.operations.steps.removal",
        "            with contextlib.suppress(StatefileError):\n                access.statefile.update(lambda document: release(document, entry.name))\n        raise",
        "            pass\n        raise",
        (
            "unit/planner/test_sleeping_workers.py::test_a_removal_that_failed_can_be_finished_by_others",
        ),
    ),
    Mutant(
        "memory-of-a-removed-sleeper-not-looked-at-again",
        "dynamo.operations.steps.starting",
        "        if sleepers:\n            self._avoid = await without_room(free, share, access.devices)\n",
        "",
        (
            "unit/planner/test_sleeping_workers.py::test_a_sleeping_worker_is_removed_for_its_memory",
        ),
    ),
    Mutant(
        "operation-of-a-living-process-is-repaired",
        "dynamo.operations.reconcile",
        "return replacing or entry.name in access.active or is_reserved(entry, access.active)",
        "return replacing or entry.name in access.active",
        ("unit/planner/test_sleeping_workers.py::test_what_a_living_process_does_is_not_repaired",),
    ),
    Mutant(
        "dry-run-repairs",
        "dynamo.operations.reconcile",
        "    if repairs and not dry_run:\n        access.statefile.update(lambda document: _correct",
        "    if repairs:\n        access.statefile.update(lambda document: _correct",
        ("unit/planner/test_sleeping_workers.py::test_a_dry_run_of_a_repair_changes_nothing",),
    ),
    Mutant(
        "unload-of-a-model-that-the-planner-keeps",
        "dynamo.operations.operate",
        "if state is not None and model in state.models and model not in state.on_demand:",
        "if state is not None and model in state.models and model in state.on_demand:",
        ("e2e/test_operate.py::test_each_verb_and_the_statefile_after_it",),
    ),
    Mutant(
        "wake-ups-put-off-the-next-pull",
        "dynamo.planner.live.loop",
        "            if now_s >= due_s:",
        "            if True:",
        ("unit/planner/test_planner_loop.py::test_wake_ups_do_not_put_off_the_next_pull",),
    ),
    Mutant(
        "wake-up-during-a-tick-is-lost",
        "dynamo.planner.live.loop",
        "            now_s = loop.time()\n            if now_s >= due_s:",
        "            self._woken.clear()\n            now_s = loop.time()\n            if now_s >= due_s:",
        ("unit/planner/test_planner_loop.py::test_a_wake_up_during_a_tick_is_not_lost",),
    ),
)
