"""Data parallelism: a trial's gradients are the exact mean over its global batch (G2).

`reducer` sums gradients over ranks by what `weights` says each part of a batch counts. `batchnorm`
does the like for statistics; `collectives` is for all else that ranks tell each other. `replicas`
makes models the same on all ranks and watches that they stay so.
"""
