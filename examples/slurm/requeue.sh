# shellcheck shell=bash
# How far a job is, and whether it is to start again: train.sbatch sources this.
#
# Only the tracker counts: latest_checkpointed_iteration.txt in SAVE, which names the last whole checkpoint. A job that
# was stopped by a signal ends with status 0 like one that is done, and one that was killed may have saved just before.
# ATTEMPTS in SAVE has a line "JOB RESTART ITERATION" for each attempt: where it began.

say() {
    printf '%s train.sbatch: %s\n' "$(date '+%F %T')" "$*"
}

# The iteration that the tracker names, 0 if there is none.
saved_iteration() {
    local tracker="$SAVE/latest_checkpointed_iteration.txt" text=""
    [[ ! -f "$tracker" ]] || text="$(<"$tracker")"
    if [[ "$text" =~ ^[0-9]+$ ]]; then echo "$text"; else echo 0; fi
}

# How many of this job's last attempts began where it is now.
attempts_from_here() {
    [[ -f "$SAVE/ATTEMPTS" ]] || { echo 0; return; }
    awk -v job="$SLURM_JOB_ID" -v here="$(saved_iteration)" \
        '$1 == job { n = $3 == here ? n + 1 : 0 } END { print n + 0 }' "$SAVE/ATTEMPTS"
}

# Ends the script when nothing is left to do, or when attempt after attempt has saved nothing.
stop_if_done_or_stuck() {
    local here
    here="$(saved_iteration)"
    if ((here >= TRAIN_ITERS)); then
        say "iteration $here of $TRAIN_ITERS is saved: done"
        exit 0
    fi
    if (($(attempts_from_here) >= MAX_ATTEMPTS)); then
        say "error: $MAX_ATTEMPTS attempts in a row began at iteration $here and saved none beyond it, so this job" \
            "does not start again. The reason is in $LOGS; when it is mended, submit the job anew"
        exit 1
    fi
}

note_attempt() {
    say "attempt ${SLURM_RESTART_COUNT:-0} begins at iteration $(saved_iteration) of $TRAIN_ITERS"
    echo "$SLURM_JOB_ID ${SLURM_RESTART_COUNT:-0} $(saved_iteration)" >>"$SAVE/ATTEMPTS"
}

requeue() {
    say "iteration $(saved_iteration) of $TRAIN_ITERS: requeued"
    scontrol requeue "$SLURM_JOB_ID" || {
        say "error: this cluster does not let a job requeue itself; submit it again, it continues"
        exit 1
    }
}
