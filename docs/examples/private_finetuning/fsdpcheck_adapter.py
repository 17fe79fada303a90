"""What fsdpcheck is given: the private training of this repository, around the models and steps that it draws."""

import torch
from private import PrivateTraining

from fsdpcheck.adapter import ArithmeticRule, FactorRule, Features


class Trainer:
    def __init__(self, model, setup):
        self.setup, step = setup, setup.step
        self.training = PrivateTraining(
            model, setup.optimizer, setup.loss.with_reduction("mean"),
            clip_norm=setup.clip_norm, noise_multiplier=step.noise_multiplier,
            expected=step.normaliser, rate=setup.rate, seed=setup.seed,
        )  # fmt: skip
        self.training.module.set_reshard_after_forward(setup.mesh.reshard_after_forward)
        self.named = dict(self.training.module.named_parameters())

    def step(self, batch):
        self.training.step([(micro.inputs, micro.targets) for micro in batch.micro_batches])

    def parameters(self):
        return self.named

    def gradients(self):
        return {name: value.grad for name, value in self.named.items() if value.requires_grad}

    def norms(self):
        return torch.cat(self.training.norms)

    def factors(self):
        return torch.cat(self.training.factors)


class Adapter:
    name = "private.py"
    features = Features(
        promises=frozenset({"private"}),
        accepts=frozenset(
            {
                *("bias", "tokens", "sequence", "padding_idx", "layer-norm", "frozen", "root-parameters"),
                *(
                    "keep-unsharded",
                    "ragged",
                    "wrap-around",
                    "micro-batches",
                    "momentum",
                    "adamw",
                    "float32",
                    "project",
                ),
            }
        ),  # not "rows<ranks", "empty-rank": the head has a row for each rank, and no rank is without samples
        observables=frozenset({"params", "grads", "norms", "factors"}),
        owns_loss_scale=True,  # Opacus divides by the expected batch
        arithmetic=ArithmeticRule(divides_by_share=True),
        factor=FactorRule(eps=1e-6, expression="reciprocal", nested=True),  # C / (norm of norms + 1e-6)
        reasons={"plain": "every step is private"},
    )

    def build(self, model, setup):
        return Trainer(model, setup)


adapter = Adapter()
