"""Data: text, chat and indexed token files (sources), rows of them (packing), and the microbatch (batch.KDBatch)."""
