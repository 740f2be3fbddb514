"""A training job, from its command line to the training loop.

checks.py          the checks of a job, in order; each fills a part of the draft
job.py             the checked job
data.py            its data
tokenizers.py      the student's tokenizer, and teachers sorted by whether they share it
cross_tokenizer.py teachers with other tokenizers
teachers/          its teachers, before they are built
rollout/           texts that its student writes
plan/              the summary that is printed before it trains
memory/            the memory that it needs
launch.py          builds its parts on this rank, and starts the training
training_loop.py   the schedule, the NaN check and the metrics in Megatron's training loop
resume/            a job that continues from a checkpoint
doctor/            a job that is examined, on any machine
cache_build/       a job that fills a teacher cache
teacher_service.py a job that runs a teacher for others
"""
