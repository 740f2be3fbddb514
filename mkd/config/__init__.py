"""The configuration of a run: flags, values, and the checks between them.

kd_fields.py      one field per --kd-* flag, with its help text
kd_config.py      the checked fields, and the list of their checks
checks/           those checks, one file per theme
values.py         choices and pairs of layers; loss_spec.py, schedules.py and lora.py have the other kinds of values
bounds.py         bounds of every number, Megatron's too
flags.py          the command line, and flags that contradict distillation
command_words.py  its words before they are parsed; flag_checks.py refuses names that no flag has
run_file.py       flags in YAML files
run_state.py      the state of a run that is stored with its checkpoints
check_list.py     lists of checks, for a job and for the doctor
megatron/         Megatron's arguments; it imports from the files above, and none of them imports from it

A new flag is a field of kd_fields.py with its help text, and, if it is a number, a row of bounds.py. Its contradictions
to other flags are refused in checks/ or megatron/checks/, by a function that the list in kd_config.py,
megatron/arguments.py or mkd/job/checks.py names.
"""
