"""The embedding layer."""

import torch
from torch import Tensor, nn

from liger_kernel.ops._op import require
from liger_kernel.ops.embedding import embedding


class LigerEmbedding(nn.Module):
    """`nn.Embedding`, with a gradient that is the same bits on every run and summed in fp32.

    Args:
        num_embeddings, embedding_dim: the table's shape; normal values of deviation 1 at first.
        padding_idx: an id whose output is zero, whatever the table holds there, and that gets no
            gradient; negative counts from the end. Its row starts as zeros.
    Raises:
        ValueError: `padding_idx` outside the table.
    """

    def __init__(self, num_embeddings: int, embedding_dim: int, padding_idx: int | None = None):
        super().__init__()
        if padding_idx is not None:
            require(
                -num_embeddings <= padding_idx < num_embeddings,
                f"LigerEmbedding: padding_idx must lie within the {num_embeddings} rows; got {padding_idx}.",
            )
            padding_idx %= num_embeddings
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx = padding_idx
        self.weight = nn.Parameter(torch.empty(num_embeddings, embedding_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal values, and zeros in the row of `padding_idx`."""
        nn.init.normal_(self.weight)
        if self.padding_idx is not None:
            with torch.no_grad():
                self.weight[self.padding_idx].zero_()

    def forward(self, indices: Tensor) -> Tensor:
        """`[*]` -> `[*, embedding_dim]`."""
        return embedding(indices, self.weight, self.padding_idx)

    def extra_repr(self) -> str:
        sizes = f"{self.num_embeddings}, {self.embedding_dim}"
        return sizes if self.padding_idx is None else f"{sizes}, padding_idx={self.padding_idx}"
