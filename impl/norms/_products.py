"""A layer that multiplies with several matrices inside: each product y = x W^T + b is a Linear of its own.

Once the activations and backprops of the products are known, no value of a parameter is needed any more, and every
exact form of ``linear`` applies. A parameter that holds the matrices of several products, one below the other, has the
gradients of all of them, one below the other.

Legend: B samples, T positions, d input features, p output features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from . import _terms, linear


@dataclass(frozen=True)
class Product:
    """``weight`` and ``bias``: attributes of the layer that hold this product's, "" for none or a frozen one.

    ``activations_BTd`` is None where there is no weight: a bias alone.
    """

    weight: str
    bias: str
    activations_BTd: Tensor | None
    backprops_BTp: Tensor


@dataclass(frozen=True)
class Products:
    """The products of one call of a layer, in the order of their rows; ``shapes``: of its trainable parameters."""

    products: tuple[Product, ...]
    shapes: Mapping[str, torch.Size]

    def only(self, rows: Tensor) -> Products:
        """Of some samples only, ``rows`` [b'] their numbers."""
        return self._each(lambda tensor: tensor[rows])

    def lifted(self, lift: Callable[[Tensor], Tensor]) -> Products:
        """With ``lift`` of every tensor."""
        return self._each(lift)

    def squared_norm(self, of_weight: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """[B]: squared norms over all trainable parameters; ``of_weight(activations, backprops)`` of each matrix."""
        terms = []
        for product in self.products:
            if product.weight and product.activations_BTd is not None:
                terms.append(of_weight(product.activations_BTd, product.backprops_BTp))
            if product.bias:
                terms.append(linear.bias_squared_norm(product.backprops_BTp))
        if not terms:
            return self.products[0].backprops_BTp.new_zeros(len(self.products[0].backprops_BTp))
        return torch.stack(terms).sum(0)

    def per_sample_gradient(self) -> dict[str, Tensor]:
        """{attribute: [B, *shape]}."""
        rows: dict[str, list[Tensor]] = {}
        for product in self.products:
            g_BTp = product.backprops_BTp
            if product.weight and product.activations_BTd is not None:
                rows.setdefault(product.weight, []).append(g_BTp.transpose(1, 2) @ product.activations_BTd)
            if product.bias:
                rows.setdefault(product.bias, []).append(g_BTp.sum(1))
        return {name: torch.cat(parts, 1).view(-1, *self.shapes[name]) for name, parts in rows.items()}

    def weighted_gradient(self, weights_B: Tensor) -> dict[str, Tensor]:
        """{attribute: [*shape]}: sum of the samples' gradients weighted by ``weights_B``; none of them is formed."""
        rows: dict[str, list[Tensor]] = {}
        for product in self.products:
            g_Np = _terms.scaled(product.backprops_BTp, weights_B).flatten(0, 1)
            if product.weight and product.activations_BTd is not None:
                rows.setdefault(product.weight, []).append(g_Np.t() @ product.activations_BTd.flatten(0, 1))
            if product.bias:
                rows.setdefault(product.bias, []).append(g_Np.sum(0))
        return {name: torch.cat(parts, 0).view(self.shapes[name]) for name, parts in rows.items()}

    def _each(self, change: Callable[[Tensor], Tensor]) -> Products:
        changed = [
            replace(
                product,
                activations_BTd=None if product.activations_BTd is None else change(product.activations_BTd),
                backprops_BTp=change(product.backprops_BTp),
            )
            for product in self.products
        ]
        return replace(self, products=tuple(changed))
