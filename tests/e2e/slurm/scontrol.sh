# shellcheck shell=bash
# Stands in for SLURM's scontrol. STAND_IN_REQUEUED is a file that says: this job was requeued.
set -euo pipefail
case "$1 $2" in
    "show hostnames") printf '127.0.0.1\nnode2\n' ;;
    "requeue "*) echo "$2" >>"$STAND_IN_REQUEUED" ;;
    *) exit 1 ;;
esac
