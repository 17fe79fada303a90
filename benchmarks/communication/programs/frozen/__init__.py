"""A third of the pairs, over all classes: written and fixed before fsdpcheck had run any of them (``frozen.json``)."""
