"""Primitives and kernels that stay calls of eager's kernels though they could be loops, and why."""

from __future__ import annotations

#: By the name of the op. What is not here and not lowered is a library's work: products, convolutions,
#: attention, sorting, transforms, linear algebra.
CALLED: dict[str, str] = {
    "logcumsumexp": "two functions for each value that waits for the one before",
    "index_put": "updates of few rows, in place where nobody reads the old value; see ordered.py",
    "scatter": "the same",
    "scatter_add": "the same",
    "scatter_reduce": "places may repeat: eager's order decides; in place where nobody reads the old value",
    "rand": "eager's numbers in eager's order, unless random numbers are our own",
    "randn": "the same",
    "max_pool3d_with_indices": "rare",
    "adaptive_max_pool2d": "windows of several sizes",
    "grid_sampler_2d": "four reads at places that are data",
    "im2col": "a copy, for products that read it",
    "col2im": "sums over scattered places",
    "_embedding_bag": "rows of varying number for each sum",
    "searchsorted": "a search for each element: branches that no vector takes together",
    "bucketize": "the same",
    "masked_select": "how many there are is data",
    "nonzero": "the same",
    "masked_scatter": "each value waits for the count of those before",
    "digamma": "rare; the C library has none",
    "erfinv": "rare; the C library has none",
    "nextafter": "rare",
}
