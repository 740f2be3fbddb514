"""Packing: samples of any length become training rows of --seq-length tokens.

    SampleStore                    token ids and targets of each sample (mkd.data.sources)
      -> cut                       pieces: parts of a sample, each of which fits a row          row_plan.py
      -> pack | one_per_row        RowPlan: the pieces of each row, composed once               row_plan.py
      -> RowLayout.row             tensors of one row: tokens, labels, masks, segment bounds    row_layout.py
      -> SampleRows                endless stream: row i is a function of i                     streams.py
      -> BlendOfRows               several streams in proportion to their weights               streams.py
      -> RowSets                   training, validation and test set                            row_sets.py
      -> Megatron's data loader    collates --micro-batch-size rows
      -> KDBatch.from_sample       one microbatch (mkd.data.batch)

With a teacher that has another tokenizer a sample has k views: the same text in the tokens of the student and of each
such teacher. The files aligned_plan, aligned_layout and aligned_streams are the same pipeline over k views: a piece has
to fit the rows of all views, and a row dictionary holds one more row per teacher. The pipeline for one tokenizer is
kept beside it, since one length per piece packs in almost linear time, and since the order of its rows is part of every
checkpoint.

What packing trades: best fit decreasing leaves a few percent of padding and cuts only samples that are longer than a
row, so no token is read without its own context and none is lost. Concatenating and cutting (Megatron's default) has no
padding, but samples attend to each other and most rows begin in the middle of one.
"""
