"""Rollouts: texts that the student writes with the weights that it has at this step.

on_policy.py      `OnPolicy`: the rows of a step whose answers the student writes; rows.py puts them in their places
interface.py      prompts and options in (`Request`, `Decoding`), written tokens out (`WrittenText`)
write.py          `write_texts`: writes on the training ranks, by engine/
engine/           the forward passes and kernels that write tokens
served/           texts that vLLM or SGLang write in their place; own_scores.py computes what they are compared with
offload.py        the optimizer's state in host memory meanwhile
stop_strings.py   strings that end a text
facts.py          measurements of the texts; guard.py stops a student whose texts run away
"""
