"""Llama, Qwen, two mixtures of experts and ViT of `transformers`, built from configurations: nothing is downloaded.

$ pip install transformers
$ fsdpcheck run --model docs/examples/of_transformers.py:llama --batch docs/examples/of_transformers.py:batch
$ fsdpcheck run --model docs/examples/of_transformers.py:vit --batch docs/examples/of_transformers.py:images
"""

import torch
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

VOCABULARY, CONTEXT, CLASSES = 16, 4, 4
WIDTHS = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXT = WIDTHS | {
    "vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT, "num_key_value_heads": 1, "head_dim": 4,
    "bos_token_id": 0, "eos_token_id": 0, "tie_word_embeddings": False, "attn_implementation": "sdpa",
}  # fmt: skip


class Logits(nn.Module):
    """What fsdpcheck asks of a model: a tensor in, one row of outputs a sample out."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor) -> Tensor:  # [b, T] -> [b, T, V], or images [b, 1, 4, 4] -> [b, C]
        if inputs.is_floating_point():
            return self.model(pixel_values=inputs).logits
        positions = torch.arange(inputs.shape[1], device=inputs.device).expand_as(inputs)
        return self.model(input_ids=inputs, position_ids=positions, use_cache=False).logits


def llama() -> nn.Module:
    return Logits(LlamaForCausalLM(LlamaConfig(**TEXT)))


def qwen3() -> nn.Module:
    return Logits(Qwen3ForCausalLM(Qwen3Config(**TEXT)))


def qwen2_moe() -> nn.Module:
    sizes = {"moe_intermediate_size": 8, "shared_expert_intermediate_size": 8}
    configuration = Qwen2MoeConfig(**TEXT, **sizes, num_experts=4, num_experts_per_tok=1)
    # The default runs all experts in one grouped product, which torch has in float32 and narrower alone.
    configuration._experts_implementation = "eager"
    return Logits(Qwen2MoeForCausalLM(configuration))


def mixtral() -> nn.Module:
    configuration = MixtralConfig(**TEXT, num_local_experts=4, num_experts_per_tok=2)
    configuration._experts_implementation = "eager"
    return Logits(MixtralForCausalLM(configuration))


def vit() -> nn.Module:
    image = {"image_size": 4, "patch_size": 2, "num_channels": 1, "num_labels": CLASSES}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return Logits(ViTForImageClassification(ViTConfig(**WIDTHS, **image, **dropout, attn_implementation="sdpa")))


def batch(n: int) -> tuple[Tensor, Tensor]:
    """n samples: tokens [n, T], and the tokens that follow them [n, T]."""
    tokens = torch.randint(VOCABULARY, (n, CONTEXT + 1))
    return tokens[:, :-1], tokens[:, 1:]


def images(n: int) -> tuple[Tensor, Tensor]:
    """n samples: images [n, 1, 4, 4], and their classes [n]."""
    return torch.randn(n, 1, 4, 4), torch.randint(CLASSES, (n,))
