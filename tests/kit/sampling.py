"""Tests of which `make test` runs some rows, or none, evenly spread or named; `make drill` runs the others.

Each of these rows is a run, or many, and most of them differ from their neighbors in one option.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest

ROWS: dict[str, dict[str, int | tuple[str, ...]]] = {
    "chaos/test_chaos.py": {
        "a_run_goes_back_before_a_nan": 0,
        "a_model_with_batch_norm_has_the_faults_that_apply": 0,
        "a_round_that_fails_does_not_stop_the_rest": 0,
        "a_run_that_ends_otherwise_is_found": 0,
        "a_signal_ends_the_rounds_and_prints_them": 0,
        "faults_of_the_disk_and_of_the_data": 0,
        "memory_that_runs_out": 0,
    },
    "chaos/test_effects.py": {"a_flip_kills_all_ranks": 0},
    "checkpoint/test_corruption.py": {
        "a_run_reports_a_corruption_and_resumes_from_the_checkpoint_before": 1,
        "each_corruption_is_detected_and_the_checkpoint_before_it_is_used": 1,
    },
    "checkpoint/test_hostile.py": {
        "a_damaged_checkpoint_is_moved_aside_and_the_one_before_it_used": 24,
        "no_damaged_checkpoint_takes_much_memory": 4,
    },
    "checkpoint/test_object_stores.py": {
        "a_run_that_is_killed_in_a_save_resumes_from_the_newest_complete_checkpoint": 0,
        "every_call_is_repeated_after_a_fault": 1,
    },
    "checkpoint/test_storage_faults.py": {
        "a_deletion_that_stops_at_any_call_keeps_the_other_checkpoints": 1,
        "a_process_that_ends_at_any_call_of_a_save_loses_only_that_save": 2,
        "a_run_continues_after_a_save_that_fails_on_one_rank": 2,
        "a_save_that_fails_at_any_call_reports_it": 2,
    },
    "cli/test_ckpt.py": {"reading_commands_do_not_import_torch": 1, "verify_reads_every_byte": 0},
    "cli/test_end_to_end.py": {
        "a_hugging_face_model_through_the_library": 0,
        "a_run_beyond_its_steps_is_not_changed": 0,
        "a_run_whose_standard_streams_are_closed_is_trained": 0,
        "an_inserted_local_rank": 0,
        "closing_the_terminal_saves_and_stops_the_run": 1,
    },
    "cli/test_init.py": {"every_template_passes_the_check_and_trains": 1},
    "cli/test_json_output.py": {"stdout_is_json_alone": 3},
    "cli/test_network_recipes.py": {
        "a_tiny_model_trains_with_the_settings_of_the_recipe": 0,
        "without_a_network_it_fails_at_once": 1,
    },
    "cli/test_trust.py": {
        "code_of_another_users_run_is_named_and_not_executed": 5,
        "reading_commands_need_no_trust": 0,
        "the_users_own_run_needs_no_trust": 0,
    },
    "core/test_hub.py": {"a_gateway_that_refuses_does_not_count_as_the_hub": 2},
    "data/test_order.py": {"each_sample_is_as_likely_at_each_position": 1},
    "distributed/test_device_collectives.py": {"a_barrier_has_no_limit": 0},
    "distributed/test_rank_memory.py": {
        "kept_memory_is_allocated_again_without_page_faults": 0,
        "malloc_settings_of_the_environment_have_priority": 0,
    },
    "distributed/test_shard_boxes.py": {"a_tensor_that_two_axes_shard_is_held_and_gathered_exactly": 1},
    "docs/test_docs.py": {"examples_run": 4},
    "docs/test_places.py": {"the_command_can_be_launched": 3},
    "doctor/test_diagnosed_runs.py": {
        "a_run_that_really_failed_is_explained": 1,
        "a_rank_that_exits_is_named": 0,
    },
    "doctor/test_measured_ranks.py": {"a_dead_or_hung_rank_is_named_within_the_timeout": 1},
    "doctor/test_run_causes.py": {
        "a_full_disk_is_named_with_the_place_of_the_rescued_state": 1,
        "a_hang_that_a_person_ends_is_named": 0,
        "a_program_that_ends_itself_is_named": 3,
        "the_command_cuts_nothing_in_a_pipe_and_takes_the_terminals_width": 0,
        "the_state_in_the_memory_of_a_killed_launcher_is_named": 0,
    },
    "examples/test_guide.py": {
        "the_debugging_script_shows_ranks_and_compares_copies": 0,
        "torchrun_s_report_ends_with_the_message": 0,
    },
    "examples/test_own_strategy.py": {"its_checkpoint_resumes_under_ddp_and_the_reverse": 1},
    "interop/test_peers.py": {
        "a_peer_continues_an_exported_checkpoint": ("plain",),
        "a_peer_s_checkpoint_continues_with_the_peer_s_losses": ("plain", "torchtitan"),
        "peers_continue_what_any_strategy_saved": ("pipeline-1f1b",),
    },
    "interop/test_zero_import.py": {
        "a_run_starts_with_the_moments_and_steps": 6,
        "an_imported_run_can_be_trained": 1,
        "weights_are_bitwise_identical_to_the_engine_s": 0,
    },
    "launch/test_elastic_restarts.py": {"nodes_that_count_restarts_differently_meet": 0},
    "launch/test_hang_watch.py": {
        "a_start_that_hangs_is_ended_by_its_own_limit": 1,
        "beside_other_hosts_a_rank_hangs_that_is_in_no_collective_by_its_stack": 0,
        "the_flight_records_of_devices": 1,
        "the_rank_that_hangs_is_named_and_killed": 2,
        "time_in_which_the_launcher_was_stopped_does_not_count": 0,
        "what_may_take_long_is_neither_named_nor_killed": 2,
    },
    "launch/test_host_ends.py": {
        "a_launcher_that_is_killed_is_named_by_the_others": 1,
        "a_rank_that_hangs_is_named_on_all_hosts": 0,
        "all_hosts_end_with_the_first_cause": 0,
    },
    "launch/test_host_refusals.py": {"what_differs_is_named_on_all_hosts": 2},
    "launch/test_host_rounds.py": {
        "a_host_that_is_lost_is_waited_for": 1,
        "a_rank_that_is_killed_starts_again_on_all_hosts": 1,
    },
    "launch/test_host_snapshots.py": {"a_rank_that_is_killed_costs_the_updates_since_the_last_snapshot": 0},
    "launch/test_host_waits.py": {
        "a_host_that_cannot_start_its_ranks_costs_the_others_no_round": 1,
        "a_run_that_may_have_fewer_hosts_waits_for_none": 0,
        "a_stop_while_a_host_is_waited_for_ends_the_run": 2,
        "a_stop_while_ranks_are_ended_after_a_host_was_lost_ends_the_run": 2,
    },
    "launch/test_hosts.py": {
        "a_host_that_is_cut_off_is_named_by_both_and_the_run_resumes": 0,
        "a_stop_before_all_hosts_are_there_ends_those_that_are": 1,
    },
    "launch/test_hosts_with_bucket.py": {"hosts_with_only_their_checkpoints_in_a_bucket_resume_on_either": 0},
    "launch/test_launch_options.py": {"a_script_without_guard_is_refused_once": 0},
    "launch/test_local.py": {
        "a_rank_that_hangs_is_named_by_those_that_waited": 0,
        "a_stop_is_orderly_and_each_rank_gets_one_signal": 3,
        "exit_code_and_first_cause": 8,
        "ranks_are_fresh_interpreters_if_the_process_has_threads": 0,
        "twenty_launches_in_a_row_all_reduce": 0,
        "two_launches_at_once_do_not_collide": 0,
    },
    "launch/test_other_launchers.py": {"two_ranks_under_torch_distributed_launch": 0},
    "launch/test_reaching.py": {
        "hosts_that_wait_for_another_note_which_are_there": 0,
        "the_command_notes_it_in_the_first_seconds": 0,
    },
    "launchers/test_aws.py": {
        "a_fault_at_each_call_leaves_nothing": 2,
        "a_fault_at_the_end_can_be_repeated": 1,
        "what_cannot_be_removed_is_named": 0,
    },
    "launchers/test_aws_follow.py": {
        "a_job_that_another_command_cancels": 0,
        "a_signal_ends_the_following_and_not_the_job": 0,
        "an_instance_that_never_reports_is_given_up": 1,
        "instances_that_aws_terminates_end_the_job": 1,
        "results_that_are_not_fetched_from_instances_that_cannot_be_ended": 0,
        "results_that_cannot_be_written_stay_and_nothing_runs": 0,
        "what_fails_for_a_while_is_borne": 0,
        "what_fails_for_long_ends_the_following_and_not_the_job": 0,
    },
    "launchers/test_kubernetes.py": {
        "nothing_is_left_when_a_call_fails": 4,
    },
    "launchers/test_slurm.py": {"a_preempted_job_is_queued_again_and_completes": 0},
    "launchers/test_ssh.py": {
        "a_missing_thing_is_named_with_its_remedy": 1,
        "all_that_is_wrong_with_any_host_is_in_one_message": 0,
        "ctrl_c_stops_all_hosts_saved_and_sigkill_leaves_nothing_there": 0,
        "hosts_that_share_no_folder_are_refused": 0,
    },
    "models/test_weight_matching.py": {"what_needs_more_than_tensors_is_refused_with_the_remedy": 1},
    "monitor/test_notebook.py": {"a_run_in_a_notebook_prints_plain_lines_and_its_ranks_have_what_cells_define": 0},
    "optim/test_optimizers.py": {"torchs_compiler_is_not_imported_by_a_run_nor_by_building_an_optimizer": 0},
    "profiling/test_command.py": {"a_running_job_of_two_ranks": 0},
    "profiling/test_data_loading.py": {"a_samples_cost": 0, "token_files_and_texts": 0},
    "profiling/test_planted.py": {"of_one_rank": 0, "perfetto_opens_them": 0, "tensorboards_plugin_opens_them": 0},
    "profiling/test_planted_explained.py": {"the_meters_name_it_first": 0},
    "profiling/test_profiled_memory.py": {"the_command_beside_the_plan": 0},
    "profiling/test_split_beside_trace.py": {"phases_take_as_long_as_torch_profiler_records": 0},
    "proof/test_faults.py": {
        "an_injected_fault_is_found": 3,
        "the_measured_cause_explains_a_run_that_depends_on_its_micro_batches": 2,
    },
    "proof/test_proof.py": {
        "a_strategy_that_crashes_does_not_stop_the_others": 0,
        "dropout_is_turned_off": 0,
        "every_strategy_matches_the_single_process_on_ragged_text": 1,
    },
    "proof/test_verb.py": {"a_partition_of_the_config_that_no_run_has_is_reported_first_and_last": 0},
    "report/test_charts.py": {
        "each_bucket_keeps_its_own_extremes": 0,
        "each_point_of_a_curve_has_its_step_and_its_value_as_text": 1,
        "what_is_thinned_keeps_the_ends_the_extremes_and_the_gaps": 0,
    },
    "report/test_comparison.py": {"no_content_of_the_files_stops_a_comparison": 0},
    "report/test_in_browser.py": {"nothing_overflows": 2, "paper_has_all_that_a_wide_page_shows": 1},
    "report/test_report.py": {"no_content_of_the_files_stops_a_report": 0},
    "security/test_hostile_files.py": {"hostile_files": 0},
    "security/test_limits.py": {"a_config_of_deepspeed": 0, "configs": 0, "reports": 0},
    "security/test_safe_path.py": {
        "modules_that_a_config_names_are_imported_from_it": 0,
        "ranks_that_are_spawned_import_nothing_from_it_either": 0,
        "the_command_imports_nothing_from_the_working_folder": 2,
    },
    "sharding/test_fsdp_calls.py": {"an_update_makes_few_calls_for_each_parameter": 1},
    "sharding/test_fsdp_precision.py": {
        "bytes_that_are_held_and_gathered": 0,
        "the_run_is_that_of_autocast_over_fp32": 0,
    },
    "simulation/test_cells.py": {
        "buffers_that_a_discarded_update_has_changed_cost_no_wait": 0,
        "every_feature_of_fsdp_runs_as_on_an_accelerator": 0,
        "layouts_run_as_on_an_accelerator": 1,
        "products_run_as_on_an_accelerator": 0,
    },
    "simulation/test_choice_of_strategy.py": {
        "a_process_answers_and_is_not_waited_for_longer_than_it_may_take": 0,
        "auto_takes_the_largest_micro_batch_that_fits_and_shards_only_where_it_must": 0,
        "what_fits_nowhere_is_said": 0,
    },
    "simulation/test_estimated_models.py": {
        "ddp_sends_the_order_of_the_buckets_of_hundreds_of_parameters": 0,
        "repeated_operations_make_what_torch_makes": 0,
        "zero_takes_the_data_of_parameters_on_the_cpu": 0,
        "the_fullest_stage_of_a_pipeline_is_its_peak": 0,
    },
    "simulation/test_fsdp_offload.py": {"the_host_holds_the_state_and_updates_what_forwards_gather": 0},
    "simulation/test_large_models.py": {"a_rank_holds_its_share_and_waits_for_nothing": 0},
    "simulation/test_made_up_data.py": {"an_estimate_needs_no_data": 1},
    "simulation/test_peak_memory.py": {
        "a_language_model_needs_no_dataset": 0,
        "a_module_of_the_user_is_left_as_it_is": 0,
        "ddp_holds_the_gradients_of_several_micro_batches_once": 0,
        "fsdp_keeps_no_casts_of_weights": 0,
        "gradients_that_wait_whole_for_the_last_micro_batch_are_the_first_change": 0,
        "shards_and_replicas_hold_what_they_should": 0,
        "the_prediction_equals_the_measurement_by_category": 1,
        "what_does_not_fit_names_the_smallest_change": 0,
    },
    "simulation/test_sent_bytes.py": {"a_simulated_update_gathers_the_bytes_of_the_formula": 1},
    "simulation/test_zero_start.py": {"no_rank_holds_the_whole_model": 1, "the_peak_has_shards_by_category": 0},
    "simulation/test_zero_waits.py": {"an_update_waits_only_where_it_must": 1},
    "training/test_adapters.py": {
        "a_base_in_bf16_is_the_single_process": ("fsdp",),
        "a_run_resumes_bit_for_bit_and_under_other_strategies": ("fsdp",),
        "every_kind_is_the_single_process": ("ddp", "zero3"),
    },
    "training/test_ahead.py": {"a_launcher_that_has_prepared_may_fork": 0},
    "training/test_attention_masks.py": {"losses_are_those_of_the_library": 4, "no_forward_reads_a_mask": 4},
    "training/test_audit.py": {"a_run_that_is_killed_and_goes_on_elsewhere_is_complete": 1, "other_samples_show": 2},
    "training/test_bad_numbers.py": {"each_policy_for_a_spike": 1},
    "training/test_companion.py": {
        "a_reference_computed_once_is_the_same_under_each_strategy": ("fsdp",),
        "a_reference_without_the_adapter_is_the_same_run": ("fsdp",),
        "pairs_are_the_same_run": ("ddp", "zero3", "tensor"),
    },
    "training/test_context.py": {
        "a_ring_is_attention_to_whole_sequences": 1,
        "an_epoch_ends_with_a_smaller_update": 0,
        "checkpoints_go_anywhere": 0,
        "each_rank_drops_other_elements": 0,
        "models_of_other_families": 0,
        "planted_faults_are_noticed": 0,
        "products_on_four_ranks": 0,
    },
    "training/test_critical_path.py": {
        "no_update_touches_a_disk_or_a_network": 1,
        "what_an_update_touches_is_noticed": 1,
    },
    "training/test_deepspeed.py": {
        "a_discarded_update_leaves_no_bit": 2,
        "a_parameter_without_gradient_is_refused": 1,
        "a_run_goes_on_to_the_bit_under_the_same_stage": 1,
        "kernels_skip_a_discarded_update": 1,
        "memory_is_what_the_plan_says": 0,
        "optimizers_and_their_groups": 0,
        "optimizers_that_look_at_shapes_are_refused": 1,
        "options_make_the_same_run": 0,
        "running_means_and_frozen_parameters": 0,
        "stage_3_gathers_in_the_precision_of_autocast_and_trains_the_same_to_the_bit": 0,
        "stage_3_starts_from_the_values_of_other_strategies_to_the_bit_and_leaves_torch_as_it_was": 0,
        "weights_in_bf16_beside_fp32_masters_make_the_run_of_bf16": 0,
    },
    "training/test_deferred_values.py": {
        "a_resumed_run_draws_nothing": 0,
        "an_evaluation_has_no_optimizer_and_draws_nothing": 1,
        "values_can_be_drawn_after_all": 0,
    },
    "training/test_deleted_folder.py": {
        "a_run_whose_folder_is_gone_ends_with_its_weights": 1,
        "another_runs_folder_is_left_alone": 1,
    },
    "training/test_divided_models.py": {
        "first_weights_are_the_single_process": 0,
        "no_rank_ever_holds_the_whole_model": 1,
    },
    "training/test_due_evaluations.py": {
        "a_rank_that_is_killed_between_an_update_and_its_evaluation": 1,
        "a_rank_that_is_killed_while_the_best_state_is_being_saved": 1,
        "the_last_evaluation_counts_no_more_for_being_repeated": 1,
    },
    "training/test_early_stopping.py": {"all_ranks_end_together": 0},
    "training/test_ended_readers.py": {"the_run_ends_with_its_name_and_resumes_without_it": 0},
    "training/test_exporting.py": {
        "a_folder_that_holds_more_stays": 1,
        "a_full_disk_leaves_nothing": 0,
        "an_export_is_what_the_run_leaves": 2,
        "the_tokenizer_comes_along": 1,
        "what_a_run_leaves_loads_and_answers_alike": 2,
    },
    "training/test_families.py": {
        "a_family_whose_blocks_form_a_chain_goes_through_a_pipeline": 0,
        "every_family_in_two_replicas_of_two_parts": 0,
        "every_family_is_the_single_process": 1,
        "every_strategy_starts_from_the_same_bits": 0,
    },
    "training/test_features.py": {"what_is_tested_is_the_single_process": ("fsdp",)},
    "training/test_first_losses.py": {"some_heads_of_configs": 0},
    "training/test_flops.py": {
        "each_way_to_divide_a_model_counts_the_whole_of_it": 0,
        "recurrent_layers_are_counted_though_a_cpu_fuses_them": 2,
    },
    "training/test_fsdp.py": {
        "a_parameter_of_fewer_rows_than_ranks_is_sharded_along_another_dim": 0,
        "fp16_brings_a_loss_scale": 1,
        "memory_is_what_the_plan_says": 2,
        "modules_with_buffers_and_shared_weights": 1,
        "options_leave_the_run_as_it_is": 0,
        "precisions_round_as_much_as_they_must": 1,
        "such_a_parameter_is_resumed_on_other_ranks": 0,
        "what_cannot_be_is_refused": 2,
    },
    "training/test_handed_over.py": {"renamed_inputs_of_the_library_are_the_same_run_however_the_model_is_cut": 0},
    "training/test_interrupted_evaluations.py": {
        "a_model_that_draws_has_the_metrics_of_the_undisturbed_run_after_a_kill": 0,
        "it_is_done_when_the_run_resumes": 1,
    },
    "training/test_invariant.py": {"any_number_of_ranks_gives_the_same_bits": 0, "without_it_bits_depend_on_ranks": 1},
    "training/test_late_reports.py": {
        "the_history_has_every_update_before_the_run_ends_and_after_it_resumes": 2,
        "two_ranks_agree_with_the_host_too": 0,
        "what_is_scheduled_follows_the_same_updates": 3,
    },
    "training/test_left_out.py": {
        "a_run_that_resumes_keeps_the_record_and_reads_none_again": 0,
        "a_sample_without_an_end_is_left_out_on_any_number_of_ranks_and_workers": 0,
        "epochs_that_lack_the_same_samples_are_proven_by_a_list_of_each_once": 1,
        "samples_that_the_config_leaves_out_for_a_while": 0,
        "sharded_strategies_leave_out_the_same": 0,
        "the_limit_counts_the_first_batch_and_holds_for_every_start": 1,
        "the_limit_ends_the_run_with_the_list_and_a_higher_one_resumes_it": 1,
        "the_same_run_elsewhere": 1,
    },
    "training/test_library.py": {"a_finished_run_trains_again_if_it_is_made_longer_or_fresh": 1},
    "training/test_memory_snapshots.py": {
        "a_killed_launcher_leaves_its_memory_to_the_next_start": 0,
        "a_killed_rank_costs_the_updates_since_the_last_snapshot": 1,
        "a_killed_rank_under_ddp_costs_no_update_if_another_holds_the_state": 1,
        "a_stop_in_an_update_that_outlasts_the_grace_names_what_is_saved": 1,
        "memory_outlives_the_run_folder": 1,
        "the_last_failure_saves_the_newest_snapshot": 0,
    },
    "training/test_micro_sizes.py": {"batch_norm_is_left_more_than_one_sample": 0},
    "training/test_modes.py": {"evaluations_have_the_weights_of_the_optimizers_eval_and_leave_no_trace": 2},
    "training/test_noise.py": {"no_loss_is_below_the_entropy": 2},
    "training/test_nothing_learned.py": {"a_step_that_makes_a_parameter_nan_is_named_instead_of_samples": 1},
    "training/test_odd_inputs.py": {"it_trains_or_is_refused": 24, "ranks_answer_as_one_process": 0},
    "training/test_out_of_memory.py": {
        "one_rank_of_two_is_named_and_has_the_traceback_in_its_log": 0,
        "one_sentence_names_place_sizes_and_remedy": 2,
        "the_advised_micro_batch_fits": 0,
    },
    "training/test_pausing.py": {"ranks_agree_on_where_to_stop": 1},
    "training/test_pipeline.py": {
        "a_model_whose_last_norm_is_defined_before_its_blocks": 0,
        "a_stage_may_train_nothing": 1,
        "dropout_trains": 0,
        "half_precision": 1,
        "models_of_a_users_own": 1,
        "planted_faults_are_noticed": 0,
        "products": 0,
        "two_stages_of_ragged_text": ("zbv",),
        "what_a_model_logs_is_told_by_the_stage_that_computes_it": 1,
        "what_can_t_be_done_says_why": 8,
    },
    "training/test_profiling.py": {"a_running_job_is_asked_for_a_trace": 0},
    "training/test_published_weights.py": {"a_divided_run_publishes_the_whole_model": ("gpt2-pipeline+fsdp",)},
    "training/test_publishing.py": {
        "a_disk_may_take_longer_than_a_collective": 0,
        "a_kill_leaves_the_old_or_the_new": 2,
        "files_hold_the_model_once": 1,
        "from_pretrained_reads_several_files": 1,
    },
    "training/test_quantization.py": {"a_base_in_bf16_is_the_single_process": 1, "a_run_resumes_bit_for_bit": 1},
    "training/test_rank_times.py": {"where_the_time_of_each_rank_goes": 0},
    "training/test_recovery.py": {
        "a_rank_that_always_fails_ends_the_run": 1,
        "a_rank_that_fails_once": 2,
        "a_stopped_rank_is_let_continue": 0,
    },
    "training/test_replaced_buffers.py": {
        "a_module_whose_weight_is_sharded_keeps_the_one_that_it_was_given": 0,
        "stages_continue_with_the_first_replica_s": 0,
    },
    "training/test_replica_check.py": {
        "ranks_whose_copies_differ_are_named": 2,
        "runs_recover_from_both_kinds_of_faults": 0,
    },
    "training/test_rescue.py": {"ranks_save_together_or_one_for_all": 2},
    "training/test_resume.py": {
        "cut_runs_end_as_uncut_ones": 2,
        "every_optimizer_goes_on": 2,
        "other_ranks_go_on_at_the_very_next_sample": 2,
        "running_means_are_saved_as_they_were": 1,
        "three_ranks_sum_in_one_order_from_the_first_update_on": 0,
    },
    "training/test_rollback.py": {
        "a_run_that_goes_back_ends_as_one_whose_config_leaves_the_samples_out": 1,
        "a_run_without_an_old_state_goes_back_to_the_oldest_or_the_beginning": 0,
    },
    "training/test_same_run.py": {"ddp_is_the_single_process": 2, "divided_state_is_the_single_process": 1},
    "training/test_signals.py": {
        "data_workers_leave_signals_to_the_group_to_their_rank": 1,
        "sigusr2_saves_and_continues_and_sigusr1_saves_and_stops": 1,
    },
    "training/test_slow_ranks.py": {"ranks_wait_for_a_busy_one_in_a_barrier": 0},
    "training/test_smaller_batches.py": {
        "it_is_bitwise_the_run_that_was_resumed_with_that_size": 0,
        "the_run_that_ran_out_ends_as_the_undisturbed_one": 1,
    },
    "training/test_tasks.py": {"a_task_is_the_single_process_s": 2},
    "training/test_tensor.py": {
        "a_plan_that_is_rehearsed": 0,
        "a_table_and_a_head_that_are_tied_are_divided_together": 1,
        "a_vocabulary_that_nothing_divides": 0,
        "by_sequence_each_rank_drops_other_elements": 0,
        "divided_experts_in_products": 0,
        "label_smoothing_of_divided_logits": 0,
        "plans_of_the_transformers_library": 0,
        "planted_faults_are_noticed": 0,
        "products_on_four_ranks": 0,
        "what_can_t_be_done_says_why": 8,
    },
    "training/test_tracker_faults.py": {
        "a_server_that_refuses_connections": 0,
        "a_tracker_that_raises": 2,
        "trackers_that_hang_delay_the_end_by_one_bound": 1,
    },
    "training/test_transactions.py": {
        "a_loss_scale_that_overflows_halves_until_it_fits": 1,
        "an_update_that_is_not_finite_leaves_no_trace": 2,
        "batch_norm_forgets_a_discarded_update": 2,
        "commit_and_iteration_report_the_same_with_numbers_on_the_device": 2,
        "the_state_is_saved_when_a_run_gives_up": 1,
    },
    "training/test_unused_parameters.py": {
        "a_layer_that_one_rank_leaves_out": 1,
        "a_rank_of_zero_that_does_otherwise_in_a_later_update_is_named": 1,
        "a_rank_that_leaves_a_module_out_in_a_later_update_is_named": 1,
        "modules_that_some_ranks_leave_out": 0,
        "the_advice_is_accepted_where_it_is_given": 0,
        "what_all_ranks_of_zero_leave_out_in_a_later_update_is_no_fault": 0,
    },
    "training/test_whole_matrices.py": {
        "a_checkpoint_resumes_under_other_strategies_and_on_other_ranks": 0,
        "options_of_a_run_leave_it_the_single_process": 0,
        "stages_and_parts_of_sequences_share_the_matrices_of_their_own_ranks": 0,
    },
    "training/test_wrong_manifests.py": {"the_checkpoint_before_it_is_taken": 4},
    "transforms/test_activation_checkpointing.py": {
        "a_run_is_bitwise_identical": 1,
        "models_of_every_family_are_computed_again": 0,
    },
    "transforms/test_activation_offload.py": {
        "an_update_on_an_accelerator_offloads_without_a_wait": 0,
    },
    "transforms/test_recomputing.py": {"full_holds_one_block_and_the_inputs_of_all": 0},
}
"""File --> test, without `test_` --> rows that `make test` runs; 0: none."""


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
    by_function: dict[tuple[str, str], list[pytest.Item]] = {}
    for item in items:
        file, _, name = item.nodeid.partition("[")[0].removeprefix(root).partition("::test_")
        if name in ROWS.get(file, ()) and item.get_closest_marker("drill") is None:
            by_function.setdefault((file, name), []).append(item)
    for (file, name), rows in by_function.items():
        chosen = ROWS[file][name]
        stay = spread(rows, chosen) if isinstance(chosen, int) else _named(rows, chosen)
        for place, row in enumerate(rows):
            if place not in stay:
                row.add_marker(pytest.mark.drill)
