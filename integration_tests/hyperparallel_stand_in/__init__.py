"""A double of HyperParallel 1.0 on MindSpore for CPU ranks: what this project's calls mean, over device_mesh.

`install` puts it into `sys.modules` under the library's dotted names; then a program of `engines.hyperparallel` is
executed as it is. It models what the calls compute, from HyperParallel's guides and source:

- meshes:     views of a flat world, sub-meshes and their groups. Axes that were given the backend "fake" have none.
- tensors:    DTensors of equal parts on one mesh, and redistribution by collectives with gradients.
- shards:     `shard_module`: parameters are cut, DTensors that go in and out of a module are redistributed by hooks.
- units:      `fully_shard` on one or two axes: shards of rows, gathered for a forward and a backward pass, gradients
              reduced over shards and over every axis on which a parameter is replicated, tensor parallelism included.
- contexts:   context parallelism as hooks on the core of attention, for whatever the core is.
- stages:     pipeline stages and the order of 1F1B and interleaved 1F1B.
- recompute:  activations that are computed again in the backward pass.
- backward:   `Tensor.backward` and `.grad`, by the hooks of MindSpore that HyperParallel uses itself.

Not modelled: memory, streams and overlap (prefetch lists are checked and kept, nothing else), operators on DTensors
(they raise), the flash attention operator, meta devices, offloading, state dicts. What is called with an argument that
is not modelled raises NotImplementedError.
"""

from __future__ import annotations

from hyperparallel_stand_in.install import install

__all__ = ["install"]
