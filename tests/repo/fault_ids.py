"""The faults that this milestone covers, by the ids of the fault catalogue. A table: it decides nothing.

Each id stands in the name or the docstring of at least one test; `test_faults.py` holds that.
"""

NAMES_COVERAGE_ALIASES = (
    "tied_once",
    "alias_changes_between_versions",
    "missing_shard_refused",
    "every_byte_written_once",
    "chunk_size_invariance",
    "draft_vs_target_namespace",
    "subset_selection_exact",
    "dest_without_source",
    "source_without_dest",
)
SHAPES_STRIDES_SIZES_DTYPES = (
    "noncontig_src",
    "noncontig_dst",
    "fused_views",
    "empty_rank",
    "zero_size_tensor",
    "zero_size_not_registered",
    "zero_dim",
    "mixed_dtype_alignment",
    "all_dtypes",
    "shape_mismatch_early",
    "dtype_mismatch_early",
    "tensor_larger_than_chunk",
    "offset_past_4GiB",
    "slice_boundary",
)
REGISTRATION = (
    "register_twice",
    "overlapping_views",
    "aba_same_pointer",
    "register_cycle_1000",
    "200_versions_flat",
    "100k_tiny_tensors",
    "restart_same_name_same_addr",
    "register_failure_is_fatal",
    "python_O_mode",
)
ORDER_AND_VERSIONS = (
    "mutate_during_read",
    "reader_fetched_before_unpublish",
    "commit_after_last_byte",
    "relay_does_not_propagate_corruption",
    "no_advance_on_failure",
    "one_version_per_replica",
    "double_replicate",
    "repeat_update_many",
    "address_stability",
    "slept_source_withdrawn",
)
DEATH_AND_LIES = (
    "source_killed_midchunk",
    "source_stopped",
    "sick_source_quarantined",
    "timeout_then_late_write",
    "reader_killed",
    "sibling_dies",
    "all_errors_surface",
    "server_recreated_same_name",
    "two_jobs_same_cluster",
    "transport_lies",
)
NETWORK_AND_NAMES = ("ipv6_endpoint", "loopback_refused", "64_clients_one_host", "concurrent_first_contact")

FAULT_IDS = (
    NAMES_COVERAGE_ALIASES
    + SHAPES_STRIDES_SIZES_DTYPES
    + REGISTRATION
    + ORDER_AND_VERSIONS
    + DEATH_AND_LIES
    + NETWORK_AND_NAMES
)
