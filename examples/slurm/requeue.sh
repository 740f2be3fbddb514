# shellcheck shell=bash
# How far a job is, and whether it is to start again: train.sbatch sources this.
#
# Of a training only the tracker counts: latest_checkpointed_iteration.txt in SAVE, which names the last whole
# checkpoint. A job that was stopped by a signal ends with status 0 like one that is done, and one that was killed may
# have saved just before. Of a writer of a teacher cache, in CACHE_OUT, the number of whole shards counts; it ends with
# status 0 only when everything is written.
# ATTEMPTS in SAVE has a line "JOB RESTART NUMBER" for each attempt: the iteration or number of shards where it began.

say() {
    printf '%s train.sbatch: %s\n' "$(date '+%F %T')" "$*"
}

# The iteration that the tracker names, or the number of shards; 0 if there is none.
saved() {
    local tracker="$SAVE/latest_checkpointed_iteration.txt" text="" shards=()
    if [[ -n "${CACHE_OUT:-}" ]]; then
        shopt -s nullglob
        shards=("$CACHE_OUT"/*.json)
        shopt -u nullglob
        echo "${#shards[@]}"
        return
    fi
    [[ ! -f "$tracker" ]] || text="$(<"$tracker")"
    if [[ "$text" =~ ^[0-9]+$ ]]; then echo "$text"; else echo 0; fi
}

# How many of this job's last attempts began where it is now.
attempts_from_here() {
    [[ -f "$SAVE/ATTEMPTS" ]] || { echo 0; return; }
    awk -v job="$SLURM_JOB_ID" -v here="$(saved)" \
        '$1 == job { n = $3 == here ? n + 1 : 0 } END { print n + 0 }' "$SAVE/ATTEMPTS"
}

where() {
    if [[ -n "${CACHE_OUT:-}" ]]; then echo "shard $(saved)"; else echo "iteration $(saved) of $TRAIN_ITERS"; fi
}

# Ends the script when nothing is left to do, or when attempt after attempt has saved nothing. $1 is the exit status of
# the attempt that has ended, if one has.
stop_if_done_or_stuck() {
    if [[ -n "${CACHE_OUT:-}" && "${1:-}" == 0 ]] || [[ -z "${CACHE_OUT:-}" && "$(saved)" -ge "$TRAIN_ITERS" ]]; then
        say "$(where) is saved: done"
        exit 0
    fi
    if [[ -n "${1:-}" && "$(tail -n 1 "$SAVE/ATTEMPTS")" != "$SLURM_JOB_ID "* ]]; then
        say "error: another job has begun in $SAVE since ($(tail -n 1 "$SAVE/ATTEMPTS")), so this one does not start again"
        exit 1
    fi
    if (($(attempts_from_here) >= MAX_ATTEMPTS)); then
        say "error: $MAX_ATTEMPTS attempts in a row began at $(where) and saved none beyond it, so this job" \
            "does not start again. The reason is in $LOGS; when it is mended, submit the job anew"
        exit 1
    fi
}

note_attempt() {
    say "attempt ${SLURM_RESTART_COUNT:-0} begins at $(where)"
    echo "$SLURM_JOB_ID ${SLURM_RESTART_COUNT:-0} $(saved)" >>"$SAVE/ATTEMPTS"
}

requeue() {
    say "$(where): requeued"
    scontrol requeue "$SLURM_JOB_ID" || {
        say "error: this cluster does not let a job requeue itself; submit it again, it continues"
        exit 1
    }
}
