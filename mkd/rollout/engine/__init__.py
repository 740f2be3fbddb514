"""Forward passes that write tokens on the training ranks, in every layout.

cached.py            `write_cached`: one token of each text per pass, with cached keys and values
uncached.py          `write_uncached`: passes over whole texts, for students whose keys and values cannot be cached
forward.py           a forward pass of the student through Megatron's schedules
sampler.py           `NextToken`: the most probable token, or one sampled alike in every layout
sampling_kernel.py   its Triton kernel
attention.py         attention to cached keys and values, inside Megatron's modules
cache_attention.py   its definition
attention_kernel.py  its Triton kernel
token_layout.py      tensor parallelism of passes over one token per text
block_sum.py         outputs of layers in such passes, summed over ranks by the Triton kernel in block_sum_kernel.py
captured_step.py     such a pass as a CUDA graph
"""
