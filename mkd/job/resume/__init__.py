"""A job that continues from a checkpoint: which one, and what of it may differ from the command line.

selection.py   the checkpoint in --load: chosen before any check, and agreed on by all ranks at the end
compare.py     model, frozen weights, teacher and objective of the checkpoint against those of the job
optimizer.py   the optimizer's kind, precision, layout and schedule
position.py    the position in the training data, prompts and tasks
"""
