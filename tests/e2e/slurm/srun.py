"""Stands in for SLURM's srun: starts the tasks of a step on this machine, and passes a signal on to them.

STAND_IN_NODES and STAND_IN_TASKS (a node) say how many, or --nodes and --ntasks. SIGTERM is passed on too. The words
that it was given are added to the file STAND_IN_CALLS. STAND_IN_SIGNALS is JSON: number of the attempt -> [forward
step, signal]. Once a task has written the file STAND_IN_HELD in this forward step, the tasks get the signal, as those
of a step do some time before its end.
"""

import itertools
import json
import os
import signal
import subprocess
import sys
import time

words = sys.argv[1:]
command = words[words.index("bash") :]
options = dict(itertools.pairwise(words))
with open(os.environ["STAND_IN_CALLS"], "a") as calls:
    calls.write(json.dumps(words) + "\n")

nodes = int(options.get("--nodes", os.environ["STAND_IN_NODES"]))
tasks = int(options["--ntasks"]) // nodes if "--ntasks" in options else int(os.environ["STAND_IN_TASKS"])
log = os.open(options["--output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
step = []
for number in range(nodes * tasks):
    task = {
        "SLURM_PROCID": number,
        "SLURM_LOCALID": number % tasks,
        "SLURM_NODEID": number // tasks,
        "SLURM_STEP_NUM_TASKS": nodes * tasks,
        "SLURM_STEP_NUM_NODES": nodes,
    }
    environment = os.environ | {name: str(value) for name, value in task.items()}
    step.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))


def end(*_: object) -> None:
    for task in step:
        task.terminate()


signal.signal(signal.SIGTERM, end)
plan = json.loads(os.environ.get("STAND_IN_SIGNALS", "{}"))
name = plan.get(os.environ.get("SLURM_RESTART_COUNT", "0"), (None, None))[1]
while any(task.poll() is None for task in step):
    if any(task.poll() for task in step):  # --kill-on-bad-exit
        for task in step:
            task.kill()
    if name is not None and os.path.exists(os.environ["STAND_IN_HELD"]):
        os.unlink(os.environ["STAND_IN_HELD"])
        for task in step:
            task.send_signal(signal.Signals[name])
        name = None
    time.sleep(0.01)
sys.exit(max(abs(task.returncode) for task in step))
