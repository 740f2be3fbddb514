# shellcheck shell=bash
# Progress of a job, and the decision to requeue it; train.sbatch sources this file.
#
# The progress of a training is the tracker: latest_checkpointed_iteration.txt in SAVE names the last complete checkpoint.
# The exit status is not enough: it is 0 after a signal as well as after the last step, and a job that was killed may
# have saved just before. The progress of a teacher cache is the number of complete shards in CACHE_OUT; its writer exits
# with status 0 only when everything is written.
# ATTEMPTS in SAVE has one line "JOB RESTART NUMBER" per attempt: the iteration or number of shards at its start.

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

# Number of this job's last attempts that started at the current progress.
attempts_from_here() {
    [[ -f "$SAVE/ATTEMPTS" ]] || { echo 0; return; }
    awk -v job="$SLURM_JOB_ID" -v here="$(saved)" \
        '$1 == job { n = $3 == here ? n + 1 : 0 } END { print n + 0 }' "$SAVE/ATTEMPTS"
}

where() {
    if [[ -n "${CACHE_OUT:-}" ]]; then echo "shard $(saved)"; else echo "iteration $(saved) of $TRAIN_ITERS"; fi
}

# Exits when nothing is left to do, or after MAX_ATTEMPTS attempts without progress. $1 is the exit status of the attempt
# that has ended, if there is one.
stop_if_done_or_stuck() {
    if [[ -n "${CACHE_OUT:-}" && "${1:-}" == 0 ]] || [[ -z "${CACHE_OUT:-}" && "$(saved)" -ge "$TRAIN_ITERS" ]]; then
        say "$(where) is saved: done"
        exit 0
    fi
    if [[ -n "${1:-}" && "$(tail -n 1 "$SAVE/ATTEMPTS")" != "$SLURM_JOB_ID "* ]]; then
        say "error: another job has started in $SAVE since ($(tail -n 1 "$SAVE/ATTEMPTS")), so this one is not requeued"
        exit 1
    fi
    if (($(attempts_from_here) >= MAX_ATTEMPTS)); then
        say "error: $MAX_ATTEMPTS attempts in a row started at $(where) and saved nothing beyond it, so this job" \
            "is not requeued. Find the reason in $LOGS (or is SAVE, $SAVE, not the folder in --save?), fix it, and" \
            "submit the job again"
        exit 1
    fi
}

# Exits after a first attempt if the error in the file $1 is one of the configuration, which mkd/cli/torchrun_report.py
# marks: another attempt would end in the same way. A later attempt has flags with which the first one ended otherwise:
# its node may lack a GPU, or a port be in use.
stop_if_misconfigured() {
    if [[ "${SLURM_RESTART_COUNT:-0}" == 0 && -f "$1" ]] && grep -q '"is_configuration": true' "$1"; then
        say "error: the flags or the environment are wrong, and another attempt would end in the same way, so this job" \
            "is not requeued. Correct what $1 names, and submit the job again"
        exit 1
    fi
}

# $1 is the log of the attempt.
note_attempt() {
    say "attempt ${SLURM_RESTART_COUNT:-0} starts at $(where); follow it in $1"
    echo "$SLURM_JOB_ID ${SLURM_RESTART_COUNT:-0} $(saved)" >>"$SAVE/ATTEMPTS"
}

# Repeats the error lines of commands in the log $1, each once: all ranks of a wrong command line report the same one.
show_errors() {
    [[ ! -f "$1" ]] || awk '/^[a-zA-Z0-9_.-]+( [a-z-]+)?: error: / && !seen[$0]++ && n++ < 3' "$1"
}

requeue() {
    say "$(where): requeued"
    scontrol requeue "$SLURM_JOB_ID" || {
        say "error: this cluster does not let a job requeue itself; submit it again, and it resumes"
        exit 1
    }
}
