"""Megatron's arguments of a job and of its teachers.

arg_names.py      their names, with the roles that each has in a student, a teacher and a checkpoint
architecture.py   the architecture of a model in them
layouts.py        the parallel layouts of student and teacher
checks/           refusals, one file per theme
arguments.py      the list of the checks, which also complete the arguments and make them Megatron's global ones
teacher_args.py   the arguments of a teacher
data_args.py      the files of the data, and the configuration of the datasets
"""
