"""Megatron checkpoints (torch_dist): folders, loading, and the saving of a job.

folder.py        a checkpoint folder: its current iteration, stored arguments, index and tensors
integrity.py     complete and unchanged content
load.py          into the parameters of a frozen model
lazy_save.py     tensor by tensor, without a model
saving.py        the additions to Megatron's saving; claim.py: one job at a time writes
best.py          the checkpoint with the best evaluation; retention.py removes old ones
resume_point.py  the checkpoint that a job continues from; lr_schedule.py: its learning rate
"""
