"""Fills inputs of a model that its clients do not send: the size of the picture for a detector that scales
its boxes itself (`orig_target_sizes`), a mask of ones (`pixel_mask`), and constants of model.toml: a `value`,
or token ids of fixed `texts`, which turn a model of pictures and words into one of pictures."""
