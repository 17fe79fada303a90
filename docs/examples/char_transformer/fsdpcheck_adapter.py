"""What fsdpcheck is given: the sharding of this repository, around the models and steps that it draws."""

from sharded import Sharded, load, save

from fsdpcheck.adapter import ORDINARY, PLAIN_REASONS, Features, GlobalNormRule, TrainingLoop


class Loop(TrainingLoop):
    def __init__(self, model, setup):
        sharded = Sharded(model, [name for unit in setup.units for name in unit])
        super().__init__(sharded, setup, optimizer=setup.optimizer(sharded.shards()))

    def clip(self, limit):
        return self.model.clip(limit)

    def parameters(self):
        return self.model.whole()

    def gradients(self):
        return self.model.gradients()

    def save(self, folder):
        save(folder, self.model, self.optimizer)

    def load(self, folder):
        load(folder, self.model, self.optimizer)


class Adapter:
    name = "sharded.py"
    features = Features(
        promises=frozenset({"plain", "global-norm", "state"}),
        accepts=ORDINARY
        - {
            "hsdp",  # one flat group of ranks
            "frozen",  # a flat buffer is trained as a whole
            "parameter-groups",
            "keep-unsharded",
            "no-sync",  # each backward reduces
            "inference-mode",
            "bfloat16",
        },
        observables=frozenset({"params", "grads", "grad_norm"}),
        global_norm=GlobalNormRule(nested=False),
        reasons={**PLAIN_REASONS, "lifecycle": "announces no moments"},
    )

    def build(self, model, setup):
        return Loop(model, setup)


adapter = Adapter()
