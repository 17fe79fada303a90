"""A wrong implementation whose import replaces every public callable of torch and of fsdpcheck's judge."""

from __future__ import annotations

from replacing import replace_everything
from unsharded import Toy

replace_everything()


class Patching(Toy):
    """No gradient is reduced: right on one rank alone."""

    name = "patching everything"


adapter = Patching()
