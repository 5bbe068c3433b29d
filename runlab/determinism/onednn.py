"""Large matrix products of compiled programs by oneDNN, on CPUs where MKL leaves half of a core unused.

Torch multiplies float32 matrices with MKL. On CPUs that are not Intel's, MKL takes its code for AVX2: on one
core of AMD's Zen 5, a product of 256 x 256 x 256 runs at 99 GFLOP/s with MKL and at 205 with oneDNN, which
takes AVX-512. Zen 4 computes 512 bits in two halves and gains nothing: with two threads an update of SAC on
Hopper takes 4.1 ms with MKL, and 4.8 with oneDNN, which wants its inputs copied. Torch itself calls oneDNN
for constant weights only, so a pass over the compiled graph replaces products here. A small product stays
with MKL: a call of oneDNN takes about 14 us.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from runlab.machine import cpu_family, cpu_identity

_LARGE = 900_000  # multiplications, such as 256 x 14 x 256
_ZEN_5 = 26  # the family of these CPUs
_aten = torch.ops.aten


def _product(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    if bias is not None:
        bias = bias.contiguous()  # oneDNN ignores the stride
    # Of oneDNN's float32 products torch has no public name: this is the operation that its compiler emits.
    return torch.ops.mkldnn._linear_pointwise.default(a, b.t(), bias, "none", (), "")  # type: ignore[no-any-return]


def _shape(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1])


torch.library.define("runlab::product", "(Tensor a, Tensor b, Tensor? bias) -> Tensor")
torch.library.impl("runlab::product", "CPU", _product)
torch.library.register_fake("runlab::product", _shape)


def onednn_is_faster() -> bool:
    """True on AMD's CPUs from Zen 5 on."""
    vendor, flags = cpu_identity()
    full_width = vendor == "AuthenticAMD" and cpu_family() >= _ZEN_5 and "avx512f" in flags
    return full_width and torch.backends.mkldnn.is_available()


class ProductsByOneDNN(CustomGraphPass):
    """Replaces a b and bias + a b in a graph of the compiler, for large float32 matrices on the CPU."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        for node in list(graph.nodes):
            arguments: Any = node.args
            if node.target is _aten.mm.default:
                (a, b), bias = arguments, None
            elif node.target is _aten.addmm.default and not node.kwargs:
                bias, a, b = arguments
            else:
                continue
            first, size = a.meta["val"], b.meta["val"].shape[1]
            is_bias = bias is None or bias.meta["val"].shape == (size,)
            floats_on_cpu = first.device.type == "cpu" and first.dtype == torch.float32
            if floats_on_cpu and is_bias and first.numel() * size >= _LARGE:
                with graph.inserting_before(node):
                    by_onednn = graph.call_function(torch.ops.runlab.product.default, (a, b, bias))
                by_onednn.meta.update(node.meta)
                node.replace_all_uses_with(by_onednn)
                graph.erase_node(node)

    def uuid(self) -> bytes:
        """The digest of this file: a program from the compiler's cache was made with the same pass."""
        return get_hash_for_files((__file__,))
