"""The GPT-2 of `transformers`, built from a configuration: random weights, nothing is downloaded.

$ pip install transformers
$ fsdpcheck run --model docs/examples/gpt2.py:build --batch docs/examples/gpt2.py:batch
"""

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

VOCABULARY, CONTEXT = 16, 4


class Logits(nn.Module):
    """What fsdpcheck asks of a model: a tensor in, one row of outputs a sample out."""

    def __init__(self, gpt2: GPT2LMHeadModel) -> None:
        super().__init__()
        self.gpt2 = gpt2

    def forward(self, tokens: Tensor) -> Tensor:  # [b, T] -> [b, T, V]
        # By itself GPT-2 looks up one row of positions [1, T] and adds it to every sample's tokens: then the gradient
        # that reaches the embedding of positions is already summed over the samples, and none of them has a norm.
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        # Its output is an object with several tensors in it; the cache is for generating text.
        return self.gpt2(input_ids=tokens, position_ids=positions, use_cache=False).logits


def configuration(**changes: object) -> GPT2Config:
    """A GPT-2 of two blocks of width 8; `changes` are other values of its configuration."""
    sizes = {"vocab_size": VOCABULARY, "n_positions": CONTEXT, "n_embd": 8, "n_layer": 2, "n_head": 2}
    # Dropped activations would be other ones in every world: no two layouts of ranks would be comparable.
    without_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    functions = {
        # PyTorch's own GELU and attention are one operator each, and have a surrogate in the exact tier. GPT-2's
        # default "gelu_new" is the same function spelled out with pow and tanh.
        "activation_function": "gelu_pytorch_tanh",
        "attn_implementation": "sdpa",
    }
    # Tied to the embedding of tokens, the head has to be in its unit, the root, as it is here; but a norm of one
    # sample's gradient then needs the two uses together, which not every implementation forms.
    ends = {"tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 0}  # the defaults lie outside 16 tokens
    return GPT2Config(**(sizes | without_dropout | functions | ends | changes))


def build() -> nn.Module:
    return Logits(GPT2LMHeadModel(configuration()))


def batch(n: int) -> tuple[Tensor, Tensor]:
    """n samples: tokens [n, T], and the tokens that follow them [n, T]."""
    tokens = torch.randint(VOCABULARY, (n, CONTEXT + 1))
    return tokens[:, :-1], tokens[:, 1:]
