"""What the models read: text files, indexed token files and the batches made from them."""
