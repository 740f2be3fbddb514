"""config.json: its keys, and parts of it that model families share, converted to Megatron arguments and back.

reader.py   reads keys; an error names the key
parts.py    the type of a part, and most of the parts
windows.py  sliding windows of attention
rope.py     rope; yarn.py has its yarn type, layer_ropes.py the two ropes of a model with sliding windows
"""
