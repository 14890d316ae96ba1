"""Which mutants are replayed in every run, and which not at all yet, each with its reason."""

QUICK = {
    "last_frame_tracker",
    "recycled_at_send",
    "orphan_part",
    "refused_parts_kept",
    "caller_told_at_once",
    "ignore_one_reader",
    "loan_written_after_publish",
    "counted_twice",
    "forget_pending_body",
    "handles_overwritten",
    "metadata_send_blocking",
}

_SHOWS_ELSEWHERE = (
    "only shows in that something never happens, or when somebody has ended; ordinary tests catch it"
)
_DEPARTS = "the variant leaves the mutant's schedule, and its harm needs another one; lockstep catches it"

NOT_REPLAYED = {
    **dict.fromkeys(
        (
            "close_lingers",
            "never_touched",
            "no_overflow",
            "death_unnoticed",
            "sleep_after_check",
            "writer_death_unnoticed",
            "joiner_waits_for_the_dead",
            "skip_lost_body",
            "loan_after_close",
            "holders_after_posts",
            "peer_death_unnoticed",
        ),
        _SHOWS_ELSEWHERE,
    ),
    **dict.fromkeys(
        (
            "resent_when_complete",
            "timeout_ignored",
            "notify_before_publish",
            "body_not_copied",
            "leave_drops_leases",
            "release_before_copy",
            "waited_after_forward",
        ),
        _DEPARTS,
    ),
    "pending_forgotten": "over inproc nobody reads what was queued for a peer that died",
    "lap_reader": "it needs more messages than the small models have",
    "stale_notices": "it needs more messages than the small models have",
    "loan_recycled": "the schedule ends before the slot is filled again",
    "goes_on_halfway": "the small model with exceptions has one step, and the harm needs a second",
    "tensor_not_kept": "the schedule ends before anybody writes the freed block",
    "pending_unbounded": "no bytes are harmed: memory grows; an ordinary test counts it",
    "refill_breaks_the_law": "the variant of ignore_one_reader, seen by the law",
}
