"""Defects of engines and their workers: mocker, vLLM, attached servers, events, load."""

from __future__ import annotations

from mutant import Mutant

ENGINES = (
    Mutant(
        "whole-prompt-cached-leaves-nothing-to-compute",
        "dynamo.mocker.blocks",
        "[: (len(blocks.tokens) - 1) // self.block_size]",
        "[: len(blocks.tokens) // self.block_size]",
        ("unit/mocker/test_mocker_scheduler.py::test_cached_tokens_are_reported",),
    ),
    Mutant(
        "first-block-of-a-sequence-evicted-first",
        "dynamo.mocker.blocks",
        "for block_hash in reversed(blocks.sequence_hashes[: blocks.full]):",
        "for block_hash in blocks.sequence_hashes[: blocks.full]:",
        (
            "unit/mocker/test_mocker_blocks.py::test_the_tail_of_the_least_recently_used_chain_is_evicted_first",
        ),
    ),
    Mutant(
        "admission-ignores-the-watermark",
        "dynamo.mocker.scheduler",
        "if self.running and self.pool.free - needed < self._reserve:",
        "if self.pool.free < needed:",
        (
            "unit/mocker/test_mocker_scheduler.py::test_the_watermark_keeps_blocks_for_running_sequences",
        ),
    ),
    Mutant(
        "mocker-answers-a-migrated-echo-from-its-start",
        "dynamo.mocker.worker",
        "            reply = echo_reply(prompt, limit + sent, request.stop_conditions)\n",
        "            return echo_reply(prompt, limit, request.stop_conditions)\n",
        ("unit/mocker/test_mocker_service.py::test_an_echo_continues_after_a_migration",),
    ),
    Mutant(
        "sleep-while-a-rank-computes",
        "dynamo.mocker.worker",
        "            if rank.load:\n                await rank.idle.wait()\n            rank.clear_cache()\n        self._asleep",
        "            rank.clear_cache()\n        self._asleep",
        (
            "unit/mocker/test_mocker_worker.py::test_a_simulated_engine_falls_asleep_when_its_requests_have_ended",
        ),
    ),
    Mutant(
        "transfer-in-milliseconds",
        "dynamo.mocker.timing",
        "return prompt_tokens * self.bytes_per_token / self.bytes_per_s / self.speedup",
        "return prompt_tokens * self.bytes_per_token / self.bytes_per_s / self.speedup * 1e3",
        ("unit/mocker/test_mocker_transfer.py::test_seconds_are_bytes_over_bandwidth_over_speed",),
    ),
    Mutant(
        "failed-submit-keeps-its-place",
        "dynamo.vllm.service",
        "            self.admission.release()\n            if not isinstance(error, DynamoError):",
        "            if not isinstance(error, DynamoError):",
        (
            "unit/vllm_worker/test_vllm_service.py::test_a_refusal_of_the_engine_is_the_clients_error",
        ),
    ),
    Mutant(
        "client-s-stop-token-reported-as-eos",
        "dynamo.vllm.service",
        'if reason == "stop" and output.stop_reason is None:',
        'if reason == "stop":',
        ("unit/vllm_worker/test_vllm_service.py::test_finish_reasons",),
    ),
    Mutant(
        "tokens-passed-directly-are-not-counted",
        "dynamo.vllm.service",
        "            self._tokens += self._owner.stop_passing(self)",
        "            self._owner.stop_passing(self)",
        ("unit/vllm_worker/test_vllm_service.py::test_plain_tokens_of_a_step_go_to_their_streams",),
    ),
    Mutant(
        "held-items-sent-after-the-end",
        "dynamo.vllm.service",
        "        self._send(codec.encode(item))\n        if self._held is None:\n            self.stream.end()",
        "        self._send(codec.encode(item))\n        self.stream.end()",
        (
            "unit/vllm_worker/test_vllm_service.py::test_output_of_a_client_that_does_not_read_is_held",
        ),
    ),
    Mutant(
        "penalties-forget-the-tokens-before-a-migration",
        "dynamo.vllm.sampling",
        "                _penalize(arguments, request.token_ids[-generated:])\n",
        "                pass\n",
        (
            "unit/vllm_worker/test_vllm_sampling.py::test_penalties_count_the_output_of_an_earlier_worker",
        ),
    ),
    Mutant(
        "hidden-stop-id-outside-the-vocabulary",
        "dynamo.vllm.sampling",
        "if token_id not in self._eos_ids and token_id < self._vocab_size:",
        "if token_id not in self._eos_ids:",
        (
            "unit/vllm_worker/test_vllm_sampling.py::test_stop_ids_of_the_client_and_hidden_ones_that_vllm_does_not_have",
        ),
    ),
    Mutant(
        "other-inputs-computed-after-a-failure",
        "dynamo.vllm.pooling",
        "            if number is not None:\n                self._engine.abort(number)\n",
        "            pass\n",
        ("unit/vllm_worker/test_vllm_pooling.py::test_a_failed_input_ends_all",),
    ),
    Mutant(
        "vectors-without-a-bound",
        "dynamo.vllm.pooling",
        "if self._size_bytes > _MAX_BYTES:",
        "if self._size_bytes < 0:",
        (
            "unit/vllm_worker/test_vllm_pooling.py::test_vectors_that_are_too_large_together_end_all",
        ),
    ),
    Mutant(
        "texts-that-wait-for-the-first-are-forgotten",
        "dynamo.vllm.pooling",
        "waiting = list(self._kept)",
        "waiting = list(self._kept)[:0]",
        ("unit/vllm_worker/test_vllm_pooling.py::test_one_text_is_compared_with_all_others",),
    ),
    Mutant(
        "all-inputs-in-one-turn-of-the-loop",
        "dynamo.vllm.pooling",
        "if index > begin and time.monotonic() > until_s:",
        "if time.monotonic() < 0:",
        ("unit/vllm_worker/test_vllm_pooling.py::test_many_inputs_take_several_turns_of_the_loop",),
    ),
    Mutant(
        "the-second-text-has-the-type-of-the-first",
        "dynamo.frontend.apis.pooling.inputs",
        "self.type_one_at.append(begins)",
        "self.type_one_at.append(len(pair))",
        ("unit/frontend/test_pooling_inputs.py::test_two_texts_are_one_input",),
    ),
    Mutant(
        "a-first-text-counts-once-for-all-its-pairs",
        "dynamo.frontend.apis.pooling.inputs",
        "            encoder.count(ids)\n",
        "            pass\n",
        ("unit/frontend/test_pooling_inputs.py::test_all_pairs_together_are_bounded",),
    ),
    Mutant(
        "the-odd-token-of-a-cut-pair-is-of-the-other-text",
        "dynamo.frontend.text.token_frames",
        "shorter, longer = room // 2, room - room // 2",
        "longer, shorter = room // 2, room - room // 2",
        ("unit/frontend/test_special_tokens.py::test_pairs",),
    ),
    Mutant(
        "the-worst-document-comes-first",
        "dynamo.frontend.answer.pooling",
        "key=scores.__getitem__, reverse=True)",
        "key=scores.__getitem__)",
        (
            "unit/frontend/test_pooling_answers.py::test_the_best_documents_come_first_and_equal_ones_in_their_order",
        ),
    ),
    Mutant(
        "a-server-gets-a-path-that-it-does-not-have",
        "dynamo.frontend.apis.relay.route",
        "path = offered_path(path, entry.paths) or path",
        "path = str(path)",
        ("unit/frontend/test_relay.py::test_another_name_of_a_path_reaches_the_servers_own",),
    ),
    Mutant(
        "answer-from-a-ring-that-is-too-short",
        "dynamo.worker.publish",
        "        if start < first:\n            return self.dump()\n",
        "        start = max(start, first)\n",
        ("unit/worker/test_worker_event_log.py::test_answers_by_range",),
    ),
    Mutant(
        "rejected-event-takes-an-id",
        "dynamo.worker.publish",
        "            self.rejected += 1\n",
        "            self.rejected += 1\n            self.last_event_id += 1\n",
        (
            "unit/worker/test_worker_event_log.py::test_an_inconsistent_event_is_dropped_and_gets_no_id",
        ),
    ),
    Mutant(
        "full-batch-loses-its-oldest-event",
        "dynamo.worker.publish",
        "                if self._pending.is_full_for(size_bytes):\n                    self._flush()\n",
        "",
        ("unit/worker/test_worker_publish.py::test_a_burst_is_sent_in_several_messages",),
    ),
    Mutant(
        "last-events-not-sent-at-the-end",
        "dynamo.worker.publish",
        '        """Send pending events and stop; later events go to the log only."""\n        self._flush()\n',
        '        """Stop."""\n',
        ("unit/worker/test_worker_publish.py::test_the_last_events_are_sent_when_it_closes",),
    ),
    Mutant(
        "wake-without-its-discarded-weights",
        "dynamo.worker.engine_control",
        "                self._discarded = level == 2\n",
        "                self._discarded = level > 2\n",
        ("unit/vllm_worker/test_vllm_control.py::test_leave_sleep_wake_up_return",),
    ),
    Mutant(
        "events-of-another-thread-out-of-order",
        "dynamo.llm.publishers",
        "            self._loop.call_soon_threadsafe(self._sender.record, dp_rank, changes, tier)",
        "            self._sender.record(dp_rank, changes, tier)",
        ("unit/llm/test_llm_publishers.py::test_other_threads_may_publish",),
    ),
    Mutant(
        "cleared-event-leaves-other-ranks",
        "dynamo.llm.publishers",
        "for rank in {self.dp_rank, *self._engine_blocks}:",
        "for rank in (self.dp_rank,):",
        (
            "unit/llm/test_llm_publishers.py::test_what_is_unknown_of_an_engine_is_cleared_on_all_its_ranks",
        ),
    ),
    Mutant(
        "parent-hash-0-is-the-root",
        "dynamo.llm.publishers",
        "parent = None if parent_hash is None else parent_hash & _U64",
        "parent = parent_hash & _U64 if parent_hash else None",
        ("unit/llm/test_llm_publishers.py::test_block_0_has_children",),
    ),
    Mutant(
        "idle-connections-without-a-bound",
        "dynamo.attach.pool",
        "if connection.usable and len(self.idle) < _MAX_IDLE:",
        "if connection.usable:",
        ("unit/attach/test_attach_pool.py::test_idle_connections_are_bounded",),
    ),
    Mutant(
        "request-sent-again-after-its-answer-began",
        "dynamo.attach.pool",
        "if failure is not None and not received and not self._retried and self._sink is not None:",
        "if failure is not None and not self._retried and self._sink is not None:",
        ("unit/attach/test_attach_pool.py::test_a_request_whose_answer_began_is_not_sent_again",),
    ),
    Mutant(
        "paused-server-times-out",
        "dynamo.attach.pool",
        "if request.active_s < limit and not request.paused:",
        "if request.active_s < limit:",
        ("unit/attach/test_attach_pool.py::test_a_paused_answer_is_not_a_silent_server",),
    ),
    Mutant(
        "unreachable-server-is-not-polled-at-once",
        "dynamo.attach.service",
        "        if error.unsent:\n            self._service.on_unreachable()",
        "        pass",
        (
            "unit/attach/test_attach_service.py::test_a_server_that_cannot_be_reached_is_polled_at_once",
        ),
    ),
    Mutant(
        "one-slow-answer-is-down",
        "dynamo.attach.worker",
        "if error.slow and self._slow < _SLOW_ANSWERS:",
        "if error.slow and self._slow < 1:",
        ("unit/attach/test_attach_service.py::test_one_slow_answer_is_not_the_end_of_a_server",),
    ),
)
