"""Tests of which `make test` runs some rows, evenly spread or named; `make drill` runs the others.

Each of these rows is a run, or many, and most of them differ from their neighbors in one option.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest

ROWS: dict[str, int | tuple[str, ...]] = {
    "checkpoint/test_corruption.py::test_a_run_reports_a_corruption_and_resumes_from_the_checkpoint_before": 3,
    "checkpoint/test_corruption.py::test_each_corruption_is_detected_and_the_checkpoint_before_it_is_used": 7,
    "checkpoint/test_hostile.py::test_a_damaged_checkpoint_is_moved_aside_and_the_one_before_it_used": 24,
    "checkpoint/test_hostile.py::test_no_damaged_checkpoint_takes_much_memory": 4,
    "checkpoint/test_storage_faults.py::test_a_process_that_ends_at_any_call_of_a_save_loses_only_that_save": 4,
    "cli/test_ckpt.py::test_reading_commands_do_not_import_torch": 2,
    "cli/test_init.py::test_every_template_passes_the_check_and_trains": 2,
    "cli/test_json_output.py::test_stdout_is_json_alone": 5,
    "cli/test_network_recipes.py::test_a_tiny_model_trains_with_the_settings_of_the_recipe": 0,
    "data/test_order.py::test_each_sample_is_as_likely_at_each_position": 3,
    "distributed/test_rank_memory.py::test_kept_memory_is_allocated_again_without_page_faults": 0,
    "distributed/test_shard_boxes.py::test_a_tensor_that_two_axes_shard_is_held_and_gathered_exactly": 2,
    "docs/test_places.py::test_the_command_can_be_launched": 3,
    "interop/test_peers.py::test_a_peer_continues_an_exported_checkpoint": ("plain",),
    "interop/test_peers.py::test_a_peer_s_checkpoint_continues_with_the_peer_s_losses": ("plain", "torchtitan"),
    "interop/test_peers.py::test_plain_torch_and_dcp_continue_what_any_strategy_saved": ("pipeline-1f1b",),
    "interop/test_peers.py::test_trainer_continues_what_any_strategy_saved": 0,
    "interop/test_zero_import.py::test_weights_are_bitwise_identical_to_the_engine_s": 4,
    "launch/test_elastic_restarts.py::test_nodes_that_count_restarts_differently_meet": 0,
    "launch/test_host_ends.py::test_all_hosts_end_with_the_first_cause": 3,
    "launch/test_local.py::test_a_rank_that_hangs_is_named_by_those_that_waited": 3,
    "launchers/test_aws.py::test_a_fault_at_each_call_leaves_nothing": 4,
    "launchers/test_aws_follow.py::test_what_fails_for_a_while_is_borne": 2,
    "profiling/test_data_loading.py::test_token_files_and_texts": 0,
    "profiling/test_planted.py::test_of_one_rank": 2,
    "profiling/test_planted_explained.py::test_the_meters_name_it_first": 2,
    "profiling/test_profiled_memory.py::test_the_command_beside_the_plan": 0,
    "proof/test_proof.py::test_every_strategy_matches_the_single_process_on_ragged_text": 1,
    "simulation/test_cells.py::test_every_feature_of_fsdp_runs_as_on_an_accelerator": 0,
    "simulation/test_cells.py::test_layouts_run_as_on_an_accelerator": 1,
    "simulation/test_cells.py::test_products_run_as_on_an_accelerator": 0,
    "simulation/test_choice_of_strategy.py::test_a_process_answers_and_is_not_waited_for_longer_than_it_may_take": 0,
    "simulation/test_estimated_models.py::test_ddp_sends_the_order_of_the_buckets_of_hundreds_of_parameters": 0,
    "simulation/test_estimated_models.py::test_stage_3_frees_parameters_on_the_cpu": 0,
    "simulation/test_estimated_models.py::test_state_on_nvme_is_not_on_the_accelerator": 0,
    "simulation/test_estimated_models.py::test_the_fullest_stage_of_a_pipeline_is_its_peak": 0,
    "simulation/test_large_models.py::test_a_rank_holds_its_share_and_waits_for_nothing": 1,
    "simulation/test_peak_memory.py::test_a_module_of_the_user_is_left_as_it_is": 0,
    "simulation/test_peak_memory.py::test_the_prediction_equals_the_measurement_by_category": 3,
    "simulation/test_sent_bytes.py::test_a_simulated_update_gathers_the_bytes_of_the_formula": 1,
    "simulation/test_zero_start.py::test_no_rank_holds_the_whole_model": 1,
    "simulation/test_zero_waits.py::test_an_update_waits_only_where_it_must": 3,
    "training/test_bad_numbers.py::test_a_nan_that_does_not_come_again_leaves_no_trace": 3,
    "training/test_bad_numbers.py::test_each_policy_for_a_spike": 3,
    "training/test_context.py::test_models_of_other_families": 0,
    "training/test_context.py::test_products_on_four_ranks": 0,
    "training/test_deepspeed.py::test_a_discarded_update_leaves_no_bit": 3,
    "training/test_deepspeed.py::test_a_run_goes_on_to_the_bit_under_the_same_stage": 2,
    "training/test_deepspeed.py::test_memory_is_what_the_plan_says": 1,
    "training/test_deepspeed.py::test_stage_3_gathers_in_the_precision_of_autocast_and_trains_the_same_to_the_bit": 0,
    "training/test_deepspeed.py::test_weights_in_bf16_beside_fp32_masters_make_the_run_of_bf16": 1,
    "training/test_deferred_values.py::test_an_evaluation_has_no_optimizer_and_draws_nothing": 2,
    "training/test_deferred_values.py::test_values_can_be_drawn_after_all": 1,
    "training/test_deleted_folder.py::test_what_is_deleted_is_made_again": 4,
    "training/test_divided_models.py::test_first_weights_are_the_single_process": 2,
    "training/test_due_evaluations.py::test_a_rank_that_is_killed_while_the_best_state_is_being_saved": 2,
    "training/test_families.py::test_every_family_in_two_replicas_of_two_parts": 0,
    "training/test_families.py::test_every_family_is_the_single_process": 1,
    "training/test_features.py::test_what_is_tested_is_the_single_process": (
        "half of dp",
        "fsdp",
        "half of pipeline-1f1b+tensor",
    ),
    "training/test_first_losses.py::test_some_heads_of_configs": ("ddp", "fsdp"),
    "training/test_fsdp.py::test_memory_is_what_the_plan_says": 4,
    "training/test_fsdp.py::test_precisions_round_as_much_as_they_must": 2,
    "training/test_histograms.py::test_two_ranks_count_what_one_counts": 2,
    "training/test_interrupted_evaluations.py::test_it_is_done_when_the_run_resumes": 3,
    "training/test_invariant.py::test_any_number_of_ranks_gives_the_same_bits": 4,
    "training/test_late_reports.py::test_the_history_has_every_update_before_the_run_ends_and_after_it_resumes": 5,
    "training/test_library.py::test_a_finished_run_trains_again_if_it_is_made_longer_or_fresh": 2,
    "training/test_noise.py::test_no_loss_is_below_the_entropy": 5,
    "training/test_odd_inputs.py::test_it_trains_or_is_refused": 24,
    "training/test_odd_inputs.py::test_ranks_answer_as_one_process": 0,
    "training/test_out_of_memory.py::test_one_sentence_names_place_sizes_and_remedy": 2,
    "training/test_out_of_memory.py::test_the_advised_micro_batch_fits": 0,
    "training/test_pausing.py::test_ranks_agree_on_where_to_stop": ("one alone", "a second apart"),
    "training/test_pipeline.py::test_models_of_a_users_own": 2,
    "training/test_pipeline.py::test_products": 0,
    "training/test_pipeline.py::test_two_stages_of_ragged_text": ("zbv",),
    "training/test_published_weights.py::test_a_divided_run_publishes_the_whole_model": 3,
    "training/test_publishing.py::test_a_disk_may_take_longer_than_a_collective": 0,
    "training/test_publishing.py::test_files_hold_the_model_once": 3,
    "training/test_resume.py::test_cut_runs_end_as_uncut_ones": 3,
    "training/test_resume.py::test_every_optimizer_goes_on": 3,
    "training/test_resume.py::test_three_ranks_sum_in_one_order_from_the_first_update_on": 1,
    "training/test_same_run.py::test_divided_state_is_the_single_process": 2,
    "training/test_signals.py::test_data_workers_leave_signals_to_the_group_to_their_rank": 2,
    "training/test_signals.py::test_sigusr2_saves_and_continues_and_sigusr1_saves_and_stops": 2,
    "training/test_tensor.py::test_plans_of_the_transformers_library": 0,
    "training/test_tensor.py::test_products_on_four_ranks": 0,
    "training/test_tracker_faults.py::test_a_tracker_that_raises": 5,
    "training/test_transactions.py::test_a_loss_scale_that_overflows_halves_until_it_fits": 3,
    "training/test_transactions.py::test_an_update_that_is_not_finite_leaves_no_trace": 5,
    "training/test_transactions.py::test_the_state_is_saved_when_a_run_gives_up": 2,
    "training/test_unused_parameters.py::test_a_layer_that_one_rank_leaves_out": 3,
    "training/test_unused_parameters.py::test_a_rank_of_zero_that_does_otherwise_in_a_later_update_is_named": 2,
    "training/test_unused_parameters.py::test_modules_that_some_ranks_leave_out": 1,
    "training/test_whole_matrices.py::test_options_of_a_run_leave_it_the_single_process": 0,
    "training/test_whole_matrices.py::test_stages_and_parts_of_sequences_share_the_matrices_of_their_own_ranks": 0,
    "transforms/test_activation_checkpointing.py::test_a_run_is_bitwise_identical": 2,
    "transforms/test_activation_checkpointing.py::test_models_of_every_family_are_computed_again": 0,
}
"""Test function --> rows that `make test` runs; 0: none."""


def spread(items: Sequence[Any], number: int) -> set[int]:
    """Return the places of this many items, evenly spread, the first and the last among them if there are two."""
    if number >= len(items):
        return set(range(len(items)))
    return {round(place * (len(items) - 1) / max(number - 1, 1)) for place in range(number)}


def _named(rows: Sequence[pytest.Item], names: Sequence[str]) -> set[int]:
    """Return the places of the rows with these ids."""
    ids = [row.nodeid.partition("[")[2].removesuffix("]") for row in rows]
    assert len(rows) < len(names) or set(names) <= set(ids), f"{names} are not among {ids}"  # fewer: some are selected
    return {place for place, name in enumerate(ids) if name in names}


def mark_drilled(items: Iterable[pytest.Item], root: str) -> None:
    """Mark the other rows of these tests as drills."""
    by_function: dict[str, list[pytest.Item]] = {}
    for item in items:
        function = item.nodeid.partition("[")[0].removeprefix(root)
        if function in ROWS and item.get_closest_marker("drill") is None:
            by_function.setdefault(function, []).append(item)
    for function, rows in by_function.items():
        chosen = ROWS[function]
        stay = spread(rows, chosen) if isinstance(chosen, int) else _named(rows, chosen)
        for place, row in enumerate(rows):
            if place not in stay:
                row.add_marker(pytest.mark.drill)
