"""Hugging Face model folders: families, import, export.

config_json/    config.json <-> Megatron arguments, in parts
layouts.py      the rows and columns of tensors inside a Megatron parameter
tables.py       the tensors of each Megatron parameter
latent.py       parts and tensors of latent attention and its mixtures; gpt_oss.py: those of gpt-oss
families/       model families, made of such parts and tables
folder.py       a folder, read; check.py compares its tensors with config.json
load.py         into the parameters of a model; import_.py: into a Megatron checkpoint
writer.py       writes a folder
export.py       of a Megatron checkpoint, into a folder; snapshot.py: during training
whole_model.py  the rest of a vision-language model; prediction_heads.py: heads that no text model reads
model_card.py   the README.md of a folder
"""
